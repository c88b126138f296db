"""The ranks' clocks put on one time, by the ends of the collectives they have in common.

A collective ends on all its members at nearly the same time, whenever each of them joined. So the median
difference of the ends is the difference of the clocks. Ranks of one host share a clock: a difference that is
not clearly larger than the scatter of the ends is taken to be none.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.trace import NULL

Integers = NDArray[np.int64]

# Differences below this are noise of the ends, not of clocks: gloo's members end tens of microseconds apart.
LEAST_SKEW_NS = 20_000
# A median is trusted when it exceeds the scatter (median absolute deviation) by this factor ...
SCATTER_FACTOR = 3.0
# ... and rests on at least this many collectives.
LEAST_COLLECTIVES = 4


@dataclass(frozen=True)
class Clocks:
    """`skew_ns` (ranks,): by how much each rank's clock is ahead of the first's; 0 where none was found."""

    skew_ns: Integers

    @property
    def differ(self) -> bool:
        return bool((self.skew_ns != 0).any())


def align(ends: Integers) -> Clocks:
    """Clocks from the ends of joined collectives, shape (collectives, ranks), NULL where unknown.

    Each rank is compared with the first one; a rank that has nothing in common with it goes by those that do.
    """
    ranks = ends.shape[1]
    skew = np.zeros(ranks, np.int64)
    known = {0} if ranks else set()
    while True:
        found = {}
        for rank in range(ranks):
            if rank in known:
                continue
            differences = [
                ends[both, rank] - ends[both, other] + skew[other]
                for other in sorted(known)
                if (both := (ends[:, rank] != NULL) & (ends[:, other] != NULL)).any()
            ]
            if differences:
                # The first rank with something in common suffices: the others follow from it.
                found[rank] = _significant(differences[0])
        if not found:
            return Clocks(skew)
        for rank, value in found.items():
            skew[rank] = value
        known |= set(found)


def _significant(differences: Integers) -> int:
    median = int(np.median(differences))
    scatter = float(np.median(np.abs(differences - median)))
    trusted = len(differences) >= LEAST_COLLECTIVES
    return median if trusted and abs(median) > max(LEAST_SKEW_NS, SCATTER_FACTOR * scatter) else 0
