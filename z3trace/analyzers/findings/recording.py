"""What the traces lack, and what the recording itself did."""

from collections.abc import Mapping
from statistics import median

from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding
from z3trace.analyzers.findings.evidence import Evidence
from z3trace.analyzers.trace import NULL


def incomplete_trace(evidence: Evidence) -> Finding | None:
    """What cannot be told from these files, and how to record it."""
    lacking: dict[str, str] = {}
    if not evidence.windows:
        lacking["no training steps"] = "call profiler.step() after each step, with a schedule"
    elif all(len(rank.steps.steps) == 1 for rank in evidence.ranks):
        lacking["one step only"] = (
            "record 3 steps or more after warm-up: schedule(wait=2, warmup=2, active=3)"
        )
    if not evidence.joined.several and (evidence.world_size or 0) > 1:
        lacking["one rank only: waiting for peers is not known"] = "record and give the traces of all ranks"
    unsized = sum(int((rank.collectives.bytes == NULL).sum()) for rank in evidence.ranks)
    if unsized:
        lacking[f"{unsized} collectives of unknown size"] = "record_shapes=True"
    if evidence.framework == "deepspeed" and evidence.gathers and not _named(evidence):
        lacking["no module names"] = "z3trace record, or a model.json beside the traces (z3trace describe)"
    if evidence.world_size and evidence.joined.several and len(evidence.ranks) < evidence.world_size:
        lacking[f"{len(evidence.ranks)} of {evidence.world_size} ranks"] = (
            "a rank that is not here may be the late one: give all ranks"
        )
    if not lacking:
        return None
    return Finding(
        "incomplete_trace",
        f"what the traces lack: {'; '.join(lacking)}",
        None,
        lacking,
        tuple(dict.fromkeys(lacking.values())),
        "info",
    )


def _named(evidence: Evidence) -> bool:
    return any(g.parameters or g.unit for own in evidence.gathers for g in own)


def profiler_overhead(evidence: Evidence) -> Finding | None:
    """Profiled steps are much slower than the same steps without the profiler."""
    plain, profiled = [], []
    ranks = evidence.description.get("ranks")
    for rank in ranks if isinstance(ranks, list) else []:
        for step in rank.get("steps", ()) if isinstance(rank, Mapping) else ():
            if isinstance(step, Mapping) and isinstance(step.get("duration_ns"), int):
                state = step.get("state")
                if state == "unprofiled":
                    plain.append(int(step["duration_ns"]))
                elif state == "profiled":
                    profiled.append(int(step["duration_ns"]))
    if not plain or not profiled:
        return None
    overhead = median(profiled) - median(plain)
    if overhead < th.OVERHEAD_FRACTION * median(plain):
        return None
    return Finding(
        "profiler_overhead",
        f"the profiler makes a step {overhead / median(plain):.0%} longer: host time is overstated",
        None,
        {"profiled_step_ns": round(median(profiled)), "plain_step_ns": round(median(plain))},
        ("record without stacks, memory and modules", "fewer ranks' traces, larger steps"),
        "info",
    )
