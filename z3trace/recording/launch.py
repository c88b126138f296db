"""Start the ranks of a recording, or become one, and bring their exit code home."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from z3trace.recording.elastic import run_ranks
from z3trace.recording.program import Program
from z3trace.recording.rundir import RankReport, RunDirectory
from z3trace.recording.settings import RecordSettings

WORKER = "z3trace.recording.worker"
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Ending:
    """How a launched job ended.

    `exit_code` is to be passed on; `deaths` says of ranks without a complete report how they died;
    `stopped_by` is the signal that ended us all, if one did.
    """

    exit_code: int
    reports: tuple[RankReport, ...]
    deaths: Mapping[int, str]
    stopped_by: int | None = None


def become_worker(settings: RecordSettings, program: Program) -> NoReturn:
    """Replace this process by the rank that records; a launcher above us sees no difference."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *_worker_arguments(settings, program)])


def launch(settings: RecordSettings, program: Program, ranks: int, *, logs: Path | None = None) -> Ending:
    """Record the program on `ranks` processes of this host; the run directory is settled when this returns.

    Where the ranks' output goes with `logs`, see `run_ranks`.
    """
    directory = RunDirectory(settings.directory)
    settings = replace(settings, supervised=True)
    with _ending_hung_ranks(directory, ranks, settings.exit_grace):
        arguments = _worker_arguments(settings, program)
        job = run_ranks(arguments, ranks, logs=logs, verbose=settings.verbosity > 0)
    reports = tuple(directory.reports())
    ended = {report.rank for report in reports if report.ended_ns is not None}
    deaths = {rank: _death(rank, job.failures) for rank in range(ranks) if rank not in ended}
    directory.merge(deaths)
    code = exit_code(reports, job.failures) if job.stopped_by is None else 128 + job.stopped_by
    return Ending(code, reports, deaths, job.stopped_by)


def exit_code(reports: Sequence[RankReport], failures: Mapping[int, int]) -> int:
    """The exit code of the rank that failed first, as its script meant it; torch's launcher knows only 1.

    `failures` are the exit codes of the processes that the launcher found failed, negative for a signal. A
    rank that died without a complete report comes before those that could still report, because they failed
    when they missed it; one that SIGTERM ended was stopped for the sake of another.
    """
    ended = {report.rank: report for report in reports if report.ended_ns is not None}
    dead = [128 - code if code < 0 else code for rank, code in sorted(failures.items()) if rank not in ended]
    in_order = sorted(ended.values(), key=lambda report: report.ended_ns or 0)
    codes = dead + [report.exit_code for report in in_order if report.exit_code]
    return next((code for code in codes if code != TERMINATED), codes[0] if codes else 0)


def _worker_arguments(settings: RecordSettings, program: Program) -> list[str]:
    return ["-m", WORKER, settings.to_json(), *program.to_argv()]


def _death(rank: int, failures: Mapping[int, int]) -> str:
    others = [code for other, code in failures.items() if other != rank and code != -signal.SIGTERM]
    code = failures.get(rank)
    if code is None or (code == -signal.SIGTERM and others):
        return "stopped because another rank had failed"
    if code >= 0:
        return f"ended with exit code {code} before its recording could be closed"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


@contextlib.contextmanager
def _ending_hung_ranks(directory: RunDirectory, ranks: int, grace: float) -> Iterator[None]:
    """Kill ranks that hang after every script has ended, in code that Python's own exit no longer reaches.

    The ranks end themselves where they can, so this comes a little later.
    """
    over = threading.Event()
    limit_ns = (grace + 5) * 1e9

    def watch() -> None:
        while not over.wait(2.0):
            reports = directory.reports()
            ends = [report.ended_ns for report in reports if report.ended_ns is not None]
            if len(ends) == ranks and time.time_ns() - max(ends) > limit_ns:
                for report in reports:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(report.pid, signal.SIGKILL)
                return

    if grace > 0:
        threading.Thread(target=watch, daemon=True, name="z3trace-exit-watch").start()
    try:
        yield
    finally:
        over.set()
