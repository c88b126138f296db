"""What the device did: computing, communicating, moving memory, as interval sets."""

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.host import HostThreads, nearest_ancestor, spans
from z3trace.analyzers.kinds import kind_of_operator
from z3trace.analyzers.trace import NULL, Trace

Mask = NDArray[np.bool_]

# NCCL and RCCL under all their kernel names, symmetric-memory kernels, and the custom all-reduces of vLLM.
COMMUNICATION_KERNEL = re.compile(
    r"nccl|rccl|oneccl|symm_mem|multimem_|one_shot_all_reduce|two_shot_all_reduce|cross_device_reduce",
    re.IGNORECASE,
)
# Kernels of expert-parallel libraries that are communication but carry no collective's name.
LIKELY_COMMUNICATION = re.compile(r"\b(deep_?ep|dpsk)::.*(dispatch|combine)|nvshmem", re.IGNORECASE)
# Dispatcher names that wrap or wait for others instead of computing.
_NOT_COMPUTE = ("c10d::", "_c10d_functional", "autograd::", "torch::autograd::", "z3::")
_COMPILED = ("graph_", "cpp_fused", "triton_")

DEVICE_SENTENCE = (
    "Compute is the union of kernels that are not collectives, communication the union of collective "
    "kernels, memory the union of copies and fills."
)
CPU_SENTENCE = (
    "CPU trace: communication is the union of gloo's spans on its worker threads (waiting for peers "
    "included), compute the union of operators on the other threads, less c10d calls."
)


@dataclass(frozen=True)
class Activity:
    """The device's activity. The `…_rows` are the events behind the sets.

    `launched_before` are the device events whose launch came before the recording began: they are real and
    count in the steps they run in, but not in the totals of the whole trace, of which they are a torn edge.
    """

    on_device: bool
    compute: iv.Array
    communication: iv.Array
    memory: iv.Array
    compute_rows: NDArray[np.int64]
    communication_rows: NDArray[np.int64]
    memory_rows: NDArray[np.int64]
    definition: str
    launched_before: NDArray[np.int64]
    hints: tuple[str, ...] = ()

    def recorded(self, trace: Trace) -> "Activity":
        """The activity without what was launched before the recording began."""
        if not len(self.launched_before):
            return self
        compute, communication, memory = (
            np.setdiff1d(rows, self.launched_before, assume_unique=True)
            for rows in (self.compute_rows, self.communication_rows, self.memory_rows)
        )
        return replace(
            self,
            compute=_cover(trace, compute),
            communication=_cover(trace, communication),
            memory=_cover(trace, memory),
            compute_rows=compute,
            communication_rows=communication,
            memory_rows=memory,
        )

    @property
    def busy(self) -> iv.Array:
        return iv.merge(self.compute, self.communication, self.memory)

    @property
    def rows(self) -> NDArray[np.int64]:
        """All events behind the three sets, by row number."""
        return np.sort(np.concatenate((self.compute_rows, self.communication_rows, self.memory_rows)))


def _cover(trace: Trace, rows: NDArray[np.int64]) -> iv.Array:
    return iv.union(trace.ts[rows], trace.end[rows])


def find_activity(
    trace: Trace, threads: HostThreads, communication_pattern: re.Pattern[str] | None = None
) -> Activity:
    """Classify the trace's activity: kernels where there are any, else operators and gloo's spans.

    `communication_pattern` marks further kernels (by name) as communication.
    """
    complete = spans(trace)
    kernels = complete & trace.is_cat("kernel")
    memory = complete & trace.is_cat("gpu_memcpy", "gpu_memset")
    if kernels.any() or memory.any():
        return _device_activity(trace, kernels, memory, communication_pattern)
    return _cpu_activity(trace, threads)


def _device_activity(trace: Trace, kernels: Mask, memory: Mask, pattern: re.Pattern[str] | None) -> Activity:
    def is_communication(name: str) -> bool:
        return bool(COMMUNICATION_KERNEL.search(name) or (pattern and pattern.search(name)))

    communication = kernels & trace.named(is_communication)
    if trace.has("collective"):
        communication |= kernels & (trace.codes("collective") != trace.values("collective").index(None))
    likely = kernels & ~communication & trace.named(lambda name: bool(LIKELY_COMMUNICATION.search(name)))
    hints: tuple[str, ...] = ()
    if likely.any():
        example = trace.name_of(int(np.flatnonzero(likely)[0]))
        hints = (
            f"{int(likely.sum())} kernels like {example[:60]!r} look like expert-parallel communication but "
            "are counted as compute; name them with --comm-kernels to count them as communication",
        )
    copies = _collective_copies(trace, memory)
    communication |= copies
    memory = memory & ~copies
    devices = {trace.lanes[lane].device for lane in np.unique(trace.lane[kernels | memory]) if lane >= 0}
    if len(devices) > 1:
        hints += (
            f"one process uses {len(devices)} devices: times are unions over all of them, and a device is idle "
            "only when all are",
        )
    before = _launched_before(trace, np.flatnonzero(kernels | memory | copies))
    if len(before):
        hints += (
            f"{len(before)} device activities were launched before the recording began: "
            "they count in the steps they run in, not in the totals of the whole trace",
        )
    compute_rows = np.flatnonzero(kernels & ~communication)
    communication_rows, memory_rows = np.flatnonzero(communication), np.flatnonzero(memory)
    return Activity(
        True,
        _cover(trace, compute_rows),
        _cover(trace, communication_rows),
        _cover(trace, memory_rows),
        compute_rows,
        communication_rows,
        memory_rows,
        DEVICE_SENTENCE,
        before,
        hints,
    )


def _collective_copies(trace: Trace, memory: Mask) -> Mask:
    """Copies between devices that a collective launched: copy engines instead of kernels moved its data."""
    between = memory & trace.named(lambda name: "ptop" in name.lower() or "peertopeer" in name.lower())
    rows = np.flatnonzero(between & (trace.launches >= 0))
    issues = trace.named(lambda name: kind_of_operator(name) is not None or name == "record_param_comms")
    around = nearest_ancestor(trace, trace.launches[rows].astype(np.int64), issues)
    mask = np.zeros(len(trace), np.bool_)
    mask[rows[around >= 0]] = True
    return mask


def _launched_before(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those without a launch whose correlation id, a growing counter, lies below that of every launch."""
    launches, correlation = trace.launches[rows], trace.ints("correlation")[rows]
    launched = launches >= 0
    if not launched.any():
        return np.empty(0, np.int64)
    earliest = correlation[launched].min()
    before: NDArray[np.int64] = rows[~launched & (correlation != NULL) & (correlation < earliest)]
    return before


def is_compute_operator(name: str) -> bool:
    """Whether a CPU operator computes, rather than wrapping, issuing, or waiting for something."""
    if name.startswith(_COMPILED):
        return True
    return "::" in name and not name.startswith(_NOT_COMPUTE)


def _cpu_activity(trace: Trace, threads: HostThreads) -> Activity:
    on_worker = np.isin(trace.lane, threads.workers)
    complete = spans(trace)
    communication_rows = np.flatnonzero(complete & on_worker & trace.named(lambda n: n.startswith("gloo:")))
    operators = complete & trace.is_cat("cpu_op") & ~on_worker
    compute_rows = np.flatnonzero(operators & trace.named(is_compute_operator))
    issue_rows = np.flatnonzero(operators & trace.named(lambda n: n.startswith("c10d::")))
    lanes = trace.lane
    per_lane = []
    for lane in np.unique(lanes[compute_rows]):
        computing = _cover(trace, compute_rows[lanes[compute_rows] == lane])
        issuing = _cover(trace, issue_rows[lanes[issue_rows] == lane])
        per_lane.append(iv.subtract(computing, issuing))
    return Activity(
        False,
        iv.merge(*per_lane),
        _cover(trace, communication_rows),
        iv.EMPTY,
        compute_rows,
        communication_rows,
        np.empty(0, np.int64),
        CPU_SENTENCE,
        np.empty(0, np.int64),
    )
