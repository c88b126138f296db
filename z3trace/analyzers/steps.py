"""Step windows: which stretch of the trace is step N."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from z3trace.analyzers.activity import Activity
from z3trace.analyzers.host import HostThreads, host_spans, is_step_mark
from z3trace.analyzers.passes import backward_passes, optimizer_steps
from z3trace.analyzers.trace import NULL, Trace

WindowKind = Literal["device", "host"]


@dataclass(frozen=True)
class Step:
    """One training step. `mark_*`: the host's mark; `start`, `end`: the window that is measured, in ns."""

    number: int
    mark_start: int
    mark_end: int
    start: int
    end: int
    used: bool

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Steps:
    """The steps of one trace, in order, and how they were found (for the reader of the report)."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()

    def index_at(self, times: np.ndarray) -> np.ndarray:
        """Index of the step whose host mark holds each instant, -1 outside all; shape (n,)."""
        if not self.steps:
            return np.full(len(times), -1, np.int64)
        starts = np.array([s.mark_start for s in self.steps], np.int64)
        ends = np.array([s.mark_end for s in self.steps], np.int64)
        index = np.searchsorted(starts, times, side="right") - 1
        return np.where((index >= 0) & (times < ends[np.maximum(index, 0)]), index, -1)


def find_steps(
    trace: Trace, threads: HostThreads, activity: Activity, window: WindowKind = "device"
) -> Steps:
    """The steps of a trace from its ProfilerStep marks; without marks from the optimizer's steps or, without
    those, from the backward passes.

    `window="device"` measures a step from the first device activity launched inside its mark to the first
    launched inside the next mark; `"host"` takes the mark itself. A CPU trace always has the mark.
    """
    marks, notes = _marks(trace), []
    if not marks:
        marks, how = _inferred(trace, threads)
        notes.append(how)
    if not marks:
        return Steps((), tuple(notes))
    windows = [(start, end) for _, start, end in marks]
    if activity.on_device and window == "device":
        windows = _device_windows(trace, activity, windows)
    several = len(marks) > 1
    steps = tuple(
        Step(number, start, end, *measured, used=not several or k > 0)
        for k, ((number, start, end), measured) in enumerate(zip(marks, windows, strict=True))
    )
    if several:
        notes.append(f"step {marks[0][0]}, the first recorded one, is listed but not used for averages")
    else:
        notes.append(f"only one step ({marks[0][0]}) is recorded: it is used although it is the first")
    return Steps(steps, tuple(notes))


def _marks(trace: Trace) -> list[tuple[int, int, int]]:
    """(number, start, end) of each mark in order of time; a number seen twice keeps its first mark."""
    found: dict[int, tuple[int, int, int]] = {}
    rows = host_spans(trace, is_step_mark)
    for row in rows[np.argsort(trace.ts[rows], kind="stable")]:
        number = int(trace.name_of(int(row)).partition("#")[2])
        if trace.dur[row] != NULL and trace.ts[row] != NULL:
            found.setdefault(number, (number, int(trace.ts[row]), int(trace.end[row])))
    marks = sorted(found.values(), key=lambda mark: mark[1])
    # A mark ends where the next begins, whatever rounding of old traces says.
    return [
        (number, start, min(end, marks[k + 1][1]) if k + 1 < len(marks) else end)
        for k, (number, start, end) in enumerate(marks)
    ]


def _inferred(trace: Trace, threads: HostThreads) -> tuple[list[tuple[int, int, int]], str]:
    """Steps of a trace without marks, and how they were found."""
    starts = np.array([b.start for b in backward_passes(trace)], np.int64)
    ends = optimizer_steps(trace, threads)[:, 1]
    how = "no ProfilerStep marks: steps are taken from the ends of the optimizer's steps, numbered from 0"
    if len(ends):
        # Calls of optimizers with no backward in between belong to one step.
        passed = np.searchsorted(starts, ends)
        last_of_step = np.append(passed[1:] != passed[:-1], True) if len(starts) else np.ones(len(ends), bool)
        ends = ends[last_of_step]
    else:
        ends = np.array([b.end for b in backward_passes(trace)], np.int64)
        how = (
            "no ProfilerStep marks and no optimizer steps: steps are taken from the ends of the backward passes, "
            "numbered from 0 (with gradient accumulation these are micro-batches)"
        )
    if len(ends) < 2:
        return [], "no step marks and no repeated optimizer steps: totals are given for the whole trace only"
    return [(k, start, end) for k, (start, end) in enumerate(pairwise(ends.tolist()))], how


def _device_windows(trace: Trace, activity: Activity, marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    rows = activity.rows
    launches = trace.launches[rows]
    launched = launches >= 0
    rows, launch_times = rows[launched], trace.ts[launches[launched]]
    own = [rows[(launch_times >= start) & (launch_times < end)] for start, end in marks]
    starts = [int(trace.ts[launched].min()) if len(launched) else None for launched in own]
    windows: list[tuple[int, int]] = []
    for k, (mark_start, mark_end) in enumerate(marks):
        first = starts[k]
        if first is None:
            # A step that launched nothing has its mark, as far as the step before leaves it.
            begin = max(mark_start, windows[-1][1]) if windows else mark_start
            windows.append((begin, max(begin, mark_end)))
            continue
        later = next((start for start in starts[k + 1 :] if start is not None), None)
        end = int(trace.end[own[k]].max())
        if later is not None:
            end = later if starts[k + 1] is not None else min(end, later)
        windows.append((first, max(first, end)))
    return windows
