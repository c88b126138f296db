"""What gathered parameters hold in memory over time, and what the allocator did.

A gathered unit takes memory from the issue of its gather on, in the order of the host, because that is when the
caching allocator hands it out. It is let go where a label says so, else after its last use: the end of the last
stretch in which its module ran before it was gathered again. A trace that shows neither has no such number.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.host import host_spans
from z3trace.analyzers.phases import BACKWARD, FORWARD
from z3trace.analyzers.pipeline import RankAnalysis
from z3trace.analyzers.spans import ModuleSpans
from z3trace.analyzers.steps import Step
from z3trace.analyzers.trace import NULL, Trace
from z3trace.engine.labels import PREFIX, parse_label

_ALLOCATOR_CALL = re.compile(
    r"(?:cuda|hip|cu)(?:Malloc|Free|ExtMalloc|HostAlloc|HostMalloc|HostFree|FreeHost|Mem(?:Create|Release|Map|Unmap"
    r"|SetAccess|AddressReserve|AddressFree|Alloc|Free))\w*"
)


@dataclass(frozen=True)
class Held:
    """One gather's memory: `bytes` from `start` to `used` for its first use, and on to `end`. Host times in ns.

    `persistent`: gathered after the optimizer's step, to stay.
    """

    start: int
    used: int
    end: int
    bytes: int
    persistent: bool


@dataclass(frozen=True)
class Peak:
    """The most that gathered parameters hold at one instant of a step, and why it is held then, in bytes."""

    at: int
    bytes: int
    prefetched: int
    in_use: int
    kept: int
    persistent: int


def held_by_gathers(rank: RankAnalysis, step: Step) -> list[Held] | None:
    """What each gather of a step holds; None where the trace shows no release and no use of any."""
    index = rank.steps.steps.index(step)
    c, placement, owners = rank.collectives, rank.placement, rank.attribution.owners
    members = np.flatnonzero(c.is_kind("all_gather") & (placement.step == index)).tolist()
    releases, spans = _releases(rank.trace), rank.attribution.spans
    if not members or (not releases and spans is None) or (c.bytes[members] == NULL).any():
        return None
    following: dict[object, int] = {}
    found = []
    for k in reversed(members):
        owner, issued = owners[k], int(c.issue_ns[k])
        key: object = owner.parameters or owner.unit or k
        again = following.get(key, step.mark_end)
        following[key] = issued
        end, used = _released(releases, owner.unit, owner.parameters, issued), issued
        if spans is not None and owner.used_in is not None:
            used = _first_use(spans, owner.used_in, owner.used_phase == BACKWARD, issued, again)
            if owner.reason not in (None, "prefetch"):
                used = issued  # whoever asks for it waits for it
            end = end if end is not None else _last_use(spans, owner.used_in, used, again)
        if end is None:
            # Seen neither used nor released (the model's own unit): it stays.
            end = again
        if placement.phase[k] not in (FORWARD, BACKWARD):
            # What is gathered again after each step was whole all through this one, too.
            found.append(Held(step.mark_start, step.mark_start, step.mark_end, int(c.bytes[k]), True))
        else:
            found.append(Held(issued, used, max(issued, min(end, again)), int(c.bytes[k]), False))
    return found[::-1]


def _releases(trace: Trace) -> dict[str, list[int]]:
    """Unit -> instants at which a label says that it is released."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in host_spans(trace, lambda name: name.startswith(PREFIX + "release ")).tolist():
        label = parse_label(trace.name_of(row))
        unit = label.text("unit") if label is not None else None
        if unit is not None:
            found[unit].append(int(trace.end[row]))
    return {unit: sorted(times) for unit, times in found.items()}


def _released(
    releases: dict[str, list[int]], unit: str | None, parameters: Sequence[str] | None, issued: int
) -> int | None:
    times = []
    for name in [unit] if unit in releases else list(parameters or ()):
        known = releases.get(name or "", [])
        position = bisect_right(known, issued)
        if position < len(known):
            times.append(known[position])
    return max(times, default=None)


def _inside(spans: ModuleSpans, module: str) -> NDArray[np.bool_]:
    """Mask of the stretches of a module or of what is inside it."""
    return np.array([not module or p == module or p.startswith(module + ".") for p in spans.paths], np.bool_)


def _first_use(spans: ModuleSpans, module: str, backward: bool, issued: int, again: int) -> int:
    """When a module first runs in the phase after an instant: at once when it is running already."""
    own = (
        _inside(spans, module) & (spans.backward == backward) & (spans.ends > issued) & (spans.starts < again)
    )
    return max(issued, int(spans.starts[own].min())) if own.any() else issued


def _last_use(spans: ModuleSpans, module: str, used: int, again: int) -> int | None:
    """The end of the last stretch of a module, or of what is inside it, that runs in [used, again).

    A stretch that reaches beyond `again` is the one for which it was gathered again.
    """
    own = _inside(spans, module) & (spans.ends > used) & (spans.ends <= again)
    return int(spans.ends[own].max()) if own.any() else None


def peak_of(held: Sequence[Held]) -> Peak | None:
    """The instant at which most is held."""
    if not held:
        return None
    edges = sorted([(h.start, h.bytes) for h in held] + [(h.end, -h.bytes) for h in held])
    live = most = 0
    at = edges[0][0]
    for time, change in edges:
        live += change
        if live > most:
            most, at = live, time
    there = [h for h in held if h.start <= at < h.end]
    persistent = sum(h.bytes for h in there if h.persistent)
    rest = [h for h in there if not h.persistent]
    prefetched = sum(h.bytes for h in rest if at < h.used)
    latest = max((h.used for h in rest if h.used <= at), default=0)
    in_use = sum(h.bytes for h in rest if h.used == latest)
    kept = sum(h.bytes for h in rest) - prefetched - in_use
    return Peak(at, most, prefetched, in_use, kept, persistent)


def allocator_calls(trace: Trace, step: Step) -> tuple[int, int]:
    """(number, ns) of the driver's allocations and frees inside a step's mark."""
    rows = host_spans(trace, lambda name: bool(_ALLOCATOR_CALL.fullmatch(name)))
    rows = rows[(trace.ts[rows] >= step.mark_start) & (trace.ts[rows] < step.mark_end)]
    return len(rows), int(trace.dur[rows].sum())


def recorded_peaks(trace: Trace, step: Step) -> tuple[int | None, int | None]:
    """(allocated, reserved) bytes at most inside a step's mark, by the profiler's memory events."""
    total = trace.ints("total_allocated")
    rows = np.flatnonzero((total != NULL) & (trace.ts >= step.mark_start) & (trace.ts < step.mark_end))
    if trace.device != "cpu":
        rows = rows[trace.ints("alloc_device")[rows] >= 0]
    if not len(rows):
        return None, None
    reserved = trace.ints("total_reserved")[rows]
    known = reserved[reserved != NULL]
    return int(total[rows].max()), int(known.max()) if len(known) and known.max() > 0 else None


def memory_rows(rank: RankAnalysis) -> list[dict[str, Any]]:
    """Rows of the memory table, one a step."""
    rows = []
    for step in rank.steps.steps:
        held = held_by_gathers(rank, step)
        peak = peak_of(held) if held else None
        calls, time = allocator_calls(rank.trace, step)
        allocated, reserved = recorded_peaks(rank.trace, step)
        rows.append({
            "rank": rank.rank, "step": step.number,
            "peak_gathered_bytes": peak.bytes if peak else None, "at_ns": peak.at if peak else None,
            "prefetched_bytes": peak.prefetched if peak else None, "in_use_bytes": peak.in_use if peak else None,
            "kept_bytes": peak.kept if peak else None, "persistent_bytes": peak.persistent if peak else None,
            "allocator_calls": calls, "allocator_ns": time,
            "peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved,
        })  # fmt: skip
    return rows
