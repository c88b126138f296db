"""Where compute stood still, and for which collective.

A stall is a stretch in which the main compute stream runs nothing. If the operation that ends it had been
launched in time, it waited for the device: for the collective that ended last. All communication exposed
inside is charged to that one, also what queued before it on its stream, because compute needed only its
result. What of it could have been hidden is bounded by the compute that ran, in the same pass, since the
stall before while no communication ran: an earlier gather would have fitted there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.phases import NAMES
from z3trace.analyzers.pipeline import RankAnalysis
from z3trace.analyzers.trace import NULL

Integers = NDArray[np.int64]

# A collective's end and the start of what waited for it lie this close, event handling included.
WAKE_NS = 30_000
# A collective that starts this soon after it was asked for had nothing before it in the queue: the host was late.
PROMPT_NS = 60_000
# Shorter exposures are launch gaps, not waits; they do not end a run of compute.
LEAST_EXPOSED_NS = 10_000


@dataclass(frozen=True)
class Stall:
    """One stall in step `step` (index). Times in ns.

    `phase`, `micro_batch`: of the collective waited for, else of the operation that ended the stall. `waited`:
    index of the collective (-1: the host was late or the device waited for something else). `exposed`:
    communication in it that no compute hides; `peers`: the part that waited for peers. `hideable`: the part of
    the rest for which earlier compute of the same pass had room. `late`: the collective was issued so late
    that nothing but the host kept it from starting earlier.
    """

    step: int
    phase: str
    micro_batch: int
    start: int
    end: int
    waited: int
    exposed: int
    peers: int
    hideable: int
    late: bool

    @property
    def own(self) -> int:
        """Exposed communication less waiting for peers."""
        return self.exposed - self.peers


def find_stalls(rank: RankAnalysis, wait: Integers) -> list[Stall]:
    """The stalls of one rank's used steps. `wait`: waiting for peers of each collective (NULL unknown)."""
    return _Finder(rank, wait).stalls()


def main_compute(rank: RankAnalysis) -> tuple[Integers, Integers]:
    """(rows, host instants that started them) of the compute on the busiest stream, in order of start."""
    trace, rows = rank.trace, rank.activity.compute_rows
    if not rank.activity.on_device:
        rows = rows[np.argsort(trace.ts[rows], kind="stable")]
        return rows, trace.ts[rows]
    lanes = trace.lane[rows]
    busiest, time = -1, -1
    for lane in np.unique(lanes).tolist():
        total = int(trace.dur[rows[lanes == lane]].sum())
        if total > time:
            busiest, time = lane, total
    rows = rows[lanes == busiest]
    rows = rows[np.argsort(trace.ts[rows], kind="stable")]
    launches = trace.launches[rows]
    return rows, np.where(launches >= 0, trace.ts[np.maximum(launches, 0)], trace.ts[rows])


class _Finder:
    def __init__(self, rank: RankAnalysis, wait: Integers) -> None:
        self._rank, c = rank, rank.collectives
        self._timed = np.flatnonzero(c.start != NULL)
        self._timed = self._timed[np.argsort(c.end[self._timed], kind="stable")]
        self._ends = c.end[self._timed]
        communication = rank.activity.communication
        self._communication = iv.Coverage(communication)
        self._exposed = iv.Coverage(iv.subtract(communication, rank.activity.compute))
        waits = (wait != NULL) & (c.start != NULL)
        waiting = iv.union(c.start[waits], c.start[waits] + np.maximum(wait[waits], 0))
        self._peers = iv.Coverage(iv.intersect(waiting, iv.subtract(communication, rank.activity.compute)))
        rows, launched = main_compute(rank)
        trace = rank.trace
        # Overlapping rows (nested operators on CPU) are one run, begun by the first of them.
        reached = np.maximum.accumulate(trace.end[rows]) if len(rows) else rows
        opens = np.concatenate((np.ones(min(1, len(rows)), np.bool_), trace.ts[rows][1:] > reached[:-1]))
        self._run_starts, self._launched = trace.ts[rows][opens], launched[opens]
        last = np.append(np.flatnonzero(opens)[1:] - 1, len(rows) - 1) if len(rows) else rows
        self._run_ends = reached[last]
        codes, micro = rank.phases.at(self._launched)
        self._pass = micro * len(NAMES) + codes

    def stalls(self) -> list[Stall]:
        found: list[Stall] = []
        for index, step in enumerate(self._rank.steps.steps):
            if step.used:
                found += self._of_step(index, step.start, step.end)
        return found

    def _of_step(self, index: int, start: int, end: int) -> list[Stall]:
        first = int(np.searchsorted(self._run_ends, start, side="right"))
        last = int(np.searchsorted(self._run_starts, end, side="left"))
        edges = [
            start,
            *np.column_stack((self._run_starts, self._run_ends))[first:last].ravel().tolist(),
            end,
        ]
        found = []
        room_from, current_pass = start, -1
        for number, (begin, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
            run = first + number
            ahead = run if run < last else None
            if ahead is not None and self._pass[ahead] != current_pass:
                # A gather cannot be issued before its pass begins.
                current_pass = int(self._pass[ahead])
                room_from = max(begin, start)
            stall = self._stall(index, max(begin, start), min(stop, end), ahead, room_from)
            if stall is None:
                continue
            found.append(stall)
            if stall.exposed >= LEAST_EXPOSED_NS:
                room_from = stall.end
        return found

    def _within(self, coverage: iv.Coverage, start: int, end: int) -> int:
        return int(coverage.within(np.array([start]), np.array([end]))[0])

    def _stall(self, index: int, start: int, end: int, ahead: int | None, room_from: int) -> Stall | None:
        if end <= start:
            return None
        exposed = self._within(self._exposed, start, end)
        if not exposed:
            return None
        c = self._rank.collectives
        waited = self._waited(start, end)
        if waited >= 0 and ahead is not None and self._launched[ahead] > c.end[waited]:
            waited = -1
        peers = self._within(self._peers, start, end)
        room = 0
        if room_from < start:
            room = start - room_from - self._within(self._communication, room_from, start)
        # On CPU a collective begins when it is issued: that says nothing of the host.
        late = (
            waited >= 0
            and self._rank.activity.on_device
            and bool(c.start[waited] - c.issue_ns[waited] < PROMPT_NS)
        )
        if waited >= 0:
            phase, micro = self._rank.placement.phase[waited], int(self._rank.placement.micro_batch[waited])
        else:
            code, number = self._rank.phases.at(
                np.array([self._launched[ahead] if ahead is not None else end])
            )
            phase, micro = NAMES[int(code[0])], int(number[0])
        return Stall(
            index, phase, micro, start, end, waited, exposed, peers, min(exposed - peers, max(0, room)), late
        )

    def _waited(self, start: int, end: int) -> int:
        """The collective that ended last inside the stall; -1 without one, or when all run on beyond it."""
        at = int(np.searchsorted(self._ends, end + WAKE_NS, side="right")) - 1
        while at >= 0 and self._ends[at] > start:
            k = int(self._timed[at])
            if self._rank.collectives.start[k] < end:
                return k
            at -= 1
        return -1


def total(stalls: Sequence[Stall], steps: int) -> float:
    """Mean exposed communication of stalls per step, waiting for peers left out, ns."""
    return sum(stall.own for stall in stalls) / max(1, steps)
