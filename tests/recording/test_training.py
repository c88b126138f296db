"""Recording real trainings with our engine, as a user does: what is in the run, whatever becomes of the script."""

import gzip
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

pytestmark = pytest.mark.distributed

TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
import z3trace.engine as z3

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8)) for _ in range(3)))
config = {"gradient_accumulation_steps": ACCUMULATE, "z3trace": {"unit": "module"}}
engine = z3.initialize(model, optimizer=torch.optim.AdamW, config=config)
for step in range(int(sys.argv[1])):
    for _ in range(ACCUMULATE):
        engine.backward(engine(torch.randn(4, 8)).pow(2).mean())
        engine.step()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
    AFTER_STEP
dist.destroy_process_group()
"""
WINDOW = ("--skip", "2", "--warmup", "1", "--steps", "2")
RECORDED = [3, 4]


def training(after_step: str = "pass", accumulate: int = 1) -> str:
    return TRAIN.replace("AFTER_STEP", after_step).replace("ACCUMULATE", str(accumulate))


def read_trace(directory: Path, rank: int) -> dict[str, Any]:
    with gzip.open(directory / f"rank{rank}.pt.trace.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)  # type: ignore[no-any-return]


def read_run(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())  # type: ignore[no-any-return]


def spans(trace: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(prefix)]
    return sorted(found, key=lambda e: e["ts"])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_traces_show_what_the_engine_counted(
    z3trace: Command, script: Script, tmp_path: Path, ranks: int, accumulate: int
) -> None:
    name = script(training(accumulate=accumulate))
    done = z3trace("record", "--nproc-per-node", str(ranks), *WINDOW, "-o", "run", name, "8")
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        trace = read_trace(tmp_path / "run", rank)
        marks = spans(trace, "ProfilerStep#")
        assert [mark["name"] for mark in marks] == [f"ProfilerStep#{step}" for step in RECORDED]
        said = trace["z3trace"]
        assert (said["rank"], said["world_size"], said["framework"]) == (rank, ranks, "z3trace")
        assert said["profiled_steps"] == RECORDED
        counted = Counter[int]()
        for row in said["collectives"]:
            if row["kind"] == "all_gather":
                counted[row["step"]] += row["count"]
        gathers = spans(trace, "z3::gather ")
        seen = {
            step: sum(mark["ts"] <= e["ts"] < mark["ts"] + mark["dur"] for e in gathers)
            for step, mark in zip(RECORDED, marks, strict=True)
        }
        assert seen == dict(counted)
        assert all(count >= 6 * accumulate for count in seen.values())  # six linear layers in each forward


def test_run_json_describes_the_job(z3trace: Command, script: Script, tmp_path: Path) -> None:
    done = z3trace("record", "--nproc-per-node", "2", *WINDOW, "-o", "run", script(training()), "9")
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "run")
    assert (run["schema"], run["framework"], run["world_size"]) == ("z3trace.run/1", "z3trace", 2)
    assert run["command"][:4] == ["z3trace", "record", "--nproc-per-node", "2"]
    assert run["device"]["kind"] == "cpu"
    assert run["environment"]["OMP_NUM_THREADS"] == "1"
    assert "0.0" in run["modules"]
    assert run["parameters"]["0.0.weight"]["shape"] == [9, 8]
    assert run["parameters"]["0.0.weight"]["numel"] == 72
    assert run["profiled_steps"] == RECORDED
    assert [rank["exit_code"] for rank in run["ranks"]] == [0, 0]
    for rank in run["ranks"]:
        assert [step["state"] for step in rank["steps"]] == [
            "settling", "unprofiled", "settling", "profiled", "profiled", "settling", *["unprofiled"] * 3,
        ]  # fmt: skip
    assert run["problems"] == []
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "rank0.pt.trace.json.gz",
        "rank1.pt.trace.json.gz",
        "run.json",
    ]


def test_the_user_is_told_where_it_is_and_what_to_type(
    z3trace: Command, script: Script, tmp_path: Path
) -> None:
    done = z3trace("record", *WINDOW, script(training()), "6")
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("script-")
    assert f"next: z3trace report runs/{run.name}\n" in done.stderr
    assert done.stdout.startswith("step 0\n")
    assert "USDT" not in done.stderr
    quiet = z3trace("-q", "record", *WINDOW, "-o", "quiet", script(training()), "6")
    assert quiet.stderr == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_in_the_window_keeps_the_steps_before_it(
    z3trace: Command, script: Script, tmp_path: Path, ranks: int
) -> None:
    name = script(training("if step == 3: raise RuntimeError('boom')"))
    done = z3trace("record", "--nproc-per-node", str(ranks), *WINDOW, "-o", "run", name, "9")
    assert done.returncode == 1
    assert "RuntimeError: boom" in done.stderr
    assert "only step 3 recorded of 2 asked for" in done.stderr
    assert "next: z3trace report run" in done.stderr
    run = read_run(tmp_path / "run")
    assert run["profiled_steps"] == [3]
    assert "rank 0: the script raised RuntimeError: boom" in run["problems"]
    for rank in range(ranks):
        assert read_trace(tmp_path / "run", rank)["z3trace"]["profiled_steps"] == [3]


def test_a_killed_rank_is_named_and_the_others_stay_readable(
    z3trace: Command, script: Script, tmp_path: Path
) -> None:
    name = script(training("if step == 6 and dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)"))
    done = z3trace("record", "--nproc-per-node", "2", *WINDOW, "-o", "run", name, "99")
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1: killed by SIGKILL" in done.stderr
    assert "rank 1: killed by SIGKILL" in read_run(tmp_path / "run")["problems"]
    for rank in (0, 1):
        assert read_trace(tmp_path / "run", rank)["z3trace"]["profiled_steps"] == RECORDED


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_in_the_window_the_recorded_steps_are_kept(
    start: Callable[..., "subprocess.Popen[str]"],
    script: Script,
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    name = script(training("if step == 3: dist.barrier(); os.write(1, b'both here\\n'); time.sleep(60)"))
    job = start("record", "--nproc-per-node", "2", *WINDOW, "-o", "run", name, "9")
    assert job.stdout is not None
    here = 0
    while here < 2:
        line = job.stdout.readline()
        assert line, job.communicate()
        here += line == "both here\n"
    job.send_signal(number)
    _, err = job.communicate(timeout=40)
    assert job.returncode == code, err
    assert read_run(tmp_path / "run")["profiled_steps"] == [3]
    for rank in (0, 1):
        assert read_trace(tmp_path / "run", rank)["z3trace"]["profiled_steps"] == [3]


def test_a_script_that_ends_too_soon_is_told_how_many_steps_it_needs(
    z3trace: Command, script: Script, tmp_path: Path
) -> None:
    done = z3trace("record", script(training()), "4")
    assert done.returncode == 0
    assert "made 4 steps, and recording begins after 7" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_ranks_of_torchrun_write_one_run(script: Script, tmp_path: Path, environment: dict[str, str]) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "z3trace", "record", *WINDOW, script(training()), "6",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(p.name for p in run.iterdir()) == [
        "rank0.pt.trace.json.gz",
        "rank1.pt.trace.json.gz",
        "run.json",
    ]
    assert read_run(run)["unfinished_ranks"] == []
    assert done.stderr.count("next: z3trace report") == 1
