"""Communication that could run beside compute and does not."""

from collections import Counter

import numpy as np

from z3trace.analyzers.findings import invalidation, repeats
from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding, Settings
from z3trace.analyzers.findings.evidence import PASSES, Evidence
from z3trace.analyzers.findings.fragmentation import is_layer
from z3trace.analyzers.findings.queueing import behind_reductions
from z3trace.analyzers.findings.stalls import Stall, main_compute


def _shows_prefetch(evidence: Evidence) -> bool:
    """Whether streams can overlap at all: on CPU only engines that issue without waiting do."""
    return evidence.on_device or evidence.framework in ("deepspeed", "z3trace")


def _unprefetched(evidence: Evidence, phase: str) -> list[tuple[int, Stall]]:
    """Stalls for gathers of a phase that were issued when needed although compute before had room for them."""
    invalid = invalidation.invalid_passes(evidence)
    recomputing = {p for p, _ in repeats.recompute_gathers(evidence)}
    found = []
    for position, stall in evidence.each_stall():
        if stall.phase != phase or stall.waited < 0 or not stall.hideable:
            continue
        if evidence.kind_waited(position, stall) != "all_gather":
            continue
        if phase == "backward" and position in recomputing:
            continue  # recomputation's gathers are what is wrong there
        owner = evidence.ranks[position].attribution.owners[stall.waited]
        key = (position, stall.step, stall.micro_batch, stall.phase)
        if owner.reason in ("prefetch", "recompute") or key in invalid:
            continue
        # A late launch is the host's, unless the framework itself holds the host back (an event of a gather).
        if not stall.late:
            found.append((position, stall))
    return found


def _throttled(evidence: Evidence, phase: str) -> float:
    """Cost of the host's waits for events: frameworks wait so for a gather before they issue the next."""
    if not evidence.on_device or not evidence.sharding:
        return 0.0
    return evidence.idle("sync_event", phases=(phase,)) + evidence.late_share("sync_event", phases=(phase,))


def no_prefetch(evidence: Evidence) -> Finding | None:
    """In forward each layer's gather is issued when the layer is reached."""
    if not evidence.sharding or not _shows_prefetch(evidence) or on_compute_stream(evidence):
        return None
    stalls = _unprefetched(evidence, "forward")
    cost = evidence.mean(sum(s.hideable for _, s in stalls)) + _throttled(evidence, "forward")
    if cost <= 0:
        return None
    return Finding(
        "no_prefetch",
        "in forward all-gathers are issued when their layer is reached, while compute before had room for them",
        cost,
        {
            "stalls_per_step": round(evidence.mean(len(stalls)), 1),
            "stage3_prefetch_bucket_size": evidence.setting("stage3_prefetch_bucket_size"),
            "host_waits_for_gathers_ns": round(_throttled(evidence, "forward")),
        },
        Settings(
            deepspeed=("stage3_prefetch_bucket_size = one layer", "stage3_max_live_parameters: at least two layers",
                       "overlap_comm = true"),
            fsdp2=("set_modules_to_forward_prefetch",),
            fsdp1=("forward_prefetch=True", "limit_all_gathers"),
        ).of(evidence.framework),
    )  # fmt: skip


def no_backward_prefetch(evidence: Evidence) -> Finding | None:
    """In backward each layer's gather is issued when the layer is reached, behind its predecessor's reduction."""
    if not evidence.sharding or not _shows_prefetch(evidence) or on_compute_stream(evidence):
        return None
    stalls = _unprefetched(evidence, "backward")
    cost = evidence.mean(sum(s.hideable for _, s in stalls)) + _throttled(evidence, "backward")
    if cost <= 0:
        return None
    return Finding(
        "no_backward_prefetch",
        "in backward all-gathers are issued when their layer is reached, while compute before had room for them",
        cost,
        {"stalls_per_step": round(evidence.mean(len(stalls)), 1)},
        Settings(
            deepspeed=("stage3_prefetch_bucket_size = one layer", "stage3_max_live_parameters: about two layers, "
                       "so that prefetch reaches into backward"),
            fsdp2=("set_modules_to_backward_prefetch",),
            fsdp1=("backward_prefetch=BackwardPrefetch.BACKWARD_PRE",),
        ).of(evidence.framework),
    )  # fmt: skip


def on_compute_stream(evidence: Evidence) -> bool:
    """Whether most collectives run on the stream that computes."""
    shared = total = 0
    for rank in evidence.ranks:
        if not rank.activity.on_device:
            return False
        rows, _ = main_compute(rank)
        lanes = rank.trace.lane[rank.activity.communication_rows]
        total += len(lanes)
        if len(rows):
            shared += int(np.count_nonzero(lanes == rank.trace.lane[rows[0]]))
    return total > 0 and shared > 0.5 * total


def comm_on_compute_stream(evidence: Evidence) -> Finding | None:
    """Collectives and compute share a stream: nothing can overlap."""
    if not on_compute_stream(evidence):
        return None
    exposed = {
        phase: evidence.mean(
            sum(s.own for _, s in evidence.each_stall() if s.phase == phase)
        )
        for phase in PASSES
    }  # fmt: skip
    layers = len({g.layer for own in evidence.gathers for g in own if is_layer(g.layer)}) or th.ASSUMED_LAYERS
    # What no order of work could hide: the first gather of forward and the last reduction of backward.
    cost = sum(
        max(0.0, min(ns, evidence.compute_in(phase)) * layers / (layers + 1)) for phase, ns in exposed.items()
    )
    return Finding(
        "comm_on_compute_stream",
        "collectives run on the stream that computes, so nothing overlaps",
        cost,
        {f"exposed_in_{phase}_ns": round(ns) for phase, ns in exposed.items()},
        Settings(
            deepspeed=("overlap_comm = true",),
            fsdp2=("let FSDP2 use its own streams: no process group or hook that synchronizes them",),
            fsdp1=("no synchronous collectives in hooks (async_op=True)",),
        ).of(evidence.framework if evidence.sharding else "none")
        or ("issue collectives with async_op=True on a stream of their own",),
    )


def serialised_communicator(evidence: Evidence) -> Finding | None:
    """A prefetched gather waits in the queue behind a reduce-scatter of the same communicator."""
    if not evidence.sharding or on_compute_stream(evidence):
        return None
    queued = behind_reductions(evidence)
    if not queued:
        return None
    return Finding(
        "serialised_communicator",
        "in backward all-gathers wait for reduce-scatters of the same communicator",
        evidence.mean(sum(queued.values())),
        {"gathers_per_step": round(evidence.mean(len(queued)), 1)},
        Settings(
            deepspeed=("overlap_comm = true",),
            fsdp2=("set_separate_reduce_scatter_group",),
            fsdp1=("a process group of its own for reductions",),
        ).of(evidence.framework),
    )


def whole_model_gather(evidence: Evidence) -> Finding | None:
    """One gather fetches (nearly) the whole model before the first layer can run."""
    if not evidence.sharding:
        return None
    wholes = [
        (key, max(g.bytes for g in members), sum(max(0, g.bytes) for g in members))
        for key, members in evidence.passes.items()
        if key[3] == "forward"
    ]
    big = [key for key, largest, total in wholes if total and largest >= th.WHOLE_MODEL_SHARE * total]
    if not big or len(big) < 0.5 * len(wholes) or not _has_layers(evidence):
        return None
    first = set(big)
    stalls = [
        s for p, s in evidence.each_stall() if (p, s.step, s.micro_batch, s.phase) in first and s.own > 0
    ]
    exposed = evidence.mean(sum(s.own for s in stalls))
    reduces = evidence.mean(
        sum(
            s.own for p, s in evidence.each_stall() if evidence.kind_waited(p, s) == "reduce_scatter"
        )
    )  # fmt: skip
    keep = 1 - 1 / th.ASSUMED_LAYERS
    cost = min(exposed, evidence.compute_in("forward")) * keep
    deepspeed = evidence.framework in ("deepspeed", "z3trace")
    if not deepspeed:
        cost += min(reduces, evidence.compute_in("backward")) * keep
    largest = max(size for _, size, _ in wholes)
    if deepspeed:
        return Finding(
            "serialised_prefetch",
            "one all-gather fetches the whole model at the start of forward: the first layer waits for the last",
            cost,
            {
                "bytes": largest, "exposed_ns": round(exposed),
                "stage3_prefetch_bucket_size": evidence.setting("stage3_prefetch_bucket_size"),
            },
            ("stage3_prefetch_bucket_size = one layer", "stage3_max_live_parameters: about two layers"),
        )  # fmt: skip
    return Finding(
        "single_unit",
        "the whole model is one unit: one all-gather before the first layer, one reduction after the last",
        cost,
        {"bytes": largest, "exposed_ns": round(exposed), "exposed_reductions_ns": round(reduces)},
        Settings(
            fsdp2=("fully_shard on each layer, then on the model",),
            fsdp1=("auto_wrap_policy = transformer_auto_wrap_policy with the layer's class",),
        ).of(evidence.framework),
    )


def _has_layers(evidence: Evidence) -> bool:
    """Whether there is more than one thing to compute: a single big layer has nothing to be split into."""
    parts = Counter(
        path.rpartition(".")[0]
        for own in evidence.gathers for g in own for path in g.parameters
    )  # fmt: skip
    return not parts or len(parts) > 1
