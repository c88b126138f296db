"""Why the device idled: each nanosecond of a gap charged to exactly one cause.

A gap ends with some device operation. If that operation had been launched in time, the device itself was
waiting (for an event, or between two operations of a stream): `device_gap`. Otherwise the host was late:
while it was blocked or loading data, that is the cause; for the rest, the latest blocking call is, up to the
time the host was blocked there (without it the host would have been that much ahead), and beyond that
whatever the host was doing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.activity import Activity
from z3trace.analyzers.idle.states import BLOCKING, STATES, Timeline
from z3trace.analyzers.trace import Trace

Integers = NDArray[np.int64]

# Names of pieces by code: the host's states, then what only a cause can be.
NAMES = (*STATES, "device_gap", "end_of_trace")
_DEVICE_GAP, _END_OF_TRACE = NAMES.index("device_gap"), NAMES.index("end_of_trace")
_BLOCKING_CODES = [STATES.index(name) for name in BLOCKING]
_DIRECT_CODES = [*_BLOCKING_CODES, STATES.index("host_dataloader")]


@dataclass(frozen=True)
class Pieces:
    """Stretches of idle time, sorted and disjoint: starts, ends (n,) ns, code into NAMES, host event (-1 none)."""

    starts: Integers
    ends: Integers
    codes: Integers
    rows: Integers

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, mask: NDArray[np.bool_]) -> "Pieces":
        return Pieces(self.starts[mask], self.ends[mask], self.codes[mask], self.rows[mask])


@dataclass(frozen=True)
class IdleSplits:
    """All idle time of a trace, cut twice: each covers the same gaps."""

    host_state: Pieces
    cause: Pieces


@dataclass(frozen=True)
class Total:
    """Idle time under one name: pieces, ns, and the operation that had most of it (None without one)."""

    name: str
    pieces: int
    ns: int
    where: str | None


def split_idle(trace: Trace, activity: Activity, timeline: Timeline, start: int, end: int) -> IdleSplits:
    """Cut the idle time of [start, end) by host state and by cause."""
    gaps = iv.complement(activity.busy, start, end)
    starts, ends, stretches = timeline.overlay(gaps)
    by_state = Pieces(starts, ends, timeline.states[stretches].astype(np.int64), timeline.rows[stretches])
    if not activity.on_device:
        # Nothing is launched: the device is the host, and what it was doing is the cause.
        return IdleSplits(by_state, by_state)
    return IdleSplits(by_state, _causes(trace, activity, timeline, gaps, by_state))


def _causes(trace: Trace, activity: Activity, timeline: Timeline, gaps: iv.Array, by_state: Pieces) -> Pieces:
    rows = activity.rows
    rows = rows[np.argsort(trace.ts[rows], kind="stable")]
    starts, launches = trace.ts[rows], trace.launches[rows]
    never = np.iinfo(np.int64).max
    delays = np.where(launches >= 0, starts - trace.ts[np.maximum(launches, 0)], never)
    fastest = int(delays[delays > 0].min(initial=never))
    # Of operations that start at one instant, the one launched last decides.
    first = np.searchsorted(starts, gaps[:, 1], side="left")
    last = np.searchsorted(starts, gaps[:, 1], side="right")
    nothing_follows = first == len(starts)
    shortest = np.full(len(gaps), never, np.int64)
    ended = np.flatnonzero(last > first)
    if len(ended):
        bounds = np.column_stack((first[ended], last[ended])).ravel()
        shortest[ended] = np.minimum.reduceat(np.append(delays, never), bounds)[::2]
    # Launched in time: it could have started, as fast as the fastest launch of the trace, before the gap began.
    # An operation without a launch was launched before the recording began.
    launched = gaps[:, 1] - np.where(shortest < never, shortest, 0)
    in_time = (last > first) & ((shortest == never) | (launched + fastest <= gaps[:, 0]))
    own = nothing_follows | in_time
    whole = Pieces(
        gaps[own, 0],
        gaps[own, 1],
        np.where(nothing_follows[own], _END_OF_TRACE, _DEVICE_GAP),
        np.where(nothing_follows[own], -1, rows[np.minimum(first[own], len(rows) - 1)]),
    )
    gap_of = np.searchsorted(gaps[:, 0], by_state.starts, side="right") - 1
    return _joined(whole, *_charged(timeline, by_state.where(~own[gap_of])))


def _charged(timeline: Timeline, late: Pieces) -> tuple[Pieces, Pieces]:
    """Pieces of late launches: what the latest blocking call explains, and what the host's own activity does."""
    call_ends, budgets, codes, call_rows = _blocking_calls(timeline)
    latest = np.searchsorted(call_ends, late.starts, side="right") - 1
    eligible = ~np.isin(late.codes, _DIRECT_CODES) & (latest >= 0)
    lengths = np.where(eligible, late.ends - late.starts, 0)
    # In order of time, each call is charged until the time the host was blocked there is used up.
    before = np.cumsum(lengths) - lengths
    first_of_call = np.searchsorted(latest, latest, side="left")
    used = before - before[first_of_call] if len(before) else before
    budget = budgets[np.maximum(latest, 0)] if len(budgets) else np.zeros(len(late), np.int64)
    taken = np.where(eligible, np.clip(budget - used, 0, lengths), 0)
    some = taken > 0
    call = latest[some]
    charged = Pieces(
        late.starts[some], late.starts[some] + taken[some], codes[call] if len(codes) else call,
        call_rows[call] if len(call_rows) else call,
    )  # fmt: skip
    rest = Pieces(late.starts + taken, late.ends, late.codes, late.rows)
    return charged, rest.where(rest.ends > rest.starts)


def _blocking_calls(timeline: Timeline) -> tuple[Integers, Integers, Integers, Integers]:
    """(ends, ns blocked, state codes, events) of the host's blocking calls, by end."""
    inside = np.flatnonzero(np.isin(timeline.states, _BLOCKING_CODES))
    rows, index = np.unique(timeline.rows[inside], return_inverse=True)
    ends, blocked, codes = (np.zeros(len(rows), np.int64) for _ in range(3))
    np.maximum.at(ends, index, timeline.ends[inside])
    np.add.at(blocked, index, timeline.ends[inside] - timeline.starts[inside])
    codes[index] = timeline.states[inside]
    order = np.argsort(ends, kind="stable")
    return ends[order], blocked[order], codes[order], rows[order]


def _joined(*parts: Pieces) -> Pieces:
    starts, ends, codes, rows = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("starts", "ends", "codes", "rows")
    )
    order = np.argsort(starts, kind="stable")
    return Pieces(starts[order], ends[order], codes[order], rows[order])


def totals(trace: Trace, pieces: Pieces, start: int, end: int) -> list[Total]:
    """Sums by name of the pieces inside [start, end), clipped to it, largest first."""
    first = int(np.searchsorted(pieces.ends, start, side="right"))
    last = int(np.searchsorted(pieces.starts, end, side="left"))
    if last <= first:
        return []
    starts, ends = np.maximum(pieces.starts[first:last], start), np.minimum(pieces.ends[first:last], end)
    codes, rows = pieces.codes[first:last], pieces.rows[first:last]
    lengths = ends - starts
    # Pieces of one name that touch are one.
    fresh = np.append(True, (codes[1:] != codes[:-1]) | (starts[1:] != ends[:-1]))
    names = np.where(rows >= 0, trace.codes("name")[np.maximum(rows, 0)], -1)
    found = []
    for code in np.unique(codes).tolist():
        own = codes == code
        where, index = np.unique(names[own], return_inverse=True)
        times = np.bincount(index, weights=lengths[own])
        times[where < 0] = -1
        longest = int(where[np.argmax(times)])
        text = str(trace.values("name")[longest]) if longest >= 0 else None
        found.append(Total(NAMES[code], int(fresh[own].sum()), int(lengths[own].sum()), text))
    return sorted(found, key=lambda total: -total.ns)
