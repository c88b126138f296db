"""What the host was doing: a state for every instant of the training threads."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.host import HostThreads, is_step_mark, nearest_ancestor, spans
from z3trace.analyzers.kinds import kind_of_operator
from z3trace.analyzers.trace import Trace

Integers = NDArray[np.int64]

STATES = (
    "sync_stream", "sync_event", "sync_device", "allocator", "host_dataloader", "host_hooks",
    "host_collective_issue", "host_dispatch", "host_optimizer", "host_other",
)  # fmt: skip
BLOCKING = ("sync_stream", "sync_event", "sync_device", "allocator")
# A pause between two operators longer than this is the program's own work, not the cost of dispatching.
LONG_PAUSE_NS = 100_000

_SYNC = {
    "StreamSynchronize": "sync_stream",
    "EventSynchronize": "sync_event",
    "DeviceSynchronize": "sync_device",
}
_ALLOCATING = ("Malloc", "Free", "MallocHost", "HostAlloc", "FreeHost", "HostFree", "MallocAsync", "FreeAsync",
               "MallocManaged", "MemCreate", "MemRelease", "MemMap", "MemUnmap", "MemSetAccess",
               "MemAddressReserve", "MemAddressFree", "MemAlloc_v2", "MemAlloc", "MemFree", "MemFree_v2",
               "ExtMalloc", "HostMalloc")  # fmt: skip
_HOOK_PREFIXES = (
    "FSDP::", "FullyShardedDataParallel.", "PreBackwardFunction", "PostBackwardFunction", "z3::",
    "RegisterPostBackwardFunction", "DistributedDataParallel.",
)  # fmt: skip
_ISSUE_PREFIXES = ("FSDP::all_gather", "nccl:", "z3::gather", "z3::fetch", "z3::prefetch", "z3::reduce ")
# Ranges around a whole forward: what runs inside them is the model, not a hook.
_TRANSPARENT = (
    "FullyShardedDataParallel.forward",
    "DistributedDataParallel.forward",
    "z3::forward",
    "z3::backward",
)
# What frameworks do right before a coalesced gather or reduction: packing its input.
_PACKING = frozenset({"aten::cat", "aten::empty", "aten::copy_", "aten::_foreach_copy_", "aten::chunk_cat"})
_MODULE_ENTRY = "PostBackwardFunctionModule"  # the last thing DeepSpeed's pre-forward hook does
_NODE = "autograd::engine::evaluate_function: "
_NO_STATE = -1
_INHERIT = -2


def _state_of_name(name: str) -> int:
    """State that an event of this name puts the host in; `_INHERIT` where its surroundings decide."""
    for prefix in ("cuda", "hip", "cu"):
        if name.startswith(prefix):
            call = name[len(prefix) :]
            if call in _SYNC:
                return STATES.index(_SYNC[call])
            if call in _ALLOCATING:
                return STATES.index("allocator")
    if "DataLoader" in name and "__next__" in name:
        return STATES.index("host_dataloader")
    if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#", "z3::optimizer")):
        return STATES.index("host_optimizer")
    if name.startswith("FSDP::all_gather_copy_out"):
        return STATES.index("host_hooks")
    if name == "record_param_comms" or name.startswith(_ISSUE_PREFIXES) or kind_of_operator(name):
        return STATES.index("host_collective_issue")
    if name.startswith(_TRANSPARENT):
        return _INHERIT
    if name.removeprefix(_NODE).startswith(_HOOK_PREFIXES):
        return STATES.index("host_hooks")
    return _INHERIT


@dataclass(frozen=True)
class Timeline:
    """Consecutive stretches of host time: `starts` (n,) ns, state code and innermost event (-1: none) of each."""

    trace: Trace
    starts: Integers
    states: NDArray[np.int8]
    rows: Integers

    @cached_property
    def ends(self) -> Integers:
        return np.concatenate((self.starts[1:], [np.iinfo(np.int64).max]))

    def overlay(self, intervals: iv.Array) -> tuple[Integers, Integers, Integers]:
        """The intervals cut where the state changes: (starts, ends, stretch of each piece), in order of time.

        The first stretch of the timeline begins before everything, so each instant has one.
        """
        first = np.searchsorted(self.starts, intervals[:, 0], side="right") - 1
        last = np.searchsorted(self.starts, intervals[:, 1], side="left")
        counts = last - first
        whole = np.repeat(np.arange(len(intervals)), counts)
        stretch = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[whole]
        starts = np.maximum(self.starts[stretch], intervals[whole, 0])
        return starts, np.minimum(self.ends[stretch], intervals[whole, 1]), stretch


def host_timeline(trace: Trace, threads: HostThreads) -> Timeline:
    """The state of the host at every instant. An autograd thread that is active speaks for the host."""
    per_lane = [_innermost(trace, lane) for lane in threads.training]
    per_lane = [lane for lane in per_lane if len(lane[0])]
    beginning = np.array([np.iinfo(np.int64).min])
    starts = np.sort(np.concatenate([beginning, *(times for times, _ in per_lane)]), kind="stable")
    starts = starts[np.append(True, starts[1:] != starts[:-1])]
    rows = np.full(len(starts), -1, np.int64)
    for times, innermost in per_lane:  # main first: an autograd thread's event replaces it
        index = np.searchsorted(times, starts, side="right") - 1
        here = np.where(index >= 0, innermost[np.maximum(index, 0)], -1)
        rows = np.where(here >= 0, here, rows)
    states = _states(trace, rows)
    _extend_issues(trace, rows, states)
    paused = states == _NO_STATE
    _fill_pauses(starts, states)
    entry = trace.named({_MODULE_ENTRY})
    if entry.any():
        starts, rows, states = _split_off_hooks(trace, starts, rows, states, paused, entry)
    return Timeline(trace, starts, states, rows)


def _innermost(trace: Trace, lane: int) -> tuple[Integers, Integers]:
    """(times, row of the innermost event from there on, -1 none) of one lane; step marks are left out."""
    keep = spans(trace) & (trace.lane == lane) & (trace.dur > 0) & ~trace.named(is_step_mark)
    rows = np.flatnonzero(keep)
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    parents = nearest_ancestor(trace, rows, keep)
    starts, ends = trace.ts[rows], trace.end[rows]
    times = np.concatenate((ends, starts))
    opens = np.concatenate((np.zeros(len(rows), np.int8), np.ones(len(rows), np.int8)))
    # At one instant: ends before starts, inner ends before outer ones, outer starts before inner ones.
    nested = np.concatenate((-starts, -trace.dur[rows]))
    order = np.lexsort((nested, opens, times))
    times, innermost = times[order], np.concatenate((parents, rows))[order]
    last = np.concatenate((times[1:] != times[:-1], [True]))
    return times[last], innermost[last]


def _states(trace: Trace, rows: Integers) -> NDArray[np.int8]:
    by_name = np.array(
        [_state_of_name(n) if isinstance(n, str) else _INHERIT for n in trace.values("name")], np.int8
    )
    of_event = by_name[trace.codes("name")]
    hooks = of_event == STATES.index("host_hooks")
    strong = (of_event >= 0) & ~hooks
    operators = trace.is_cat("cpu_op") & (of_event == _INHERIT)
    states = np.full(len(rows), _NO_STATE, np.int8)
    active = np.flatnonzero(rows >= 0)
    strongest = nearest_ancestor(trace, rows[active], strong, or_self=True)
    weaker = nearest_ancestor(trace, rows[active], hooks | operators, or_self=True)
    chosen = np.full(len(active), _NO_STATE, np.int8)
    found = weaker >= 0
    dispatch = STATES.index("host_dispatch")
    chosen[found] = np.where(hooks[weaker[found]], STATES.index("host_hooks"), dispatch)
    found = strongest >= 0
    chosen[found] = of_event[strongest[found]]
    states[active] = chosen
    return states


def _extend_issues(trace: Trace, rows: Integers, states: NDArray[np.int8]) -> None:
    """Preparing a collective is part of issuing it: packing its input, and the hook's time right before it."""
    issue, hooks = STATES.index("host_collective_issue"), STATES.index("host_hooks")
    names = trace.values("name")
    packs = np.array([n in _PACKING for n in names], np.bool_)
    issues = np.array([isinstance(n, str) and kind_of_operator(n) is not None for n in names], np.bool_)
    codes = trace.codes("name")
    packing = nearest_ancestor(trace, np.maximum(rows, 0), packs[codes], or_self=True)
    packed = (rows >= 0) & (states == STATES.index("host_dispatch")) & (packing >= 0)
    # Read backwards from each call: packing and pauses lead on to it, a hook ends it, and so does all else.
    # A range that already holds its preparation reaches no further back; other issuing lets through.
    prefixed = np.array([isinstance(n, str) and n.startswith(_ISSUE_PREFIXES) for n in names], np.bool_)
    own_code = codes[np.maximum(rows, 0)]
    calls = (states == issue) & issues[own_code]
    passes = packed | (rows < 0) | ((states == issue) & ~prefixed[own_code])
    decided = np.where(calls | ~passes, np.arange(len(states)), len(states))
    following = np.minimum.accumulate(np.append(decided, len(states))[::-1])[::-1][1:]
    leads_to_call = np.append(calls, False)[following]
    states[leads_to_call & (packed | (states == hooks))] = issue


def _fill_pauses(starts: Integers, states: NDArray[np.int8]) -> None:
    """A pause belongs to what it leads to: preparing a collective, a hook, or the next operator."""
    paused = states == _NO_STATE
    following = np.where(paused, len(states), np.arange(len(states)))
    following = np.minimum.accumulate(following[::-1])[::-1]
    inside = following < len(states)
    ends = starts[np.minimum(following, len(starts) - 1)]
    other, dispatch = STATES.index("host_other"), STATES.index("host_dispatch")
    next_state = np.where(inside, states[np.minimum(following, len(states) - 1)], other)
    leads = np.isin(next_state, [STATES.index("host_collective_issue"), STATES.index("host_hooks")])
    short = inside & (ends - starts <= LONG_PAUSE_NS)
    states[paused] = np.where(leads, next_state, np.where(short, dispatch, other))[paused]


def _split_off_hooks(
    trace: Trace,
    starts: Integers,
    rows: Integers,
    states: NDArray[np.int8],
    paused: NDArray[np.bool_],
    entry: NDArray[np.bool_],
) -> tuple[Integers, Integers, NDArray[np.int8]]:
    """DeepSpeed's hooks leave no range: a hook that gathers is a hook that does not, and then the gather.

    The whole pauses before modules that gather nothing say how long the first part takes (their median); so
    much of a pause before a gather is the hook's. `entry` masks the events that end a pre-forward hook.
    """
    issue, hooks = STATES.index("host_collective_issue"), STATES.index("host_hooks")
    lengths = np.diff(starts, append=starts[-1:])
    lengths[0] = 0  # begins before everything
    before, after = np.append(-1, rows[:-1]), np.append(rows[1:], -1)
    # The hook may first wait for a gather on the device: that ends its first part, too.
    marks = trace.named(is_step_mark)
    alone_on_thread = (trace.parents < 0) | marks[trace.parents]
    call = trace.is_cat("cuda_runtime", "cuda_driver") & alone_on_thread
    waited = (before >= 0) & call[before]
    ends_part = (after >= 0) & (entry[after] | call[after])
    after_issue = np.append(False, states[:-1] == issue)
    alone = lengths[paused & (rows < 0) & ends_part & ~waited & ~after_issue]
    if not len(alone):
        return starts, rows, states
    typical = int(np.median(alone))
    whole = np.flatnonzero(paused & (states == issue) & ~after_issue & (lengths > typical))
    states = states.copy()
    states[whole] = hooks
    return (
        np.insert(starts, whole + 1, starts[whole] + typical),
        np.insert(rows, whole + 1, rows[whole]),
        np.insert(states, whole + 1, np.int8(issue)),
    )
