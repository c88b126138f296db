"""Copies in and out of collectives' buffers."""

import re

import numpy as np

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding, Settings
from z3trace.analyzers.findings.evidence import Evidence
from z3trace.analyzers.findings.stalls import main_compute
from z3trace.analyzers.host import nearest_ancestor

_KERNEL = re.compile(r"split_with_sizes_copy|chunk_cat|CatArrayBatchedCopy|foreach_copy", re.IGNORECASE)
_OPERATOR = re.compile(
    r"fsdp::|z3::copy|aten::(split_with_sizes_copy|_chunk_cat|cat|_foreach_copy_)\Z|FSDP::all_gather_copy"
)


def copy_time(evidence: Evidence) -> float:
    """Time of the sharding engine's copies on the main compute stream, where they delay compute, ns per step."""
    total = 0
    for rank in evidence.ranks:
        rows, _ = main_compute(rank)
        trace = rank.trace
        copying = trace.named(lambda name: bool(_KERNEL.search(name)))[rows]
        launches = trace.launches[rows].astype(np.int64)
        launched = np.flatnonzero(launches >= 0)
        operators = trace.named(lambda name: bool(_OPERATOR.match(name)))
        around = nearest_ancestor(trace, launches[launched], operators)
        copying[launched] |= around >= 0
        copies = iv.union(trace.ts[rows[copying]], trace.end[rows[copying]])
        total += sum(
            iv.total(iv.clip(copies, step.start, step.end)) for step in rank.steps.steps if step.used
        )
    return evidence.mean(total)


def copy_overhead(evidence: Evidence) -> Finding | None:
    """Copying parameters out of gathered buffers, and gradients into them, takes compute's time."""
    if not evidence.on_device or not evidence.sharding:
        return None
    copies, compute = copy_time(evidence), evidence.anatomy.get("compute", 0.0)
    once = _moved(evidence) / th.COPY_BYTES_PER_NS
    if copies <= th.COPIES_MORE_THAN_ONE * once or not once:
        return None
    excess = copies - once
    return Finding(
        "copy_overhead",
        f"copies in and out of collectives' buffers take {copies / compute:.0%} of compute",
        excess,
        {"copy_ns": round(copies), "one_copy_ns": round(once), "compute_ns": round(compute)},
        Settings(
            deepspeed=("one parameter a gather needs no copy: larger matrices, or z3trace's flat units",),
            fsdp2=("shard on dimension 0: other dimensions need two more copies",
                   "units whose parameters have one dtype"),
            fsdp1=("use_orig_params=False keeps flat parameters without copies",),
            z3trace=("z3trace.schedule = layerwise: flat units, views instead of copies",),
        ).of(evidence.framework),
    )  # fmt: skip


def _moved(evidence: Evidence) -> float:
    """Bytes gathered and reduced, whole tensors, per step."""
    total = 0
    for position, rank in enumerate(evidence.ranks):
        c = rank.collectives
        own = c.is_kind("all_gather", "reduce_scatter") & evidence.joined.used(position) & (c.bytes > 0)
        total += int(c.bytes[own].sum())
    return evidence.mean(total)
