"""How much of the model is whole at once, and which knob keeps it so."""

import numpy as np

from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding, Settings
from z3trace.analyzers.findings.evidence import PASSES, Evidence
from z3trace.analyzers.memory import Peak, held_by_gathers, peak_of

_KNOBS = {
    "prefetched": Settings(
        deepspeed=("stage3_prefetch_bucket_size", "stage3_max_live_parameters"),
        fsdp2=("set_modules_to_forward_prefetch: fewer",),
        fsdp1=("limit_all_gathers=True",),
    ),
    "kept": Settings(
        deepspeed=("stage3_max_reuse_distance",),
        fsdp2=("reshard_after_forward=True",),
        fsdp1=("sharding_strategy=FULL_SHARD",),
    ),
    "in_use": Settings(
        deepspeed=("leaf_module: smaller leaves",), fsdp2=("smaller units",), fsdp1=("smaller units",)
    ),
    "persistent": Settings(deepspeed=("stage3_param_persistence_threshold",)),
}


def gathered_memory(evidence: Evidence) -> Finding | None:
    """Most of the model is gathered at one instant: sharding saves little memory."""
    if not evidence.sharding:
        return None
    peaks: list[Peak] = []
    model = 0
    for rank in evidence.ranks:
        for step in rank.steps.steps:
            held = held_by_gathers(rank, step) if step.used else None
            peak = peak_of(held) if held else None
            if peak:
                peaks.append(peak)
    for own in evidence.gathers:
        once = {
            (g.parameters or g.unit): g.bytes
            for g in own
            if (g.parameters or g.unit is not None) and g.phase in (*PASSES, "optimizer")
        }
        model = max(model, sum(once.values()))
    if not peaks or not model or len(evidence.passes) == 0:
        return None
    peak = peaks[int(np.argmax([p.bytes for p in peaks]))]
    if peak.bytes < th.MODEL_HELD * model:
        return None
    parts = {
        "prefetched": peak.prefetched, "kept": peak.kept, "in_use": peak.in_use,
        "persistent": peak.persistent,
    }  # fmt: skip
    reason = max(parts, key=lambda name: parts[name])
    return Finding(
        "gathered_memory",
        f"{peak.bytes / model:.0%} of the parameters are gathered at one instant, most of them {_WORDS[reason]}",
        None,
        {"peak_bytes": peak.bytes, "gathered_bytes": model, **{f"{k}_bytes": v for k, v in parts.items()}},
        _KNOBS[reason].of(evidence.framework),
        "info",
    )


_WORDS = {
    "prefetched": "fetched ahead of use", "kept": "kept after use", "in_use": "in one unit",
    "persistent": "persistent",
}  # fmt: skip
