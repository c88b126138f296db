"""The profiled window on one rank, driven by hand: which steps are recorded, timed, and written how."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from z3trace.recording.program import Outcome
from z3trace.recording.recorder import Recorder
from z3trace.recording.settings import Rank, RecordSettings


class Training:
    """A training that only multiplies matrices."""

    framework = "test"
    device = "cpu"

    def describe(self) -> dict[str, Any]:
        return {"modules": ["", 'odd "name" with \\ and é'], "parameters": {}}

    def collectives(self, steps: tuple[int, ...]) -> list[dict[str, Any]]:
        return [{"step": step, "kind": "all_gather"} for step in steps]


def record(directory: Path, first: int, made: int, **settings: int) -> Recorder:
    """A recording of `made` steps numbered from `first`."""
    recorder = Recorder(RecordSettings(directory, **settings), Rank(host="here"))
    training = Training()
    recorder.created(training)
    for step in range(first, first + made):
        recorder.step_started(training, step)
        with torch.profiler.record_function(f"z3::forward seq={step}"):
            torch.randn(8, 8) @ torch.randn(8, 8)
        recorder.step_finished(training, step)
    recorder.close(Outcome(0))
    return recorder


def read_trace(directory: Path, rank: int = 0) -> dict[str, Any]:
    with gzip.open(directory / f"rank{rank}.pt.trace.json.gz") as file:
        return json.load(file)  # type: ignore[no-any-return]


def names(trace: dict[str, Any], prefix: str) -> list[str]:
    events = sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: e["ts"])
    return [e["name"] for e in events if e["name"].startswith(prefix)]


@pytest.mark.parametrize("first", [0, 1, 1000])
def test_marks_carry_the_numbers_of_the_training(tmp_path: Path, first: int) -> None:
    record(tmp_path / "run", first, 9, skip=2, warmup=1, steps=3)
    trace = read_trace(tmp_path / "run")
    recorded = [first + 3, first + 4, first + 5]
    assert names(trace, "ProfilerStep#") == [f"ProfilerStep#{step}" for step in recorded]
    assert names(trace, "z3::forward") == [f"z3::forward seq={step}" for step in recorded]
    assert trace["z3trace"]["profiled_steps"] == recorded
    assert [row["step"] for row in trace["z3trace"]["collectives"]] == recorded


def test_every_label_lies_in_the_mark_of_its_step(tmp_path: Path) -> None:
    record(tmp_path / "run", 0, 6, skip=1, warmup=1, steps=3)
    events = {e["name"]: e for e in read_trace(tmp_path / "run")["traceEvents"] if e.get("ph") == "X"}
    for step in (2, 3, 4):
        mark, label = events[f"ProfilerStep#{step}"], events[f"z3::forward seq={step}"]
        assert mark["ts"] <= label["ts"]
        assert label["ts"] + label["dur"] <= mark["ts"] + mark["dur"]


def test_recording_may_begin_with_the_first_step(tmp_path: Path) -> None:
    record(tmp_path / "run", 0, 4, skip=0, warmup=0, steps=2)
    assert names(read_trace(tmp_path / "run"), "ProfilerStep#") == ["ProfilerStep#0", "ProfilerStep#1"]


def test_states_tell_which_durations_the_profiler_touched(tmp_path: Path) -> None:
    recorder = record(tmp_path / "run", 0, 10, skip=3, warmup=2, steps=2)
    assert [step["state"] for step in recorder.report.steps] == [
        "settling", "unprofiled", "unprofiled",  # the first step is cold
        "settling", "settling",  # warm-up
        "profiled", "profiled",
        "settling", "unprofiled", "unprofiled",  # the trace is written in the first of these
    ]  # fmt: skip
    assert all(step["duration_ns"] > 0 for step in recorder.report.steps)


def test_metadata_survives_kineto_and_run_json_keeps_it_exactly(tmp_path: Path) -> None:
    record(tmp_path / "run", 0, 8, skip=1, warmup=1, steps=1)
    assert read_trace(tmp_path / "run")["z3trace"]["modules"] == ["", "odd 'name' with / and é"]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["modules"] == ["", 'odd "name" with \\ and é']


def test_run_json_says_what_was_recorded_on_what(tmp_path: Path) -> None:
    record(tmp_path / "run", 0, 8, skip=1, warmup=1, steps=2)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["schema"] == "z3trace.run/1"
    assert run["framework"] == "test"
    assert run["world_size"] == 1
    assert run["device"]["kind"] == "cpu"
    assert run["versions"]["torch"] == torch.__version__
    assert run["recording"]["steps"] == 2
    assert run["profiled_steps"] == [2, 3]
    assert run["problems"] == []
    (rank,) = run["ranks"]
    assert (rank["rank"], rank["host"], rank["exit_code"]) == (0, "here", 0)
    assert rank["trace"] == "rank0.pt.trace.json.gz"


def test_nothing_but_the_run_is_left(tmp_path: Path) -> None:
    record(tmp_path / "run", 0, 8, skip=1, warmup=1, steps=2)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["rank0.pt.trace.json.gz", "run.json"]


def test_a_script_that_ends_inside_the_window_leaves_what_it_made(tmp_path: Path) -> None:
    recorder = record(tmp_path / "run", 0, 4, skip=1, warmup=1, steps=5)
    assert read_trace(tmp_path / "run")["z3trace"]["profiled_steps"] == [2, 3]
    assert recorder.report.problems == ["only steps 2-3 recorded of 5 asked for"]


def test_a_script_that_ends_before_the_window_leaves_nothing_and_is_told(tmp_path: Path) -> None:
    recorder = record(tmp_path / "run", 0, 3, skip=5, warmup=1, steps=1)
    assert not (tmp_path / "run").exists()
    (problem,) = recorder.report.problems
    assert "made 3 steps" in problem
    assert "begins after 6" in problem


def test_a_second_training_in_the_process_is_not_mixed_in(tmp_path: Path) -> None:
    recorder = Recorder(RecordSettings(tmp_path / "run", skip=0, warmup=0, steps=2), Rank())
    one, other = Training(), Training()
    recorder.created(one)
    recorder.created(other)
    for step in range(3):
        recorder.step_started(other, 50 + step)
        recorder.step_started(one, step)
        recorder.step_finished(one, step)
        recorder.step_finished(other, 50 + step)
    recorder.close(Outcome(0))
    assert recorder.report.profiled_steps == [50, 51]


def test_trouble_in_the_recording_leaves_the_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(_training: Training, _steps: tuple[int, ...]) -> list[dict[str, Any]]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Training, "collectives", broken)
    recorder = record(tmp_path / "run", 0, 8, skip=1, warmup=1, steps=2)
    assert recorder.report.problems == ["recording failed: OSError: [Errno 28] No space left on device"]
    assert "the training goes on" in capfd.readouterr().err
    with torch.profiler.profile() as after:  # ours must have stopped, or this one would see nothing
        torch.ones(2).sum()
    assert any(event.name == "aten::sum" for event in after.events())


def test_the_profilers_own_lines_are_dropped_and_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import os

    start = torch.profiler.profile.start_trace

    def noisy(self: torch.profiler.profile) -> None:
        start(self)
        os.write(2, b"WARNING: something that matters\nUSDT: noise\n")

    monkeypatch.setattr(torch.profiler.profile, "start_trace", noisy)
    record(tmp_path / "run", 0, 6, skip=1, warmup=1, steps=2)
    said = capfd.readouterr().err
    assert "something that matters" in said
    assert "USDT" not in said
