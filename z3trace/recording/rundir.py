"""The run directory: one trace a rank and `run.json`, each written under another name and then renamed.

While ranks run, each keeps a report of its own in `.z3trace/`; whoever ends merges the reports there are into
`run.json`, so a rank that dies takes nothing of the others with it. When the last rank has ended the
folder `.z3trace/` goes away.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from z3trace import __version__
from z3trace.errors import UserError
from z3trace.recording.settings import Rank

RUN_FILE = "run.json"
RUN_SCHEMA = "z3trace.run/1"
WORK_FOLDER = ".z3trace"
LAUNCH_FILE = "launch"


def trace_name(rank: int) -> str:
    return f"rank{rank}.pt.trace.json.gz"


@dataclass
class RankReport:
    """What one rank contributes to `run.json`.

    `steps` lists every timed step as {"step", "state", "duration_ns"}; `job` is what holds for all ranks
    (framework, settings, modules, parameters, …) and is only filled by the first rank of each host.
    """

    rank: int
    world_size: int
    host: str
    pid: int = field(default_factory=os.getpid)
    training_seen: bool = False
    trace: str | None = None
    profiled_steps: list[int] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ended_ns: int | None = None
    exit_code: int | None = None
    job: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: Rank) -> "RankReport":
        return cls(rank.rank, rank.world_size, rank.host)


def write_atomically(path: Path, text: str) -> None:
    """The file appears whole or not at all, also for a reader at the same time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class RunDirectory:
    """A run on disk, as those see it who write it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def _work(self) -> Path:
        return self.path / WORK_FOLDER

    def trace(self, rank: int) -> Path:
        return self.path / trace_name(rank)

    def traces(self) -> list[Path]:
        """The traces that are there, whole, in no particular order."""
        return list(self.path.glob("rank*.pt.trace.json.gz"))

    def claim(self, launch: str, *, force: bool = False) -> None:
        """Create the directory for this launch; every rank of one launch may claim it.

        `launch` is a text that only the ranks of one launch have in common. With `force` an earlier run in
        the directory is removed (its own files, never others). Raises UserError where the directory holds
        something else.
        """
        try:
            self._work.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{self.path} is not a directory; choose another with -o") from None
        except OSError as error:
            raise UserError(f"cannot create {self.path}: {error.strerror}; choose another with -o") from None
        marker = self._work / LAUNCH_FILE
        with self._locked():
            if marker.exists() and marker.read_text(encoding="utf-8") == launch:
                return
            earlier = [path for path in (self.path / RUN_FILE, marker, *self.traces()) if path.exists()]
            others = {path.name for path in self.path.iterdir()} - {WORK_FOLDER}
            if (earlier or others) and not force:
                if not marker.exists():
                    shutil.rmtree(self._work, ignore_errors=True)
                what = "already holds a run" if earlier else "is not empty"
                raise UserError(f"{self.path} {what}; choose another with -o, or give --force")
            for path in (*earlier, *self._work.glob("rank*.json")):
                path.unlink()
            write_atomically(marker, launch)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._work.mkdir(exist_ok=True)
        with (self._work / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write_report(self, report: RankReport) -> None:
        """Keep what this rank has so far. Readers see the old or the new report, never half of one."""
        self._work.mkdir(parents=True, exist_ok=True)
        write_atomically(self._work / f"rank{report.rank}.json", json.dumps(asdict(report)))

    def reports(self) -> list[RankReport]:
        """The reports of the ranks that have written one, in rank order."""
        found = []
        for path in self._work.glob("rank*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append(RankReport(**json.loads(path.read_text(encoding="utf-8"))))
        return sorted(found, key=lambda report: report.rank)

    def merge(self, deaths: Mapping[int, str] | None = None) -> None:
        """Write `run.json` from the reports there are; with the last rank's end, clean up.

        `deaths` says of ranks that ended without a word how they died; who gives it knows that no rank
        runs any more. A run without a single trace is no run: its directory is removed.
        """
        if not self._work.is_dir():
            return
        with self._locked():
            reports = self.reports()
            over = deaths is not None or (
                bool(reports)
                and len(reports) == reports[0].world_size
                and all(report.ended_ns is not None for report in reports)
            )
            if self.traces():
                merged = _merged(reports, deaths or {}, over)
                write_atomically(self.path / RUN_FILE, json.dumps(merged, indent=1) + "\n")
            if not over:
                return
            shutil.rmtree(self._work, ignore_errors=True)
            if not self.traces():
                with contextlib.suppress(OSError):
                    self.path.rmdir()


def _merged(reports: list[RankReport], deaths: Mapping[int, str], over: bool) -> dict[str, Any]:
    job = next((report.job for report in reports if report.job), {})
    world = max((report.world_size for report in reports), default=1)
    problems = [f"rank {r.rank}: {text}" for r in reports for text in r.problems]
    problems += [f"rank {rank}: {how}" for rank, how in sorted(deaths.items())]
    silent = {r.rank for r in reports if r.ended_ns is None} | (set(range(world)) - {r.rank for r in reports})
    if over:
        problems += [f"rank {rank}: ended without a word" for rank in sorted(silent - set(deaths))]
    return {
        "schema": RUN_SCHEMA,
        "generator": f"z3trace {__version__}",
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "world_size": world,
        **job,
        "profiled_steps": sorted({step for report in reports for step in report.profiled_steps}),
        "ranks": [
            {
                "rank": report.rank,
                "host": report.host,
                "trace": report.trace,
                "profiled_steps": report.profiled_steps,
                "exit_code": report.exit_code,
                "steps": report.steps,
            }
            for report in reports
        ],
        "unfinished_ranks": [] if over else sorted(silent),
        "problems": problems,
    }
