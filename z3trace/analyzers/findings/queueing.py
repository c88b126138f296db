"""Gathers that stand in a queue behind reductions."""

import numpy as np

from z3trace.analyzers.findings.evidence import Evidence
from z3trace.analyzers.findings.stalls import WAKE_NS
from z3trace.analyzers.trace import NULL


def behind_reductions(evidence: Evidence) -> dict[tuple[int, int], int]:
    """(rank, index) of gathers that backward waited for -> exposed ns that a reduce-scatter before them took.

    Only gathers asked for ahead of their use count, which began as a reduce-scatter of their group ended: on a
    communicator of their own they could have run beside it.
    """
    if not evidence.on_device:
        return {}
    found: dict[tuple[int, int], int] = {}
    for position, stall in evidence.each_stall():
        if stall.phase != "backward" or stall.late or evidence.kind_waited(position, stall) != "all_gather":
            continue
        rank, k = evidence.ranks[position], stall.waited
        owner, c = rank.attribution.owners[k], rank.collectives
        if owner.reason == "demand":
            continue
        before = np.flatnonzero(
            c.is_kind("reduce_scatter")
            & (c.end != NULL)
            & (np.abs(c.end - c.start[k]) < WAKE_NS)
            & (c.end > c.issue_ns[k])
        )
        same = [r for r in before.tolist() if c.group[r] == c.group[k]]
        queued = sum(int(c.end[r] - max(c.start[r], c.issue_ns[k])) for r in same)
        left = stall.own - (stall.hideable if owner.reason is None else 0)
        if queued > 0 and left > 0:
            found[position, k] = found.get((position, k), 0) + min(queued, left)
    return found
