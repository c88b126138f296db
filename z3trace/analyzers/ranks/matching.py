"""The same collective on several ranks: joined by step, group and position in the group's sequence."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from z3trace.analyzers.pipeline import RankAnalysis
from z3trace.analyzers.trace import NULL, Trace

# Members of these may send different amounts; of all others every member has the same size.
_UNEVEN = ("all_to_all", "send_recv", "other")
Signature = tuple[str, int]
Place = tuple[int | None, str | None]


@dataclass(frozen=True)
class Joined:
    """One collective as its members saw it: `members` are (position in the list of ranks, index in its collectives)."""

    place: Place
    index: int
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Mismatch:
    """The first place at which two ranks' sequences of one group differ: what each has there (None: nothing)."""

    step: int | None
    group: str | None
    index: int
    seen: tuple[tuple[int, Signature | None], ...]


def join(ranks: Sequence[RankAnalysis]) -> tuple[list[Joined], list[Mismatch]]:
    """Collectives that several ranks have in common, and where their sequences disagree.

    The sequences of one group are compared step by step. Where they differ, those before the first difference
    are joined and the rest, whose partners are not known, are left out. What ran outside all steps is joined
    only where all ranks have equally many, for a recording may begin in the middle.
    """
    places: dict[Place, dict[int, list[int]]] = defaultdict(dict)
    for position, rank in enumerate(ranks):
        # Groups of one name are the same only where they have the same members.
        members = members_of_groups(rank.trace)
        for k in range(len(rank.collectives)):
            name = rank.collectives.group[k]
            place = (rank.step_number(k), f"{name} {members.get(name, '')}" if name is not None else None)
            places[place].setdefault(position, []).append(k)
    joined: list[Joined] = []
    mismatches: list[Mismatch] = []
    for place, sequences in places.items():
        if len(sequences) < 2:
            continue
        signatures = {p: [_signature(ranks[p], k) for k in ks] for p, ks in sequences.items()}
        common, differs = _common(signatures)
        # Without names of groups these may be several groups' collectives: then nothing can be said.
        if differs and (place[0] is None or (place[1] is None and not _one_group(ranks))):
            continue
        if differs:
            seen = tuple(
                (ranks[p].rank, s[common] if common < len(s) else None) for p, s in sorted(signatures.items())
            )
            mismatches.append(Mismatch(place[0], place[1], common, seen))
        joined += [
            Joined(place, index, tuple((p, ks[index]) for p, ks in sequences.items()))
            for index in range(common)
        ]
    return joined, mismatches


def members_of_groups(trace: Trace) -> dict[str, str]:
    """Name of each process group -> its members as text, from the trace's metadata."""
    info = trace.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        return {}
    return {
        str(group["pg_name"]): str(group["ranks"])
        for group in groups
        if isinstance(group, Mapping) and "pg_name" in group and "ranks" in group
    }


def _one_group(ranks: Sequence[RankAnalysis]) -> bool:
    """Whether the traces say that there is one process group only."""
    return all(len(members_of_groups(rank.trace)) == 1 for rank in ranks)


def _signature(rank: RankAnalysis, k: int) -> Signature:
    kind = rank.collectives.kind[k]
    return kind, NULL if kind in _UNEVEN else int(rank.collectives.bytes[k])


def _common(sequences: dict[int, list[Signature]]) -> tuple[int, bool]:
    """(length of the common beginning, whether anything differs after it)."""
    shortest = min(map(len, sequences.values()))
    for index in range(shortest):
        if len({sequence[index] for sequence in sequences.values()}) > 1:
            return index, True
    return shortest, any(len(sequence) != shortest for sequence in sequences.values())


def starts_and_ends(ranks: Sequence[RankAnalysis], joined: Sequence[Joined]) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of each joined collective on each rank, shape (collectives, ranks), NULL where unknown."""
    starts = np.full((len(joined), len(ranks)), NULL, np.int64)
    ends = np.full((len(joined), len(ranks)), NULL, np.int64)
    for row, same in enumerate(joined):
        for position, k in same.members:
            if ranks[position].collectives.start[k] != NULL:
                starts[row, position] = ranks[position].collectives.start[k]
                ends[row, position] = ranks[position].collectives.end[k]
    return starts, ends
