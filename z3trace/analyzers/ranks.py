"""The same collective on several ranks: how long the transfer took and how long each waited for its peers."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.pipeline import RankAnalysis
from z3trace.analyzers.trace import NULL

Integers = NDArray[np.int64]


def transfer_times(ranks: Sequence[RankAnalysis]) -> tuple[list[Integers], list[str]]:
    """Transfer time of each rank's collectives: the shortest over the ranks for the same collective.

    Collectives are the same when they are the n-th of their kind and size in the same step (and group). Returns an
    array (n,) in ns for each rank, NULL where unknown, and notes. One rank alone: all unknown.
    """
    transfers = [np.full(len(r.collectives), NULL, np.int64) for r in ranks]
    if len(ranks) < 2:
        return transfers, [
            "one rank: time in collectives cannot be split into transfer and waiting for peers"
        ]
    members: dict[tuple[tuple[object, ...], int], list[tuple[int, int]]] = defaultdict(list)
    for position, rank in enumerate(ranks):
        seen: dict[tuple[object, ...], int] = defaultdict(int)
        for k in range(len(rank.collectives)):
            step = rank.step_number(k)
            group = rank.collectives.group[k]
            key = (step, rank.collectives.kind[k], group, int(rank.collectives.bytes[k]))
            seen[key] += 1
            if step is not None and rank.collectives.end[k] != NULL:
                members[key, seen[key]].append((position, k))
    unmatched = 0
    for same in members.values():
        if len(same) < 2:
            unmatched += 1
            continue
        shortest = min(int(ranks[r].collectives.end[k] - ranks[r].collectives.start[k]) for r, k in same)
        for r, k in same:
            transfers[r][k] = shortest
    notes = [f"{unmatched} collectives are seen on one rank only"] if unmatched else []
    return transfers, notes
