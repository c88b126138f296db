"""What one rank keeps of a training: hears of engines and steps, holds the session and the rank's report."""

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from z3trace import __version__
from z3trace.recording.messages import say, step_range
from z3trace.recording.program import Outcome
from z3trace.recording.rundir import RankReport, RunDirectory
from z3trace.recording.settings import Rank, RecordSettings

TRACE_SCHEMA = "z3trace.trace/1"


class Training(Protocol):
    """One training framework's view of a model being trained, as far as recording needs it."""

    framework: str

    @property
    def device(self) -> str:
        """The kind of device it computes on: cpu, cuda, …"""
        ...

    def describe(self) -> dict[str, Any]:
        """Settings, modules and parameters, ready for JSON: keys of `run.json`."""
        ...

    def collectives(self, steps: tuple[int, ...]) -> list[dict[str, Any]]:
        """What the framework itself counted in these steps, independent of the profiler."""
        ...


class Recorder:
    """Records the first training that makes a step; others in the same process pass unrecorded.

    Nothing that goes wrong in here may hurt the training: it ends the recording, and is reported.
    """

    def __init__(self, settings: RecordSettings, rank: Rank) -> None:
        self.settings = settings
        self.rank = rank
        self.directory = RunDirectory(settings.directory)
        self.report = RankReport.of(rank)
        self._training: Training | None = None
        self._session: Any = None
        self._failed = False
        self._other_profiles = False

    def created(self, training: Training) -> None:
        """A training is set up. The first one is described at once, so that a crash leaves at least that."""
        if self._training is None:
            self._training = training
            self.report.training_seen = True
            self._guarded(self._keep_report)

    def step_started(self, training: Training, step: int) -> None:
        if self._session is None and not self._failed:
            self._training = training
            self._guarded(self._open)
        if training is self._training and self._session is not None:
            self._guarded(lambda: self._session.step_started(step))

    def step_finished(self, training: Training, step: int) -> None:
        if training is self._training and self._session is not None:
            self._guarded(lambda: self._finish_step(step))

    def owns(self, profiler: Any) -> bool:
        """Whether a `torch.autograd.profiler.profile` is the one that records."""
        return self._session is not None and self._session.owns(profiler)

    def other_profiler_starts(self) -> None:
        """The script starts a profiler of its own: it comes first."""
        self._other_profiles = True
        session = self._session
        if session is not None and not session.over:
            if not session.yielded and self.rank.rank == 0:
                say(
                    "the script starts torch.profiler itself, and two cannot run at once: recording gives way"
                )
            self._guarded(session.give_way)

    def other_profiler_ended(self) -> None:
        self._other_profiles = False
        if self._session is not None:
            self._guarded(self._session.go_on)

    @property
    def begun(self) -> bool:
        """Whether a first step has begun, or nothing can begin any more."""
        return self._session is not None or self._failed

    def close(self, outcome: Outcome) -> None:
        """The script ended: save what is open and hand in the report."""
        if self._session is not None:
            self._guarded(self._session.close)
        if self._session is not None:
            self.report.steps = [asdict(step) for step in self._session.timed_steps()]
        self.report.exit_code = outcome.exit_code
        self.report.ended_ns = time.time_ns()
        for problem in (outcome.problem, self._shortfall()):
            if problem is not None:
                self.report.problems.append(problem)
        self._guarded(self._keep_report)
        if not self.settings.supervised:
            self._guarded(self.directory.merge)

    def _open(self) -> None:
        from z3trace.recording.session import CudaClock, HostClock, ProfileSession

        assert self._training is not None
        self._session = ProfileSession(
            self.settings,
            trace=self.directory.trace(self.rank.rank),
            clock=CudaClock() if self._training.device == "cuda" else HostClock(),
            metadata=self._trace_metadata,
            written=self._trace_written,
        )
        if self._other_profiles:
            self._session.give_way()

    def _finish_step(self, step: int) -> None:
        self._session.step_finished(step)
        talks = self.rank.rank == 0 and self.settings.verbosity >= 0
        if talks and self._session.begins_recording:
            say(f"recording {step_range(range(step + 1, step + 1 + self.settings.steps))}")

    def _trace_written(self, steps: tuple[int, ...]) -> None:
        self.report.trace = self.directory.trace(self.rank.rank).name
        self.report.profiled_steps = list(steps)
        self.report.steps = [asdict(step) for step in self._session.timed_steps()]
        self._keep_report()

    def _keep_report(self) -> None:
        if self.rank.local_rank == 0 and self._training is not None:
            self.report.job = self._job()  # anew each time: the order of calls is known after some steps only
        self.directory.write_report(self.report)

    def _job(self) -> dict[str, Any]:
        from z3trace.recording import environment

        assert self._training is not None
        return {
            "framework": self._training.framework,
            "command": list(self.settings.command),
            "working_directory": str(Path.cwd()),
            "device": environment.device(self._training.device),
            "versions": environment.versions(),
            "environment": environment.variables(),
            "recording": self._recording(),
            **self._training.describe(),
        }

    def _recording(self) -> dict[str, Any]:
        return {
            "skip": self.settings.skip,
            "warmup": self.settings.warmup,
            "steps": self.settings.steps,
            "record_shapes": self.settings.record_shapes,
            "with_stack": self.settings.with_stack,
            "profile_memory": self.settings.profile_memory,
            "labels": self.settings.labels,
        }

    def _trace_metadata(self, steps: tuple[int, ...]) -> dict[str, Any]:
        assert self._training is not None
        return {
            "schema": TRACE_SCHEMA,
            "generator": f"z3trace {__version__}",
            "framework": self._training.framework,
            "rank": self.rank.rank,
            "world_size": self.rank.world_size,
            "host": self.rank.host,
            "profiled_steps": list(steps),
            "profiler": self._recording(),
            **self._training.describe(),
            "collectives": self._training.collectives(steps),
        }

    def _shortfall(self) -> str | None:
        if self._session is None or self._failed:
            return None
        finished, settings = self._session.finished, self.settings
        if not self.report.profiled_steps and self._session.yielded:
            return (
                "nothing recorded: the script's own torch.profiler ran in the steps that were due; "
                "switch it off, or move it with --skip"
            )
        if not self.report.profiled_steps:
            return (
                f"nothing recorded: the script made {finished} steps, and recording begins after "
                f"{settings.first} (--skip and --warmup)"
            )
        if len(self.report.profiled_steps) < settings.steps:
            return f"only {step_range(self.report.profiled_steps)} recorded of {settings.steps} asked for"
        return None

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._failed = True
            session, self._session = self._session, None
            if session is not None:
                with contextlib.suppress(Exception):
                    session.abandon()
            line = traceback.format_exception_only(error)[-1].strip()
            self.report.problems.append(f"recording failed: {line}")
            say(f"rank {self.rank.rank}: recording failed, the training goes on: {line}")
            if self.settings.verbosity > 0:
                traceback.print_exc()
