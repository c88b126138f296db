"""Ranks that keep the others waiting, and ranks that do not do the same."""

from collections.abc import Mapping

import numpy as np

from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding, Severity
from z3trace.analyzers.findings.evidence import Evidence
from z3trace.analyzers.idle import totals
from z3trace.analyzers.ranks import describe

# A rank whose idle time of one cause is this many times the others' median stands out.
_STANDS_OUT = 2.0


def only_some_ranks(evidence: Evidence, cause: str) -> bool:
    """Whether a cause of idle time is that of single ranks: the others have a small part of it."""
    times = [sum(ns for (c, _), ns in found.items() if c == cause) for found in evidence.idle_by_rank]
    return len(times) > 1 and max(times) > _STANDS_OUT * max(1.0, float(np.median(sorted(times)[:-1])))


def _excess(evidence: Evidence, position: int) -> dict[str, float]:
    """What a rank spends more of than the median of the others, by kind, ns per step, largest first."""

    def of(p: int) -> dict[str, float]:
        rows = evidence.anatomy_by_rank[p]
        found = {"compute": sum(r["compute"] for r in rows) / max(1, len(rows))}
        rank = evidence.ranks[p]
        for step in rank.steps.steps:
            if step.used:
                for total in totals(rank.trace, rank.idle.host_state, step.start, step.end):
                    found[total.name] = found.get(total.name, 0.0) + total.ns / max(1, len(rows))
        return found

    own, others = of(position), [of(p) for p in range(len(evidence.ranks)) if p != position]
    excess = {
        name: value - float(np.median([other.get(name, 0.0) for other in others]))
        for name, value in own.items()
    }
    return dict(sorted(((n, v) for n, v in excess.items() if v > 0), key=lambda item: -item[1]))


def late_ranks(evidence: Evidence) -> dict[int, tuple[float, Mapping[str, float]]]:
    """Position -> (what the rank costs the others per step, what it spends more of) of each late rank.

    Every rank is last sometimes: a straggler costs more than the others do in the middle, and causes more of
    all waiting than its part, in most of the used steps.
    """
    if not evidence.joined.several or not evidence.windows:
        return {}
    caused = np.array([evidence.joined.caused_by(p) for p in range(len(evidence.ranks))])
    found: dict[int, tuple[float, Mapping[str, float]]] = {}
    for position, own in enumerate(caused.tolist()):
        cost = own - float(np.median(np.delete(caused, position)))
        if cost < th.INFO_FRACTION * evidence.step_ns or not _often(evidence, position):
            continue
        excess = _excess(evidence, position)
        # Waiting that compute hides now would show once the exposed part is gone.
        more = min(sum(list(excess.values())[:1]), own * 1.5)
        found[position] = (max(cost, more), excess)
    return found


def _often(evidence: Evidence, position: int) -> bool:
    """Whether a rank causes more than its part of the waiting in most of the used steps."""
    arrivals, ranks = evidence.joined.arrivals, evidence.ranks
    limit = 1 / len(ranks) + th.STRAGGLER_SHARE
    found: dict[int, np.ndarray] = {}
    for other, rank in enumerate(ranks):
        waits, last = arrivals.exposed_wait[other], arrivals.last[other]
        for k in np.flatnonzero(evidence.joined.used(other) & (last >= 0) & (waits > 0)).tolist():
            step = rank.step_number(k)
            by_rank = found.setdefault(step if step is not None else -1, np.zeros(len(ranks)))
            if last[k] != other:
                by_rank[last[k]] += waits[k]
    shares = [caused[position] / caused.sum() for caused in found.values() if caused.sum() > 0]
    return bool(shares) and sum(share >= limit for share in shares) > len(shares) / 2


def _habit(evidence: Evidence) -> Severity | None:
    """On CPU a few steps' lateness is the machine's noise: info; otherwise severity goes by cost."""
    steps = max(evidence.joined.used_steps(p) for p in range(len(evidence.ranks)))
    return "info" if steps < th.STEPS_OF_A_HABIT and not evidence.on_device else None


def straggler(evidence: Evidence) -> Finding | None:
    """One or more ranks come last to the collectives."""
    late = {p: v for p, v in late_ranks(evidence).items() if next(iter(v[1]), "") != "host_dataloader"}
    if not late:
        return None
    said = {evidence.ranks[p].rank: _what(excess) for p, (_, excess) in late.items()}
    ranks = sorted(said)
    plural = "s" if len(ranks) > 1 else ""
    return Finding(
        "straggler",
        f"the others wait for rank{plural} {', '.join(map(str, ranks))}: "
        + "; ".join(f"rank {r} {said[r]}" for r in ranks[:4]),
        _together(evidence, late),
        _evidence(evidence, late),
        ("replace or free the device of the rank, or what shares its host",)
        if any(next(iter(x), "compute") == "compute" for _, x in late.values())
        else ("look at what the rank's host does: see evidence",),
        _habit(evidence),
    )


def straggler_dataloader(evidence: Evidence) -> Finding | None:
    """One or more ranks come last because their data comes late."""
    late = {p: v for p, v in late_ranks(evidence).items() if next(iter(v[1]), "") == "host_dataloader"}
    if not late:
        return None
    ranks = sorted(evidence.ranks[p].rank for p in late)
    return Finding(
        "straggler_dataloader",
        f"the others wait for rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}, "
        "whose data loader is slow",
        _together(evidence, late),
        _evidence(evidence, late),
        ("the rank's storage, host load and DataLoader workers", "samples of equal cost on all ranks"),
        _habit(evidence),
    )


def _together(evidence: Evidence, late: Mapping[int, tuple[float, Mapping[str, float]]]) -> float:
    """Ranks that are late by turns add up; no step can lose more than the others wait."""
    costs = [cost for cost, _ in late.values()]
    waits = [row["exposed_wait_ns"] or 0 for row in evidence.joined.rows()]
    return max(max(costs), min(sum(costs), float(max(waits, default=0))))


def _what(excess: Mapping[str, float]) -> str:
    if not excess:
        return "does nothing more than the others"
    name, ns = next(iter(excess.items()))
    what = "computes" if name == "compute" else f"idles in {name}"
    return f"{what} {ns / 1e6:.3g} ms a step longer"


def _evidence(evidence: Evidence, late: Mapping[int, tuple[float, Mapping[str, float]]]) -> dict[str, object]:
    rows = evidence.joined.rows()
    return {
        "ranks": [evidence.ranks[p].rank for p in late],
        "by_rank": [
            {
                "rank": evidence.ranks[p].rank, "cost_ns": round(cost),
                "last_arrivals": rows[p]["last_arrivals"], "of": rows[p]["joined_collectives"],
                "more_than_others_ns": {name: round(ns) for name, ns in list(excess.items())[:3]},
            }
            for p, (cost, excess) in late.items()
        ],
    }  # fmt: skip


def mismatched_collectives(evidence: Evidence) -> Finding | None:
    """Ranks issue different collectives in one group: a hang, or wrong results, in the making."""
    if not evidence.joined.mismatches:
        return None
    first = min(
        evidence.joined.mismatches,
        key=lambda m: (m.step if m.step is not None else -1, m.index),
    )
    truncated = any(signature is None for _, signature in first.seen)
    return Finding(
        "mismatched_collectives",
        f"ranks do not issue the same collectives; first at {describe(first)}",
        None,
        {
            "step": first.step, "group": first.group, "index": first.index,
            "seen": [
                {"rank": rank, "kind": s[0] if s else None, "bytes": s[1] if s and s[1] >= 0 else None}
                for rank, s in first.seen
            ],
        },
        ("the same modules on every rank: a dummy input for branches some ranks skip",
         "leaf_module.classes for mixtures of experts"),
        "info" if truncated else "critical",
    )  # fmt: skip
