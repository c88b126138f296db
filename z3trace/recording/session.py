"""Profile a window of steps on one rank and time the steps around it."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
from isal import igzip
from torch.profiler import ProfilerAction, profile

from z3trace.recording.settings import RecordSettings

# Steps timed after the window; enough for a median, and a bound for trainings of a million steps.
TIMED_AFTER = 100


class State(str, Enum):
    """What a step's duration can be used for."""

    SETTLING = "settling"  # the first step, or one in which the profiler starts up or writes
    UNPROFILED = "unprofiled"
    PROFILED = "profiled"


class Clock(Protocol):
    def mark(self) -> Any: ...

    def between(self, start: Any, end: Any) -> int:
        """Nanoseconds between two marks."""
        ...


class HostClock:
    """For devices that compute in the calling thread."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def between(self, start: int, end: int) -> int:
        return end - start


class CudaClock:
    """Events on the current stream: the host runs ahead of the device, and is not made to wait."""

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        end.synchronize()
        return round(float(start.elapsed_time(end)) * 1e6)


@dataclass(frozen=True)
class TimedStep:
    step: int
    state: State
    duration_ns: int


class ProfileSession:
    """One profiled window. Tell it of every step's begin and end; it does the rest.

    Steps are counted from the first one it hears of, and are marked in the trace (`ProfilerStep#N`) with the
    numbers it is told. `metadata(steps)` is asked, when the window ends, for what the trace shall carry
    under "z3trace", given the numbers of the completely recorded steps. `written(steps)` is called once the
    trace is in place.
    """

    def __init__(
        self,
        settings: RecordSettings,
        trace: Path,
        clock: Clock,
        metadata: Callable[[tuple[int, ...]], dict[str, Any]],
        written: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.settings = settings
        self.trace = trace
        self.finished = 0
        self.profiled: list[int] = []
        self.yielded = False  # whether another profiler ever stood in the way
        self._blocked = False
        self._saved = False
        self._delay = 0  # steps by which another profiler put our window off
        self._clock = clock
        self._metadata = metadata
        self._written = written
        self._profile: profile | None = None
        self._marks: list[tuple[int, State, Any, Any]] = []
        self._start: Any = None

    def step_started(self, step: int) -> None:
        """The first call opens the session; later steps begin where the one before ended."""
        if self._start is None:
            if not self._blocked:
                self._open(step)
            self._start = self._clock.mark()

    def step_finished(self, step: int) -> None:
        self.step_started(step)
        state = self._state()
        if self._passed < self.settings.needed + TIMED_AFTER:
            self._marks.append((step, state, self._start, self._clock.mark()))
        self.finished += 1
        if self._profile is not None:
            if state is State.PROFILED:
                self.profiled.append(step)
            self._advance(self._profile, step)
        elif not (self._blocked or self._saved):
            self._delay = max(0, self.finished - self.settings.skip)
            self._open(step + 1)
        self._start = self._clock.mark()

    @property
    def over(self) -> bool:
        """Whether the window has passed."""
        return self._saved

    def owns(self, profiler: Any) -> bool:
        """Whether a `torch.autograd.profiler.profile` is ours."""
        return self._profile is not None and self._profile.profiler is profiler

    def give_way(self) -> None:
        """Another profiler is about to start, and two at once crash: end ours, keeping the steps it has."""
        self.yielded = self._blocked = True
        if self.profiled:
            self.close()
        else:
            self.abandon()

    def go_on(self) -> None:
        """The other profiler has ended: our window, if it is not over, begins with the next step."""
        self._blocked = False

    def close(self) -> None:
        """The script is over: save what was recorded if the window is still open."""
        if self._profile is not None:
            self._attach_metadata(self._profile)
            with _without_profiler_chatter():
                self._profile.stop()
            self._profile = None

    def abandon(self) -> None:
        """Stop profiling without writing anything."""
        profiler, self._profile = self._profile, None
        if profiler is not None:
            profiler.on_trace_ready = None
            with _without_profiler_chatter():
                profiler.stop()

    def timed_steps(self) -> list[TimedStep]:
        """How long each step took, in order. Steps that were only begun are not in it."""
        return [TimedStep(step, state, self._clock.between(a, b)) for step, state, a, b in self._marks]

    def _state(self) -> State:
        action = self._action()
        if action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            return State.PROFILED
        if action is ProfilerAction.WARMUP or self.finished == 0 or self._passed == self.settings.needed:
            return State.SETTLING
        return State.UNPROFILED

    @property
    def begins_recording(self) -> bool:
        """Whether the next step is the first recorded one."""
        return not (self._blocked or self._saved) and self._passed == self.settings.first

    @property
    def _passed(self) -> int:
        return self.finished - self._delay

    def _action(self) -> ProfilerAction:
        settings = self.settings
        if self._blocked or self._saved or not settings.skip <= self._passed < settings.needed:
            return ProfilerAction.NONE
        if self._passed < settings.first:
            return ProfilerAction.WARMUP
        last = self._passed == settings.needed - 1
        return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD

    def _open(self, step: int) -> None:
        # The schedule goes by what was finished, not by the number it is given, because a training that
        # resumes or loads a checkpoint does not count from 0 and may jump.
        self._profile = profile(
            schedule=lambda _step: self._action(),
            on_trace_ready=self._save,
            record_shapes=self.settings.record_shapes,
            with_stack=self.settings.with_stack,
            profile_memory=self.settings.profile_memory,
        )
        self._profile.step_num = step
        with _without_profiler_chatter():
            self._profile.start()

    def _advance(self, profiler: profile, step: int) -> None:
        over = self._passed == self.settings.needed
        if over:
            self._attach_metadata(profiler)
        profiler.step_num = step  # so that the next mark carries the next step's number
        with _without_profiler_chatter() if self._changes() else contextlib.nullcontext():
            profiler.step()
        if over:
            self._profile = None
            profiler.stop()

    def _changes(self) -> bool:
        return self._passed in (self.settings.skip, self.settings.first, self.settings.needed)

    def _attach_metadata(self, profiler: profile) -> None:
        if self._passed < self.settings.first:
            return  # nothing is being recorded
        values = self._metadata(tuple(self.profiled))
        profiler.add_metadata_json("z3trace", json.dumps(_plain(values), ensure_ascii=False))

    def _save(self, profiler: profile) -> None:
        """Export beside the final place, compress as a stream, then rename."""
        self._saved = True
        raw = self.trace.with_name(f".{self.trace.name}.raw")
        packed = self.trace.with_name(f".{self.trace.name}.part")
        try:
            profiler.export_chrome_trace(str(raw))
            with raw.open("rb") as source, igzip.open(packed, "wb") as target:  # type: ignore[no-untyped-call]
                shutil.copyfileobj(source, target, 1 << 20)
            packed.replace(self.trace)
        finally:
            raw.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        self._written(tuple(self.profiled))


def _plain(value: Any) -> Any:
    """The same value, its texts without what Kineto does not pass on intact (it makes `/` of a backslash)."""
    if isinstance(value, str):
        return "".join(c if c >= " " else " " for c in value.replace("\\", "/").replace('"', "'"))
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@contextlib.contextmanager
def _without_profiler_chatter() -> Iterator[None]:
    """Drop what Kineto prints on stderr each time it starts and stops (`USDT:…`), keep every other line."""
    try:
        sys.stderr.flush()
        saved = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no stderr: nothing to keep quiet
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
