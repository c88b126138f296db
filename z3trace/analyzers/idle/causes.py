"""Why the device idled: each nanosecond of a gap charged to exactly one cause.

A gap ends with some device operation. If that operation had been launched in time, the device itself was
waiting (for an event, or between two operations of a stream): `device_gap`. Otherwise the host was late:
while it was blocked or loading data, that is the cause; for the rest, the latest blocking call is, up to the
time the host was blocked there (without it the host would have been that much ahead), and beyond that
whatever the host was doing.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.activity import Activity
from z3trace.analyzers.idle.states import BLOCKING, STATES, Timeline
from z3trace.analyzers.trace import Trace

DEVICE_GAP, END_OF_TRACE = "device_gap", "end_of_trace"
# A start later than the fastest launch of the trace by more than this waited for something on the device.
LAUNCH_TOLERANCE_NS = 2_000
_DIRECT = (*BLOCKING, "host_dataloader")


@dataclass(frozen=True)
class Piece:
    """A stretch of idle time with its name in one split; `row` is the host event it points to (-1 none)."""

    start: int
    end: int
    name: str
    row: int = -1


@dataclass(frozen=True)
class IdleSplits:
    """All idle time of a trace, cut twice: each list covers the same gaps, in order, without overlap."""

    host_state: tuple[Piece, ...]
    cause: tuple[Piece, ...]


def split_idle(trace: Trace, activity: Activity, timeline: Timeline, start: int, end: int) -> IdleSplits:
    """Cut the idle time of [start, end) by host state and by cause."""
    gaps = iv.complement(activity.busy, start, end)
    by_state = [Piece(*piece) for a, b in gaps.tolist() for piece in timeline.split(a, b)]
    if not activity.on_device:
        # Nothing is launched: the device is the host, and what it was doing is the cause.
        return IdleSplits(tuple(by_state), tuple(by_state))
    return IdleSplits(tuple(by_state), tuple(_causes(trace, activity, timeline, gaps)))


def _causes(trace: Trace, activity: Activity, timeline: Timeline, gaps: iv.Array) -> list[Piece]:
    rows = activity.rows
    rows = rows[np.argsort(trace.ts[rows], kind="stable")]
    starts = trace.ts[rows]
    launches = trace.launches[rows]
    delays = np.where(launches >= 0, starts - trace.ts[np.maximum(launches, 0)], np.iinfo(np.int64).max)
    positive = delays[delays > 0]
    fastest = int(positive.min()) if len(positive) else 0
    calls = _blocking_calls(timeline)
    pieces: list[Piece] = []
    for low, high in gaps.tolist():
        at = int(np.searchsorted(starts, high, side="left"))
        if at == len(starts):
            pieces.append(Piece(low, high, END_OF_TRACE))
            continue
        same = slice(at, int(np.searchsorted(starts, starts[at], side="right")))
        if starts[at] == high and int(delays[same].min()) > fastest + LAUNCH_TOLERANCE_NS:
            pieces.append(Piece(low, high, DEVICE_GAP, int(rows[at])))
            continue
        pieces += _late_launch(timeline, calls, low, high)
    return pieces


@dataclass
class _BlockingCalls:
    ends: NDArray[np.int64]
    left: list[int]  # time blocked there that no gap has been charged with yet
    names: list[str]
    rows: list[int]


def _blocking_calls(timeline: Timeline) -> _BlockingCalls:
    """The host's blocking calls in order of their ends."""
    codes = [STATES.index(name) for name in BLOCKING]
    found: dict[int, list[int]] = {}
    for k in np.flatnonzero(np.isin(timeline.states, codes)).tolist():
        row = int(timeline.rows[k])
        entry = found.setdefault(row, [0, 0, int(timeline.states[k])])
        entry[0] = max(entry[0], int(timeline.ends[k]))
        entry[1] += int(timeline.ends[k] - timeline.starts[k])
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    return _BlockingCalls(
        np.array([e[0] for _, e in ordered], np.int64), [e[1] for _, e in ordered],
        [STATES[e[2]] for _, e in ordered], [row for row, _ in ordered],
    )  # fmt: skip


def _late_launch(timeline: Timeline, calls: _BlockingCalls, low: int, high: int) -> list[Piece]:
    pieces = []
    for start, end, state, row in timeline.split(low, high):
        if state in _DIRECT:
            pieces.append(Piece(start, end, state, row))
            continue
        latest = int(np.searchsorted(calls.ends, start, side="right")) - 1
        charged = min(end - start, calls.left[latest]) if latest >= 0 else 0
        if charged:
            calls.left[latest] -= charged
            pieces.append(Piece(start, start + charged, calls.names[latest], calls.rows[latest]))
        if start + charged < end:
            pieces.append(Piece(start + charged, end, state, row))
    return pieces


def totals(
    trace: Trace, pieces: tuple[Piece, ...], start: int, end: int
) -> list[tuple[str, int, int, str | None]]:
    """(name, pieces, ns, the operation that had most of it) of the pieces inside [start, end), largest first."""
    amount: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    where: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    previous: tuple[str, int] | None = None
    for piece in pieces:
        low, high = max(piece.start, start), min(piece.end, end)
        if high <= low:
            continue
        amount[piece.name] += high - low
        if previous != (piece.name, low):
            count[piece.name] += 1
        previous = (piece.name, high)
        if piece.row >= 0:
            where[piece.name][trace.name_of(piece.row)] += high - low
    return [
        (name, count[name], ns, max(where[name], key=where[name].__getitem__) if where[name] else None)
        for name, ns in sorted(amount.items(), key=lambda item: -item[1])
    ]
