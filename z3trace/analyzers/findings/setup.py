"""How the run is set up: not sharded at all, settings without effect, environment that prevents overlap."""

from collections.abc import Mapping
from typing import Any

from z3trace.analyzers.findings.base import Finding
from z3trace.analyzers.findings.evidence import Evidence
from z3trace.engine.schedule.settings import KNOBS, Effect, set_keys
from z3trace.errors import UserError

_UNSHARDED_KINDS = {"all_reduce", "broadcast", "barrier", "other"}


def not_sharded(evidence: Evidence) -> Finding | None:
    """Data parallelism with whole parameters on every rank: nothing here is ZeRO-3."""
    if evidence.framework != "ddp":
        return None
    kinds = {kind for rank in evidence.ranks for kind in rank.collectives.kind}
    reduced = sum(
        kind == "all_reduce" for rank in evidence.ranks for kind in rank.collectives.kind
    )  # fmt: skip
    if not reduced or not kinds <= _UNSHARDED_KINDS:
        return None
    return Finding(
        "not_sharded",
        "parameters are not sharded: gradients are all-reduced (DistributedDataParallel)",
        None,
        {"all_reduces_per_step": round(reduced / max(1, sum(len(r.steps.steps) for r in evidence.ranks)), 1)},
        ("nothing to change where the model fits", "ZeRO-3 or FSDP where it does not"),
        "info",
    )


def dead_knob(evidence: Evidence) -> Finding | None:
    """Settings that stage 3 reads nowhere."""
    section = evidence.zero_optimization
    if section is None or evidence.framework not in ("deepspeed", "z3trace"):
        return None
    try:
        dead = [key for key in set_keys(section, Effect.DEAD) if _differs(section, key)]
    except UserError:
        return None
    if not dead:
        return None
    plural = "s" if len(dead) > 1 else ""
    return Finding(
        "dead_knob",
        f"{', '.join(dead)}: setting{plural} without effect in stage 3",
        None,
        {key: {"value": section.get(key), "why": KNOBS[key].about} for key in dead},
        tuple(f"{key}: leave it out" for key in dead),
        "info",
    )


def _differs(section: Mapping[str, Any], key: str) -> bool:
    """A default written out misleads nobody; a changed value is a hope."""
    return key in section and section[key] != KNOBS[key].default


def environment(evidence: Evidence) -> Mapping[str, Any]:
    """Environment variables of the run, from its description or the trace's metadata."""
    own = evidence.ranks[0].trace.metadata.get("z3trace") if evidence.ranks else None
    for place in (evidence.description, own):
        if isinstance(place, Mapping):
            for key in ("environment", "env"):
                found = place.get(key)
                if isinstance(found, Mapping):
                    inner = found.get("variables", found)
                    return inner if isinstance(inner, Mapping) else found
    return {}


def single_device_connection(evidence: Evidence) -> Finding | None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue, in which a gather waits behind compute."""
    if str(environment(evidence).get("CUDA_DEVICE_MAX_CONNECTIONS")) != "1" or not evidence.sharding:
        return None
    cost = evidence.mean(sum(s.hideable for _, s in evidence.each_stall() if s.waited >= 0 and not s.late))
    return Finding(
        "single_device_connection",
        "CUDA_DEVICE_MAX_CONNECTIONS=1 puts collectives and compute into one hardware queue",
        cost,
        {"exposed_that_compute_had_room_for_ns": round(cost)},
        ("CUDA_DEVICE_MAX_CONNECTIONS: unset, or 16 (Megatron's tensor parallelism wants 1, sharding many)",),
    )
