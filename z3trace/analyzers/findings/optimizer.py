"""After the optimizer's step: gathers of the parameters that stay whole."""

from z3trace.analyzers.attribution.repetition import find_repetition
from z3trace.analyzers.findings import fragmentation
from z3trace.analyzers.findings.base import Finding
from z3trace.analyzers.findings.evidence import PASSES, Evidence, Gather


def post_step_persistent_gathers(evidence: Evidence) -> Finding | None:
    """One small gather for each persistent parameter after every step, with nothing to hide it behind.

    Its cost is what is exposed less what gathering these parameters in the passes would expose instead.
    """
    gathers = [g for own in evidence.gathers for g in own if g.phase == "optimizer"]
    if evidence.framework not in ("deepspeed", "z3trace") or not gathers:
        return None
    exposed = evidence.mean(sum(evidence.own_exposed(g.rank, g.k) for g in gathers))
    count = evidence.mean(len(gathers))
    instead = _exposed_instead(evidence, gathers)
    cost = max(0.0, exposed - instead)
    threshold = evidence.setting("stage3_param_persistence_threshold")
    first_fix = fragmentation.is_fragmented(evidence)
    settings = ["stage3_param_persistence_threshold: lower, 0 with leaf layers"]
    if first_fix:
        settings.insert(
            0, "first leaf_module.classes: without it each of these would be a gather in each pass"
        )
    if evidence.framework == "z3trace":
        settings.append("z3trace.coalesce_post_step = true")
    return Finding(
        "post_step_persistent_gathers",
        f"{count:.0f} all-gathers after each step, one for each parameter that persists",
        cost,
        {
            "gathers_per_step": round(count, 1), "exposed_ns": round(exposed),
            "exposed_instead_ns": round(instead),
            "bytes": round(evidence.mean(sum(max(0, g.bytes) for g in gathers))),
            "stage3_param_persistence_threshold": threshold,
        },
        tuple(settings),
    )  # fmt: skip


def _exposed_instead(evidence: Evidence, gathers: list[Gather]) -> float:
    """What gathering the persistent parameters in forward and backward would expose, ns per step."""
    alpha = fragmentation.alpha_ns(evidence)
    if fragmentation.is_fragmented(evidence):
        # Each would be gathered by itself, in forward and again in backward.
        return 2 * evidence.mean(len(gathers)) * alpha
    links = [link for link in evidence.joined.links if link.kind == "all_gather" and link.bytes_per_ns]
    rate = max(links, key=lambda link: link.count).bytes_per_ns if links else None
    if not rate:
        return 0.0
    own = [g for g in gathers if g.rank == gathers[0].rank and g.step == gathers[0].step]
    in_passes = [g for members in evidence.passes.values() for g in members if g.phase in PASSES]
    moved = sum(max(0, g.bytes) for g in own)
    if in_passes and moved < 0.1 * evidence.mean(sum(max(0, g.bytes) for g in in_passes)):
        return 0.0  # they would ride along in gathers that are there
    # What forward cannot hide is the first unit and the first layer.
    sizes = [max(0, g.bytes) for g in own]
    found = find_repetition(sizes)
    first, period = (found[0], found[1]) if found else (1, max(1, len(sizes) // 10))
    return 2 * alpha + sum(sizes[: first + period]) / rate
