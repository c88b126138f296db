"""Forward, backward, optimizer: which part of a step an instant on the host belongs to.

Backward is where autograd nodes run, on whatever thread. Between two backwards lies a forward, or, where the
optimizer steps in between, first the optimizer and then, from the next step mark or the next recorded
forward operator on, a forward. A mark that lies before the optimizer's step does not end it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.host import HostThreads
from z3trace.analyzers.passes import Backward, backward_passes, optimizer_steps
from z3trace.analyzers.steps import Steps
from z3trace.analyzers.trace import Trace

FORWARD, BACKWARD, OPTIMIZER, OTHER = "forward", "backward", "optimizer", "other"
NAMES = (FORWARD, BACKWARD, OPTIMIZER, OTHER)
_BEGINNING, _NEVER = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Phases:
    """Consecutive segments: `starts` (n,) in ns, code into NAMES and micro-batch index of each.

    `settled`: for a segment after a backward the instant (ns) until which leftovers of that backward may run.
    """

    starts: Integers
    codes: NDArray[np.int8]
    micro_batches: Integers
    settled: Integers
    notes: tuple[str, ...] = ()

    def at(self, times: Integers) -> tuple[NDArray[np.int8], Integers]:
        """(phase code, micro-batch index) at each instant; OTHER and 0 before the first segment."""
        if not len(self.starts):
            return np.full(len(times), NAMES.index(OTHER), np.int8), np.zeros(len(times), np.int64)
        index = np.searchsorted(self.starts, times, side="right") - 1
        known = index >= 0
        index = np.maximum(index, 0)
        codes = np.where(known, self.codes[index], NAMES.index(OTHER)).astype(np.int8)
        return codes, np.where(known, self.micro_batches[index], 0)

    def intervals(self, phase: str) -> list[tuple[int, int]]:
        """The segments of one phase as (start, end); the last segment of the trace has no end and is open."""
        ends = np.concatenate((self.starts[1:], [_NEVER]))
        own = self.codes == NAMES.index(phase)
        return list(zip(self.starts[own].tolist(), ends[own].tolist(), strict=True))


def find_phases(trace: Trace, threads: HostThreads, steps: Steps) -> Phases:
    """Cut the trace's time into phases."""
    backwards = backward_passes(trace)
    optimizer = optimizer_steps(trace, threads)
    marks = [(s.mark_start, s.mark_end) for s in steps.steps]
    if not backwards and not len(optimizer) and not marks:
        return Phases(
            np.empty(0, np.int64), np.empty(0, np.int8), np.empty(0, np.int64), np.empty(0, np.int64),
            ("no autograd, optimizer or step events: phases are unknown",),
        )  # fmt: skip
    cuts: dict[int, str] = {}
    settled: dict[int, int] = {}
    first = min([b.start for b in backwards] + [m[0] for m in marks] + optimizer[:1, 0].tolist())
    if not marks or first < marks[0][0]:
        cuts[_BEGINNING] = FORWARD
    cuts |= dict.fromkeys((start for start, _ in marks), FORWARD)
    if marks:
        cuts[marks[-1][1]] = OTHER
    edges = np.unique(np.array(marks, np.int64).ravel())
    for start, end in _elsewhere(optimizer, backwards):
        cuts[start] = OPTIMIZER
        cuts.setdefault(end, FORWARD)
    for k, backward in enumerate(backwards):
        following = backwards[k + 1].start if k + 1 < len(backwards) else _NEVER
        _after_backward(backward, following, optimizer, edges, cuts, settled)
    return _segments(cuts, marks, settled)


def _elsewhere(optimizer: Integers, backwards: list[Backward]) -> list[tuple[int, int]]:
    """The optimizer's steps that do not follow a backward: before the first one, or after a forward began."""
    starts = np.array([b.start for b in backwards], np.int64)
    resumes = np.array([_NEVER if b.resumes is None else b.resumes for b in backwards], np.int64)
    latest = np.searchsorted(starts, optimizer[:, 0], side="right") - 1
    return [
        (int(start), int(end))
        for (start, end), k in zip(optimizer, latest, strict=True)
        if k < 0 or start >= resumes[k]
    ]


def _after_backward(
    backward: Backward,
    following: int,
    optimizer: Integers,
    edges: Integers,
    cuts: dict[int, str],
    settled: dict[int, int],
) -> None:
    """Cut the time from one backward to the next; `edges` are the starts and ends of step marks."""
    resumes = backward.resumes if backward.resumes is not None else _NEVER
    first, last = np.searchsorted(optimizer[:, 0], (backward.start, min(following, resumes)))
    own = optimizer[first:last]
    done = max(int(own[:, 1].max()), backward.end) if len(own) else backward.end
    edge, edge_after = _next(edges, backward.end), _next(edges, done)
    settled[backward.end] = min([following, edge, resumes, *own[:1, 0].tolist()])
    # At one instant the later-added cut holds: a backward over the mark that it begins.
    cuts[backward.start] = BACKWARD
    passed = edges[np.searchsorted(edges, backward.start, side="right") : np.searchsorted(edges, done)]
    for time in passed.tolist():
        cuts.pop(time, None)
    if not len(own):
        forward_follows = edge >= following != _NEVER
        cuts[backward.end] = FORWARD if forward_follows else OTHER if len(optimizer) else OPTIMIZER
        return
    cuts[backward.end] = OPTIMIZER
    if edge < done or edge_after >= following:
        # No mark says where the next forward begins: it does where it shows, or right after the optimizer.
        if resumes < edge_after:
            cuts[max(done, resumes)] = FORWARD
        elif following != _NEVER or edge < done:
            cuts[done] = FORWARD


def _next(edges: Integers, time: int) -> int:
    index = int(np.searchsorted(edges, time))
    return int(edges[index]) if index < len(edges) else _NEVER


def _segments(cuts: dict[int, str], marks: list[tuple[int, int]], settled: dict[int, int]) -> Phases:
    ordered = sorted(cuts.items())
    starts = np.array([t for t, _ in ordered], np.int64)
    codes = np.array([NAMES.index(name) for _, name in ordered], np.int8)
    mark_starts = np.array([m[0] for m in marks], np.int64)
    begins = codes == NAMES.index(BACKWARD)
    step_of = np.searchsorted(mark_starts, starts, side="right")
    # A forward belongs to the backward that follows it: count the backwards of the step that came before.
    before = np.cumsum(begins) - begins
    _, first_of_step, step_index = np.unique(step_of, return_index=True, return_inverse=True)
    micro = before - before[first_of_step][step_index]
    if not marks:
        ends_of_step = codes == NAMES.index(OPTIMIZER)
        base = np.maximum.accumulate(np.where(ends_of_step, before, 0))
        micro = np.where(ends_of_step, 0, before - base)
    micro = np.where(codes == NAMES.index(OPTIMIZER), 0, micro)
    until = np.array([settled.get(t, t) for t, _ in ordered], np.int64)
    return Phases(starts, codes, micro, until)
