"""Transfer and waiting for peers, and who came last."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.pipeline import RankAnalysis
from z3trace.analyzers.ranks.clocks import Clocks
from z3trace.analyzers.ranks.matching import Joined
from z3trace.analyzers.trace import NULL

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Arrivals:
    """For each rank, parallel to its collectives (NULL where unknown).

    `transfer` and `wait` add up to the collective's duration; `late`: by how much the rank came after the
    median of the others where it was the last, else 0; `last`: position of the rank that came last (-1: not
    known, or several did); `exposed_wait`: the part of the wait that no compute hides, each ns owned by one
    collective.
    """

    transfer: list[Integers]
    wait: list[Integers]
    late: list[Integers]
    last: list[Integers]
    exposed_wait: list[Integers]


def find_arrivals(
    ranks: Sequence[RankAnalysis], joined: Sequence[Joined], starts: Integers, ends: Integers, clocks: Clocks
) -> Arrivals:
    """Split every joined collective at the start of its last member, on the common time.

    Time from a member's start to that instant is waiting for peers, the rest transfer (as TraceLens and
    DeepSpeed's `show_straggler` have it).
    """
    transfer, wait, late, last = (
        [np.full(len(r.collectives), fill, np.int64) for r in ranks] for fill in (NULL, NULL, NULL, -1)
    )
    common = np.where(starts != NULL, starts - clocks.skew_ns[None, :], NULL)
    for row, same in enumerate(joined):
        there = [(p, k) for p, k in same.members if starts[row, p] != NULL]
        if len(there) < 2:
            continue
        begun = np.array([common[row, p] for p, _ in there])
        final = int(begun.max())
        # Of ranks that came at the very same time none is the last.
        alone = int(np.count_nonzero(begun == final)) == 1
        latest = there[int(begun.argmax())][0] if alone else -1
        for (p, k), start in zip(there, begun.tolist(), strict=True):
            duration = int(ends[row, p] - starts[row, p])
            wait[p][k] = min(final - start, duration)
            transfer[p][k] = duration - wait[p][k]
            last[p][k] = latest
            others = np.delete(begun, int(begun.argmax()))
            late[p][k] = final - int(np.median(others)) if p == latest else 0
    exposed = [_exposed_wait(rank, wait[p]) for p, rank in enumerate(ranks)]
    return Arrivals(transfer, wait, late, last, exposed)


def _exposed_wait(rank: RankAnalysis, wait: Integers) -> Integers:
    start, end = rank.collectives.start, rank.collectives.end
    result = np.full(len(start), NULL, np.int64)
    known = (wait != NULL) & (start != NULL)
    owned_starts, owned_ends = iv.first_owner(start[known], end[known])
    exposed = iv.Coverage(iv.subtract(rank.activity.communication, rank.activity.compute))
    until = np.minimum(owned_ends, start[known] + wait[known])
    result[known] = exposed.within(owned_starts, np.maximum(until, owned_starts))
    return result
