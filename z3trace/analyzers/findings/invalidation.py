"""DeepSpeed's recorded order of modules no longer holds: no prefetch, nothing persists."""

from collections import defaultdict

from z3trace.analyzers.findings.base import Finding
from z3trace.analyzers.findings.evidence import Evidence, PassKey

# A pass that gathers more often than the leanest by this factor gathers module by module.
_MORE_GATHERS = 1.5


def invalid_passes(evidence: Evidence) -> frozenset[PassKey]:
    """Passes (rank, step, micro-batch, phase) that fetch as DeepSpeed does while its trace is not complete.

    Told by what it then ignores: it fetches parameters, by size, that it has just gathered after the last step
    because they should persist; or it needs far more gathers than other passes of the same run.
    """
    if evidence.framework != "deepspeed":
        return frozenset()
    found: set[PassKey] = set()
    persistent: dict[int, set[int]] = defaultdict(set)
    for own in evidence.gathers:
        for gather in own:
            if gather.phase == "optimizer":
                persistent[gather.rank].add(gather.bytes)
    counts: dict[tuple[int, str], list[int]] = defaultdict(list)
    for key, gathers in evidence.passes.items():
        counts[key[0], key[3]].append(len(gathers))
        sizes = persistent.get(key[0], set())
        largest = max(sizes, default=-1)
        # Each persistent parameter alone in a gather of this pass: several, or it may be chance.
        again = [g for g in gathers if g.bytes in sizes and 0 < g.bytes <= largest]
        if len({g.bytes for g in again}) >= min(2, len(sizes)) and len(again) >= 2 and sizes:
            found.add(key)
    for key, gathers in evidence.passes.items():
        leanest = min(counts[key[0], key[3]])
        if len(gathers) > _MORE_GATHERS * leanest and len(gathers) > leanest + 2:
            found.add(key)
    return frozenset(found)


def trace_invalidated(evidence: Evidence) -> Finding | None:
    """Passes without prefetch, because the order of module calls changed."""
    invalid = invalid_passes(evidence)
    if not invalid:
        return None
    in_invalid = {key[:3] for key in invalid}
    steps: dict[tuple[int, int], int] = {}
    for position, rank in enumerate(evidence.ranks):
        for index, step in enumerate(rank.steps.steps):
            if step.used:
                steps[position, index] = step.duration
    bad = {key[:2] for key in in_invalid}
    good = [ns for key, ns in steps.items() if key not in bad]
    exposed = evidence.mean(
        sum(
            evidence.own_exposed(g.rank, g.k)
            for key, members in evidence.passes.items() if key[:3] in in_invalid
            for g in members
        )
    )  # fmt: skip
    if good:
        typical = sum(good) / len(good)
        cost = evidence.mean(sum(max(0.0, steps[key] - typical) for key in bad if key in steps))
    else:
        cost = exposed + evidence.idle("host_hooks", "host_collective_issue", phases=("forward", "backward"))
    numbers = sorted({evidence.ranks[p].steps.steps[s].number for p, s in bad})
    return Finding(
        "trace_invalidated",
        f"in {'all' if not good else 'some'} steps DeepSpeed fetches module by module: "
        "the order of module calls has changed and its trace is invalid",
        cost,
        {"steps": numbers, "passes": len(invalid), "exposed_ns": round(exposed)},
        ("the same order of module calls in every pass (separate training and evaluation, no branches)",
         "leaf_module.classes for modules with branches", "log_trace_cache_warnings = true to see where"),
    )  # fmt: skip
