"""Which span encloses which, for all lanes at once."""

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_ROUNDS = 64


def enclosing(lane: Int32, start: Int64, end: Int64, encloses: Bool) -> Int32:
    """For each event the innermost span of its lane that starts no later and ends no earlier; -1 if none
    does.

    Args:
        lane, start, end: of n events; ns.
        encloses: which of them can be a parent.

    Spans of a lane may overlap without nesting. Of several spans with the same start and end the earlier
    one in the file is the outer one. Among the spans that enclose an event the one that starts last counts
    as innermost, of those the shortest.

    Sorted by start and falling end, the parent is the nearest previous span that ends no earlier. Each
    event's candidate jumps to the candidate's candidate until that holds, which is right at every step
    because whatever is jumped over ends earlier still; flat lists take logarithmically many rounds, and
    each element of a deep nest is left only once, so that the rest of a long walk is done one by one.
    """
    n = len(lane)
    order = np.lexsort((-end, start, lane))  # stable: file order among equals
    lanes, reach = lane[order], end[order]
    # The nearest span before each event, which is the first candidate: whatever else lies between encloses nothing.
    latest = np.maximum.accumulate(np.where(encloses[order], np.arange(n, dtype=np.int32), np.int32(-1)))
    candidate = np.concatenate((np.full(min(n, 1), -1, np.int32), latest[:-1]))
    candidate[lanes[candidate] != lanes] = -1
    active = np.flatnonzero(candidate >= 0)
    for _ in range(_ROUNDS):
        active = active[reach[candidate[active]] < reach[active]]
        if not len(active):
            break
        candidate[active] = candidate[candidate[active]]
        active = active[candidate[active] >= 0]
    else:
        _walk(active, candidate, reach)
    parent = np.full(n, -1, np.int32)
    found = candidate >= 0
    parent[order[found]] = order[candidate[found]]
    return parent


def _walk(active: npt.NDArray[np.intp], candidate: Int32, reach: Int64) -> None:
    for i in active.tolist():  # ascending: whatever lies before is settled
        c = candidate[i]
        while c >= 0 and reach[c] < reach[i]:
            c = candidate[c]
        candidate[i] = c
