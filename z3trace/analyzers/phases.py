"""Forward, backward, optimizer: which part of a step an instant on the host belongs to.

Backward is where autograd nodes run, on whatever thread. Between two backwards lies a forward, or, where the
optimizer steps in between, first the optimizer and then, from the next step mark or the next recorded
forward operator on, a forward.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.host import AUTOGRAD_NODE, HostThreads, host_spans, nearest_ancestor
from z3trace.analyzers.steps import Steps
from z3trace.analyzers.trace import Trace

FORWARD, BACKWARD, OPTIMIZER, OTHER = "forward", "backward", "optimizer", "other"
NAMES = (FORWARD, BACKWARD, OPTIMIZER, OTHER)
_EPILOGUES = ("FSDP::root_post_backward_callback", "FullyShardedDataParallel._post_backward_final_callback")


@dataclass(frozen=True)
class Phases:
    """Consecutive segments: `starts` (n,) in ns, code into NAMES and micro-batch index of each.

    `settled`: for a segment after a backward the instant (ns) until which leftovers of that backward may run.
    """

    starts: NDArray[np.int64]
    codes: NDArray[np.int8]
    micro_batches: NDArray[np.int64]
    settled: NDArray[np.int64]
    notes: tuple[str, ...] = ()

    def at(self, times: NDArray[np.int64]) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
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
        ends = np.concatenate((self.starts[1:], [np.iinfo(np.int64).max]))
        own = self.codes == NAMES.index(phase)
        return list(zip(self.starts[own].tolist(), ends[own].tolist(), strict=True))


def find_phases(trace: Trace, threads: HostThreads, steps: Steps) -> Phases:
    """Cut the trace's time into phases."""
    backwards = _backward_runs(trace)
    optimizer = _optimizer_steps(trace, threads)
    marks = [(s.mark_start, s.mark_end) for s in steps.steps]
    if not backwards and not len(optimizer) and not marks:
        return Phases(
            np.empty(0, np.int64), np.empty(0, np.int8), np.empty(0, np.int64), np.empty(0, np.int64),
            ("no autograd, optimizer or step events: phases are unknown",),
        )  # fmt: skip
    cuts: list[tuple[int, str]] = []
    settled: dict[int, int] = {}
    first = min([b[0] for b in backwards] + [m[0] for m in marks] + optimizer[:1, 0].tolist())
    if not marks or first < marks[0][0]:
        cuts.append((int(np.iinfo(np.int64).min), FORWARD))
    cuts += [(start, FORWARD) for start, _ in marks]
    if marks:
        cuts.append((marks[-1][1], OTHER))
    for k, (start, end, forward_resumes) in enumerate(backwards):
        cuts.append((start, BACKWARD))
        following = backwards[k + 1][0] if k + 1 < len(backwards) else int(np.iinfo(np.int64).max)
        mark_end = next((m[1] for m in marks if m[0] <= start < m[1]), following)
        limit = min(following, mark_end)
        steps_here = (optimizer[:, 0] >= start) & (optimizer[:, 0] < limit)
        last_of_step = limit < following or k + 1 == len(backwards)
        resumes = [t for t in (forward_resumes, *optimizer[steps_here, 0].tolist()) if t is not None]
        settled[end] = min([limit, *resumes])
        if steps_here.any() or last_of_step:
            cuts.append((end, OPTIMIZER))
            done = int(optimizer[steps_here, 1].max()) if steps_here.any() else end
            if limit == following and forward_resumes is not None and forward_resumes > done:
                cuts.append((forward_resumes, FORWARD))
        else:
            cuts.append((end, FORWARD))
    return _segments(cuts, marks, settled)


def _segments(cuts: list[tuple[int, str]], marks: list[tuple[int, int]], settled: dict[int, int]) -> Phases:
    # At one instant the later-added cut holds: a backward over the mark that it begins.
    ordered = sorted(dict(cuts).items())
    starts = np.array([t for t, _ in ordered], np.int64)
    codes = np.array([NAMES.index(name) for _, name in ordered], np.int8)
    mark_starts = np.array([m[0] for m in marks], np.int64)
    begins = codes == NAMES.index(BACKWARD)
    step_of = np.searchsorted(mark_starts, starts, side="right")
    # A forward belongs to the backward that follows it: count the backwards of the step that came before.
    before = np.cumsum(begins) - begins
    first_of_step = np.array([before[np.flatnonzero(step_of == s)[0]] for s in step_of], np.int64)
    micro = before - first_of_step
    if not marks:
        ends_of_step = codes == NAMES.index(OPTIMIZER)
        base = np.maximum.accumulate(np.where(ends_of_step, before, 0))
        micro = np.where(ends_of_step, 0, before - base)
    micro = np.where(codes == NAMES.index(OPTIMIZER), 0, micro)
    until = np.array([settled.get(t, t) for t, _ in ordered], np.int64)
    return Phases(starts, codes, micro, until)


def _optimizer_steps(trace: Trace, threads: HostThreads) -> NDArray[np.int64]:
    rows = host_spans(trace, lambda name: name.startswith("Optimizer.step#"))
    rows = rows[trace.lane[rows] == threads.main]
    rows = rows[np.argsort(trace.ts[rows], kind="stable")]
    return np.column_stack((trace.ts[rows], trace.end[rows])).astype(np.int64)


def _backward_runs(trace: Trace) -> list[tuple[int, int, int | None]]:
    """Each backward pass as (start, end, start of the next recorded forward operator if known)."""
    nodes = host_spans(trace, lambda name: name.startswith(AUTOGRAD_NODE))
    if not len(nodes):
        return []
    is_node = np.zeros(len(trace), np.bool_)
    is_node[nodes] = True
    nodes = nodes[nearest_ancestor(trace, nodes, is_node) < 0]
    forwards = np.unique(trace.forward_of[nodes]).astype(np.int64)
    forwards = forwards[forwards >= 0]
    forwards = forwards[nearest_ancestor(trace, forwards, is_node, or_self=True) < 0]
    times = np.concatenate((trace.ts[nodes], trace.ts[forwards]))
    ends = np.concatenate((trace.end[nodes], trace.ts[forwards]))
    backward = np.concatenate((np.ones(len(nodes), np.bool_), np.zeros(len(forwards), np.bool_)))
    order = np.argsort(times, kind="stable")
    times, ends, backward = times[order], ends[order], backward[order]
    begins = np.flatnonzero(backward & np.concatenate(([True], ~backward[:-1])))
    epilogue_rows = host_spans(trace, lambda name: name.startswith(_EPILOGUES))
    epilogues = sorted(zip(trace.ts[epilogue_rows].tolist(), trace.end[epilogue_rows].tolist(), strict=True))
    runs: list[tuple[int, int, int | None]] = []
    for k, begin in enumerate(begins):
        stop = begins[k + 1] if k + 1 < len(begins) else len(times)
        inside = backward[begin:stop]
        end = int(ends[begin:stop][inside].max())
        after = times[begin:stop][~inside]
        resumes = int(after.min()) if len(after) else None
        limit = resumes if resumes is not None else int(np.iinfo(np.int64).max)
        end = max([end, *(e for s, e in epilogues if times[begin] <= s < limit)])
        runs.append((int(times[begin]), end, resumes))
    return runs
