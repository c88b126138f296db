"""Which host threads matter and what encloses what on them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.errors import TraceError
from z3trace.analyzers.trace import Trace

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

STEP_MARK = "ProfilerStep#"
# The two differ by less than 2**63 ns; unix times are below 2**62 ns until the year 2116.
_EARLIEST, _LATEST = -(2**61), 2**62
AUTOGRAD_NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class HostThreads:
    """Lane numbers of the threads that run the training.

    `main` is the thread that carries the step marks (without marks: the busiest operator thread), `autograd`
    those that run backward nodes without being main (none on CPU), `workers` gloo's communication threads.
    """

    main: int
    autograd: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def training(self) -> tuple[int, ...]:
        return (self.main, *self.autograd) if self.main >= 0 else self.autograd


def is_step_mark(name: str) -> bool:
    return name.startswith(STEP_MARK) and name[len(STEP_MARK) :].isdigit()


def spans(trace: Trace) -> Mask:
    """Complete host or device events with a time and a duration; absurd times, whose sums overflow, are left out."""
    times = (trace.ts > _EARLIEST) & (trace.end < _LATEST) & (trace.dur >= 0) & (trace.end >= trace.ts)
    mask: Mask = trace.is_phase("X") & times
    return mask


def host_spans(trace: Trace, named: Callable[[str], bool]) -> Rows:
    """Rows of complete host events with such a name (device mirrors of annotations left out)."""
    mask = spans(trace) & trace.named(named) & ~trace.is_cat("gpu_user_annotation", "kernel")
    return np.flatnonzero(mask)


def find_threads(trace: Trace) -> HostThreads:
    """The threads of the training. `main` is -1 when the trace has no host activity.

    Raises TraceError when several processes train in one file, as in merged traces of several ranks.
    """
    lanes = trace.lane
    gloo_rows = host_spans(trace, lambda name: name.startswith("gloo:"))
    operators = np.flatnonzero(spans(trace) & trace.is_cat("cpu_op"))
    issuing = set(lanes[host_spans(trace, lambda name: name.startswith("c10d::"))].tolist())
    marks = host_spans(trace, is_step_mark)
    marked = set(lanes[marks].tolist())
    trainers = {trace.lanes[lane].process for lane in (marked or issuing) if lane >= 0}
    if len(trainers) > 1:
        raise TraceError(
            f"{trace.path}: {len(trainers)} processes train in this one file (merged ranks?): "
            "give the file of each rank by itself"
        )
    workers = {
        lane
        for lane in set(lanes[gloo_rows].tolist())
        if lane not in issuing | marked or any("gloo" in name for name in trace.lanes[lane].names)
    }
    nodes = set(lanes[host_spans(trace, lambda n: n.startswith(AUTOGRAD_NODE))].tolist())
    main = -1
    if len(marks):
        main = int(lanes[marks[0]])
    else:
        candidates = lanes[operators]
        candidates = candidates[~np.isin(candidates, list(workers))]
        alone = candidates[~np.isin(candidates, list(nodes))]
        candidates = alone if len(alone) else candidates
        if len(candidates):
            numbers, counts = np.unique(candidates, return_counts=True)
            main = int(numbers[np.argmax(counts)])
    return HostThreads(main, tuple(sorted(nodes - {main})), tuple(sorted(workers)))


def nearest_ancestor(trace: Trace, rows: Rows, wanted: Mask, *, or_self: bool = False) -> Rows:
    """For each row the innermost enclosing event among the wanted ones, -1 where there is none."""
    parents = trace.parents
    current = rows.astype(np.int64) if or_self else parents[rows].astype(np.int64)
    active = current >= 0
    active[active] = ~wanted[current[active]]
    while active.any():
        current[active] = parents[current[active]]
        still = current >= 0
        still[still] = ~wanted[current[still]]
        active &= still
    return current


def outermost_ancestor(trace: Trace, rows: Rows, wanted: Mask) -> Rows:
    """For each row the outermost enclosing event (or itself) among the wanted ones, -1 without one."""
    best = nearest_ancestor(trace, rows, wanted, or_self=True)
    while True:
        found = best >= 0
        further = np.full(len(rows), -1, np.int64)
        further[found] = nearest_ancestor(trace, best[found], wanted)
        if not (further >= 0).any():
            return best
        best = np.where(further >= 0, further, best)
