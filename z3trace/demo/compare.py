"""The demo: train one model in two layouts, record both, and put their reports side by side."""

import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from z3trace.errors import UserError
from z3trace.recording.elastic import log_file, run_ranks
from z3trace.recording.launch import Ending, launch
from z3trace.recording.place import claim
from z3trace.recording.program import Program
from z3trace.recording.rundir import RunDirectory
from z3trace.recording.settings import RecordSettings

# What each layout gathers at once: every module that owns parameters, or a whole transformer block.
LAYOUTS = {"fragmented": "module", "layer-wise": "block"}
SCRIPT = Path(__file__).with_name("train.py")
LINES_OF_A_FAILURE = 15


def record_layouts(
    directory: Path, ranks: int, arguments: list[str], console: Console, *, force: bool = False
) -> dict[str, Path]:
    """One recorded run for each layout, in `directory`.

    Raises UserError when runs are there already, unless forced, and when a training fails.
    """
    runs = {name: claim(directory / name, force=force) for name in LAYOUTS}
    try:
        for name, run in runs.items():
            _record(name, run, ranks, arguments, console)
    finally:
        for run in runs.values():
            RunDirectory(run).merge({})  # gives up those that came to nothing
    return runs


def _record(name: str, run: Path, ranks: int, arguments: list[str], console: Console) -> None:
    settings = RecordSettings(run, skip=5, warmup=2, steps=8, command=("z3trace", "demo"))
    options = ("--unit", LAYOUTS[name], "--steps", str(settings.needed + 2), *arguments)
    with _logged(console, f"{name}: train and record on {ranks} ranks") as logs:
        ending = launch(settings, Program(str(SCRIPT), options), ranks, logs=logs)
        if ending.stopped_by is not None:
            raise KeyboardInterrupt
        if ending.exit_code != 0 or ending.deaths:
            raise _failure(name, ending, logs, console)


def time_layouts(ranks: int, arguments: list[str], console: Console) -> dict[str, float]:
    """Median milliseconds of a step in each layout, without a profiler."""
    with _logged(console, "both: time by turns, without the profiler") as logs:
        output = logs / "durations.json"
        module = ["-m", "z3trace.demo.timing", str(output), json.dumps(LAYOUTS), *arguments]
        job = run_ranks(module, ranks, logs=logs)
        if job.stopped_by is not None:
            raise KeyboardInterrupt
        if job.failures:
            rank = min(job.failures)
            _show_log(logs, rank, console)
            raise UserError(f"demo: rank {rank} of the timing failed; its last lines are above")
        durations = json.loads(output.read_text(encoding="utf-8"))
    return {name: statistics.median(values) / 1e6 for name, values in durations.items()}


def _failure(name: str, ending: Ending, logs: Path, console: Console) -> UserError:
    failed = [(r.rank, text) for r in ending.reports for text in r.problems if r.exit_code]
    failed = [*ending.deaths.items(), *failed]
    rank, text = failed[0] if failed else (0, f"exit code {ending.exit_code}")
    _show_log(logs, rank, console)
    return UserError(f"demo: rank {rank} of the {name} training failed: {text}")


def _show_log(logs: Path, rank: int, console: Console) -> None:
    path = log_file(logs, rank, "stderr")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path else []
    for line in lines[-LINES_OF_A_FAILURE:]:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _logged(console: Console, title: str) -> Iterator[Path]:
    """A folder for the ranks' output, whose newest line of rank 0 is shown as progress."""
    begun = time.monotonic()
    over = threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="z3trace-demo-") as folder,
        console.status(title) as status,
    ):
        logs = Path(folder)

        def follow() -> None:
            while not over.wait(0.3):
                path = log_file(logs, 0, "stdout")
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path else []
                if lines:
                    status.update(f"{title}: {lines[-1]}")

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield logs
        finally:
            over.set()
            follower.join()
    console.print(f"[green]✓[/] {title} [dim]({time.monotonic() - begun:.0f} s)[/]")
