"""Who may write where, and what a run directory tells of ranks that ended well, badly, or not at all."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from z3trace.errors import UserError
from z3trace.recording import place
from z3trace.recording.program import Program
from z3trace.recording.rundir import RankReport, RunDirectory, trace_name


def report(rank: int, world: int = 2, **values: object) -> RankReport:
    return RankReport(rank, world, "here", **values)  # type: ignore[arg-type]


def ended(directory: RunDirectory, rank: int, world: int = 2, **values: object) -> None:
    """Leave what a rank leaves that recorded and ended."""
    directory.trace(rank).write_bytes(b"trace")
    directory.write_report(
        report(rank, world, ended_ns=time.time_ns(), exit_code=0, trace=trace_name(rank), **values)
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_json(directory: RunDirectory) -> dict[str, object]:
    return json.loads((directory.path / "run.json").read_text())  # type: ignore[no-any-return]


def test_every_rank_of_a_launch_may_claim_its_directory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.claim("launch 1")
    directory.claim("launch 1")
    with pytest.raises(UserError, match="already holds a run"):
        directory.claim("launch 2")


def test_a_finished_run_is_overwritten_only_by_force(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.claim("launch 1")
    ended(directory, 0, world=1)
    directory.merge()
    with pytest.raises(UserError, match="already holds a run; choose another with -o, or give --force"):
        directory.claim("launch 2")
    assert names(directory.path) == ["rank0.pt.trace.json.gz", "run.json"]
    (directory.path / "notes.txt").write_text("mine")
    directory.claim("launch 2", force=True)
    assert names(directory.path) == [".z3trace", "notes.txt"]


def test_a_folder_with_other_things_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        RunDirectory(tmp_path).claim("launch")
    assert names(tmp_path) == ["thesis.tex"]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(UserError, match="is not a directory"):
        RunDirectory(tmp_path / "run").claim("launch")
    with pytest.raises(UserError, match="is not a directory"):
        RunDirectory(tmp_path / "run" / "below").claim("launch")


def test_the_last_rank_that_ends_leaves_only_the_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.claim("launch")
    directory.write_report(report(1))
    ended(directory, 0, job={"framework": "z3trace"}, profiled_steps=[7, 8])
    directory.merge()
    run = run_json(directory)
    assert run["unfinished_ranks"] == [1]
    ended(directory, 1, profiled_steps=[7, 8])
    directory.merge()
    run = run_json(directory)
    assert run["unfinished_ranks"] == []
    assert run["framework"] == "z3trace"
    assert run["profiled_steps"] == [7, 8]
    assert names(directory.path) == [trace_name(0), trace_name(1), "run.json"]


def test_a_dead_rank_is_named_and_takes_nothing_of_the_others_with_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.claim("launch")
    ended(directory, 0)
    directory.write_report(report(1))
    directory.merge({1: "killed by SIGKILL"})
    run = run_json(directory)
    assert run["problems"] == ["rank 1: killed by SIGKILL"]
    assert [rank["trace"] for rank in run["ranks"]] == [trace_name(0), None]  # type: ignore[attr-defined]


def test_a_rank_that_never_reported_is_named_too(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.claim("launch")
    ended(directory, 0)
    directory.merge({})
    assert run_json(directory)["problems"] == ["rank 1: ended without a word"]


def test_a_run_without_any_trace_goes_away(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.claim("launch")
    directory.write_report(report(0, world=1, ended_ns=1, exit_code=1))
    directory.merge()
    assert not directory.path.exists()


def test_names_of_runs_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260102-030405")
    chosen = [place.choose_directory(None, Program("some/train.py"), force=False) for _ in range(3)]
    assert [str(path.relative_to(tmp_path)) for path in chosen] == [
        "runs/train-20260102-030405",
        "runs/train-20260102-030405-2",
        "runs/train-20260102-030405-3",
    ]


def test_ranks_under_a_launcher_agree_without_talking(tmp_path: Path) -> None:
    program = (
        "import time; from z3trace.recording.place import choose_directory\n"
        "from z3trace.recording.program import Program\n"
        "print(choose_directory(None, Program('train.py'), force=False))"
    )

    def choose(rank: int) -> str:
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        return done.stdout

    first = choose(0)
    time.sleep(1.1)  # the name holds the second
    assert choose(1) == first


def test_ranks_of_several_hosts_need_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match="name its directory with -o"):
        place.choose_directory(None, Program("train.py"), force=False)
    for rank in ("0", "9"):
        monkeypatch.setenv("RANK", rank)
        assert place.choose_directory(tmp_path / "run", Program("train.py"), force=False) == tmp_path / "run"


@pytest.mark.distributed
def test_the_command_refuses_to_overwrite(
    z3trace: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    done = z3trace("record", "-o", "run", "script.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "--force" in done.stderr
    assert z3trace("record", "-o", "run", "--force", "script.py").stdout == "ran\n"
