"""Which steps are found, by whatever makes them, and what becomes of a script's own profiler."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

pytestmark = pytest.mark.distributed
WINDOW = ("--skip", "2", "--warmup", "1", "--steps", "2", "-o", "run")
MODEL = """
import torch, sys
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train_step():
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def read_run(tmp_path: Path, name: str = "run") -> dict[str, Any]:
    return json.loads((tmp_path / name / "run.json").read_text())  # type: ignore[no-any-return]


def states(run: dict[str, Any]) -> list[str]:
    return [step["state"] for step in run["ranks"][0]["steps"]]


def test_an_optimizer_makes_steps(z3trace: Command, script: Script, tmp_path: Path) -> None:
    done = z3trace("record", *WINDOW, script(MODEL + "for _ in range(7): train_step()"))
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path)
    assert run["profiled_steps"] == [3, 4]
    assert len(states(run)) == 7
    assert run["modules"] == ["", "0", "1", "2"]


def test_the_first_step_can_be_recorded(z3trace: Command, script: Script, tmp_path: Path) -> None:
    name = script(MODEL + "for _ in range(3): train_step()")
    done = z3trace("record", "--skip", "0", "--warmup", "0", "--steps", "2", "-o", "run", name)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path)["profiled_steps"] == [0, 1]


def test_several_optimizers_do_not_add_up(z3trace: Command, script: Script, tmp_path: Path) -> None:
    text = (
        MODEL
        + """
other = torch.optim.Adam(nn.Linear(2, 2).parameters())
for _ in range(7):
    train_step()
    other.step()
"""
    )
    z3trace("record", *WINDOW, script(text))
    assert len(states(read_run(tmp_path))) == 7


def test_evaluation_before_training_begins_no_step(z3trace: Command, script: Script, tmp_path: Path) -> None:
    text = (
        MODEL
        + """
with torch.no_grad():
    nn.Linear(3, 3)(torch.ones(3))
nn.ReLU()(torch.ones(3))
for _ in range(7): train_step()
"""
    )
    z3trace("record", *WINDOW, script(text))
    assert read_run(tmp_path)["modules"] == ["", "0", "1", "2"]


def test_the_script_may_say_where_a_step_ends(z3trace: Command, script: Script, tmp_path: Path) -> None:
    text = (
        "import z3trace\n"
        + MODEL
        + """
for _ in range(7):
    train_step()
    train_step()
    z3trace.step()
"""
    )
    done = z3trace("record", *WINDOW, script(text))
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path)["profiled_steps"] == [3, 4]
    assert len(states(read_run(tmp_path))) == 8  # two were counted before the first word, six afterwards
    plain = subprocess.run([*python(), script(text)], cwd=tmp_path, timeout=60, check=False)
    assert plain.returncode == 0


def test_a_function_may_be_a_step(z3trace: Command, script: Script, tmp_path: Path) -> None:
    script(
        MODEL + "class Loop:\n    def epoch(self):\n        train_step(); train_step(); return 3", "inner.py"
    )
    name = script("import inner\nfor _ in range(7): assert inner.Loop().epoch() == 3")
    done = z3trace("record", *WINDOW, "--step-from", "inner:Loop.epoch", name)
    assert done.returncode == 0, done.stderr
    assert len(states(read_run(tmp_path))) == 7


@pytest.mark.parametrize(
    ("given", "said"),
    [("train_step", "is not MODULE:FUNCTION"), ("__main__:train_step", "call z3trace.step() there")],
)
def test_step_from_is_checked(z3trace: Command, script: Script, given: str, said: str) -> None:
    done = z3trace("record", "--step-from", given, script(MODEL))
    assert done.returncode == 2
    assert said in done.stderr


def test_a_missing_function_is_named(z3trace: Command, script: Script) -> None:
    script("", "inner.py")
    done = z3trace("record", "--step-from", "inner:nothing", script("import inner"))
    assert done.returncode == 0
    assert "inner has no nothing" in done.stderr


OWN_PROFILER = (
    MODEL
    + """
from torch.profiler import profile, schedule
def steps(count):
    for _ in range(count): train_step()
BEFORE
with profile() as own:
    steps(INSIDE)
assert any(event.key == "aten::addmm" for event in own.key_averages())
steps(AFTER)
"""
)


@pytest.mark.parametrize(
    ("before", "inside", "after", "recorded"),
    [
        (0, 4, 6, [6, 7]),  # before our window would begin: it begins after theirs
        (3, 4, 6, [9, 10]),  # in our warm-up
        (4, 4, 6, [3]),  # in our window: what is there is kept
        (7, 2, 1, [3, 4]),  # afterwards
    ],
)
def test_a_profiler_of_the_scripts_own_comes_first(
    z3trace: Command,
    script: Script,
    tmp_path: Path,
    before: int,
    inside: int,
    after: int,
    recorded: list[int],
) -> None:
    text = OWN_PROFILER.replace("BEFORE", f"steps({before})").replace("INSIDE", str(inside))
    done = z3trace("record", *WINDOW, script(text.replace("AFTER", str(after))))
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path)["profiled_steps"] == recorded
    assert ("recording gives way" in done.stderr) == (0 < before < 7)


def test_a_profiler_around_everything_leaves_nothing_to_record(z3trace: Command, script: Script) -> None:
    text = OWN_PROFILER.replace("BEFORE", "steps(1)").replace("INSIDE", "8").replace("AFTER", "0")
    done = z3trace("record", *WINDOW, script(text))
    assert done.returncode == 0, done.stderr
    assert "the script's own torch.profiler ran in the steps that were due" in done.stderr


def test_profiling_in_code(script: Script, tmp_path: Path) -> None:
    text = (
        "import sys, z3trace\nassert 'torch' not in sys.modules\n"
        + MODEL
        + """
train_step()
with z3trace.profile("first", skip=1, warmup=1, steps=2) as profiler:
    for _ in range(6): train_step()
assert profiler.directory.name == "first"
profiler = z3trace.Profiler("second", skip=0, warmup=1, steps=2, quiet=True)
profiler.start()
for _ in range(6):
    train_step(); train_step()
    profiler.step()
profiler.stop()
train_step()
try:
    with z3trace.profile("first"): pass
except z3trace.errors.UserError as error:
    print("refused:", error)
"""
    )
    done = subprocess.run(
        [*python(), script(text)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "next: z3trace report first" in done.stderr
    assert done.stderr.count("next:") == 1
    assert "already holds a run" in done.stdout
    for name in ("first", "second"):
        run = read_run(tmp_path, name)
        assert len(run["profiled_steps"]) == 2
        assert (tmp_path / name / "rank0.pt.trace.json.gz").exists()
        assert run["modules"] == ["", "0", "1", "2"]


def test_recorded_inside_a_recording_is_refused(z3trace: Command, script: Script) -> None:
    text = MODEL + "import z3trace\nwith z3trace.profile('inner'): train_step()"
    done = z3trace("record", *WINDOW, script(text))
    assert done.returncode == 1
    assert "this process is being recorded already" in done.stderr


def python() -> list[str]:
    import sys

    return [sys.executable]
