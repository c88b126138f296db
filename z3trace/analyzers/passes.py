"""The landmarks of a training in a trace: its backward passes and its optimizer steps."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.host import AUTOGRAD_NODE, HostThreads, host_spans, nearest_ancestor
from z3trace.analyzers.trace import Trace

_EPILOGUES = ("FSDP::root_post_backward_callback", "FullyShardedDataParallel._post_backward_final_callback")


@dataclass(frozen=True)
class Backward:
    """One backward pass in ns. `resumes`: start of the next forward operator that has a backward, if any."""

    start: int
    end: int
    resumes: int | None


def optimizer_steps(trace: Trace, threads: HostThreads) -> NDArray[np.int64]:
    """(start, end) of each call of an optimizer's `step` on the main thread, in order; shape (n, 2), ns.

    One step of a training may hold several: DeepSpeed calls the inner optimizer once for each subgroup.
    """
    rows = host_spans(trace, lambda name: name.startswith("Optimizer.step#"))
    rows = rows[trace.lane[rows] == threads.main]
    is_step = np.zeros(len(trace), np.bool_)
    is_step[rows] = True
    rows = rows[nearest_ancestor(trace, rows, is_step) < 0]
    rows = rows[np.argsort(trace.ts[rows], kind="stable")]
    return np.column_stack((trace.ts[rows], trace.end[rows])).astype(np.int64)


def backward_passes(trace: Trace) -> list[Backward]:
    """The backward passes: runs of autograd nodes, on whatever thread, that no forward operator interrupts.

    What a node runs inside (recomputation, double backward) is part of it.
    """
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
    epilogues = host_spans(trace, lambda name: name.startswith(_EPILOGUES))
    epilogues = epilogues[np.argsort(trace.ts[epilogues], kind="stable")]
    passes: list[Backward] = []
    for k, begin in enumerate(begins):
        stop = begins[k + 1] if k + 1 < len(begins) else len(times)
        inside = backward[begin:stop]
        after = times[begin:stop][~inside]
        resumes = int(after.min()) if len(after) else None
        limit = resumes if resumes is not None else int(np.iinfo(np.int64).max)
        own = epilogues[np.searchsorted(trace.ts[epilogues], times[begin]) :]
        own = own[: np.searchsorted(trace.ts[own], limit)]
        end = max([int(ends[begin:stop][inside].max()), *trace.end[own].tolist()])
        passes.append(Backward(int(times[begin]), end, resumes))
    return passes
