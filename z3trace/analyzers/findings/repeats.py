"""The same parameters gathered again: in backward, in every micro-batch, for a recomputation, for every token."""

from collections import Counter, defaultdict

import numpy as np

from z3trace.analyzers.findings.base import Finding, Settings
from z3trace.analyzers.findings.evidence import HOOKS, Evidence, Gather, PassKey
from z3trace.analyzers.findings.queueing import behind_reductions

# In a backward with recomputation nearly every gather of forward comes twice; an odd one may for other reasons.
_RECOMPUTE_FRACTION = 1.4
# Micro-batches of one step gather the same up to this factor (the first may prefetch differently).
_SAME_WORK = 0.5


def _piece(gather: Gather) -> tuple[object, ...]:
    return (
        gather.parameters or gather.unit if gather.parameters or gather.unit else gather.layer,
        gather.bytes,
    )


def recompute_gathers(evidence: Evidence) -> frozenset[tuple[int, int]]:
    """(rank, index) of gathers in backward that activation checkpointing's second forward needs.

    Where gathers are named, those that come twice in one backward: the first of each pair is the
    recomputation's. Without names a backward that gathers what forward did nearly twice.
    """
    found: set[tuple[int, int]] = set()
    for key, members in evidence.passes.items():
        rank, step, micro_batch, phase = key
        if phase != "backward":
            continue
        labelled = [g for g in members if g.reason == "recompute"]
        if labelled:
            found |= {(rank, g.k) for g in labelled}
            continue
        if any(g.parameters or g.unit for g in members):
            wanted = Counter(_piece(g) for g in members)
            if sum(n - 1 for n in wanted.values()) < 2:
                continue
            for gather in members:
                if wanted[_piece(gather)] > 1:
                    wanted[_piece(gather)] -= 1
                    found.add((rank, gather.k))
            continue
        forward = evidence.passes.get((rank, step, micro_batch, "forward"), [])
        sizes = Counter(g.bytes for g in forward)
        if not forward or len(members) < _RECOMPUTE_FRACTION * len(forward):
            continue
        seen = Counter(g.bytes for g in members)
        for gather in members:
            if seen[gather.bytes] > sizes[gather.bytes] > 0:
                seen[gather.bytes] -= 1
                found.add((rank, gather.k))
    return frozenset(found)


def checkpoint_regathers(evidence: Evidence) -> Finding | None:
    """Recomputation in backward gathers what the layer's own backward gathers once more."""
    again = recompute_gathers(evidence)
    backward = sum(len(m) for key, m in evidence.passes.items() if key[3] == "backward")
    if not evidence.sharding or not again:
        return None
    share = len(again) / backward
    stalls = sum(s.own for p, s in evidence.each_stall() if (p, s.waited) in again)
    on_any = sum(
        s.own
        for p, s in evidence.each_stall()
        if s.phase == "backward" and evidence.kind_waited(p, s) == "all_gather"
    )
    if not any(g.parameters or g.unit for own in evidence.gathers for g in own):
        # Without names it is not known which of two equal gathers is the recomputation's.
        stalls = on_any
    exposed = sum(evidence.own_exposed(p, k) for p, k in again)
    host = share * (
        evidence.idle(*HOOKS, phases=("backward",)) + evidence.late_share(*HOOKS, phases=("backward",))
    )
    return Finding(
        "checkpoint_regathers",
        f"activation checkpointing gathers again: {evidence.mean(len(again)):.0f} of "
        f"{evidence.mean(backward):.0f} all-gathers in backward are for recomputation",
        evidence.mean(max(stalls, exposed)) + host,
        {
            "recompute_gathers_per_step": round(evidence.mean(len(again)), 1),
            "backward_gathers_per_step": round(evidence.mean(backward), 1),
        },
        Settings(
            deepspeed=("leaf_module.classes = [the checkpointed layer]",
                       "stage3_max_reuse_distance: at least one layer"),
            fsdp2=("checkpoint inside the unit: fully_shard(checkpoint(layer)), not the other way round",),
            fsdp1=("apply_activation_checkpointing after wrapping: FSDP(checkpoint(layer))",),
        ).of(evidence.framework),
    )  # fmt: skip


def accumulation_regathers(evidence: Evidence) -> Finding | None:
    """Every micro-batch gathers all parameters and reduces all gradients."""
    if not evidence.sharding or evidence.micro_batches < 2:
        return None
    per: dict[int, float] = defaultdict(float)
    gathers: dict[int, int] = defaultdict(int)
    reduces: dict[int, int] = defaultdict(int)
    for position, rank in enumerate(evidence.ranks):
        c, used = rank.collectives, evidence.joined.used(position)
        for k in np.flatnonzero(c.is_kind("all_gather", "reduce_scatter") & used).tolist():
            if rank.placement.phase[k] not in ("forward", "backward"):
                continue
            micro_batch = int(rank.placement.micro_batch[k])
            per[micro_batch] += evidence.own_exposed(position, k)
            counts = gathers if c.kind[k] == "all_gather" else reduces
            counts[micro_batch] += max(0, int(c.bytes[k]))
    n = evidence.micro_batches
    later = [gathers[m] for m in range(1, n)]
    if not gathers[0] or min(later) < _SAME_WORK * max(gathers.values()) or not _trains(evidence):
        return None
    cost = evidence.mean(sum(ns for m, ns in per.items() if m))
    host = (n - 1) / n * (evidence.idle(*HOOKS, phases=("forward", "backward")))
    return Finding(
        "accumulation_regathers",
        f"each of {n} micro-batches gathers all parameters and reduces all gradients",
        cost + (host if not evidence.on_device else 0.0),
        {
            "micro_batches": n, "gathered_bytes_per_step": round(evidence.mean(sum(gathers.values()))),
            "reduced_bytes_per_step": round(evidence.mean(sum(reduces.values()))),
        },
        Settings(
            deepspeed=("a larger micro-batch and fewer gradient_accumulation_steps",
                       "engine.coalesce_grad_reduction() around the micro-batches"),
            fsdp2=("set_requires_gradient_sync(False) and set_reshard_after_backward(False) on all but the last "
                   "micro-batch", "reshard_after_forward=False"),
            fsdp1=("no_sync() on all but the last micro-batch", "sharding_strategy=SHARD_GRAD_OP"),
        ).of(evidence.framework),
    )  # fmt: skip


def _trains(evidence: Evidence) -> bool:
    return any(evidence.compute_in(phase) for phase in ("backward",))


def generating_passes(evidence: Evidence) -> dict[PassKey, int]:
    """Forward passes that gather the whole model several times with no backward between -> how often."""
    backwards = {key[:3] for key in evidence.passes if key[3] == "backward"}
    reducing = _reducing(evidence)
    found = {}
    for key, members in evidence.passes.items():
        seen = Counter(_piece(g) for g in members)
        times = int(np.median(list(seen.values()))) if seen else 0
        trains = key[:3] in backwards or key[:3] in reducing
        # Beside a training pass two equal gathers are two equal modules more likely than an evaluation.
        if key[3] == "forward" and times >= (3 if trains else 2):
            found[key] = times
    return found


def generation_regathers(evidence: Evidence) -> Finding | None:
    """Forward after forward without a backward: every token gathers the whole model."""
    if not evidence.sharding:
        return None
    repeats, exposed, count = [], 0, 0
    for key, times in generating_passes(evidence).items():
        members = evidence.passes[key]
        repeats.append(times)
        first: set[tuple[object, ...]] = set()
        for gather in members:
            if _piece(gather) in first:
                exposed += evidence.own_exposed(gather.rank, gather.k)
                count += 1
            first.add(_piece(gather))
    if not repeats:
        return None
    share = count / max(1, sum(len(own) for own in evidence.gathers))
    host = share * evidence.idle(*HOOKS, phases=("forward",))
    return Finding(
        "generation_regathers",
        f"{np.median(repeats):.0f} forwards without a backward each gather the whole model: generation or evaluation",
        evidence.mean(exposed) + host,
        {"forwards": int(np.median(repeats)), "repeated_gathers_per_step": round(evidence.mean(count), 1)},
        Settings(
            deepspeed=("GatheredParameters around generate(): gather once", "DeepSpeed hybrid engine, or vLLM"),
            fsdp2=("model.unshard() before generation, reshard() after",
                   "set_reshard_after_forward(False) while generating"),
            fsdp1=("summon_full_params around generate()",),
        ).of(evidence.framework),
    )  # fmt: skip


def _reducing(evidence: Evidence) -> set[tuple[int, int, int]]:
    found = set()
    for position, rank in enumerate(evidence.ranks):
        c, used = rank.collectives, evidence.joined.used(position)
        for k in np.flatnonzero(c.is_kind("reduce_scatter") & used).tolist():
            found.add((position, int(rank.placement.step[k]), int(rank.placement.micro_batch[k])))
    return found


def last_unit_gathers(evidence: Evidence) -> list[Gather]:
    """The first gather of each backward where it fetches what forward's last gather had fetched."""
    found = []
    for key, members in evidence.passes.items():
        if key[3] != "backward" or not members:
            continue
        forward = evidence.passes.get((*key[:3], "forward"), [])
        if not forward:
            continue
        first, last = members[0], forward[-1]
        named = first.unit is not None and last.unit is not None
        same = first.unit == last.unit if named else first.bytes == last.bytes
        if same and len(forward) > 1:
            found.append(first)
    return found


def last_unit_regather(evidence: Evidence) -> Finding | None:
    """The last layer is freed after forward and gathered again at once, at backward's start."""
    gathers = last_unit_gathers(evidence)
    if not evidence.sharding or not gathers:
        return None
    wanted = {(g.rank, g.k) for g in gathers}
    stalls = evidence.mean(sum(s.own for p, s in evidence.each_stall() if (p, s.waited) in wanted))
    cost = max(stalls, evidence.mean(sum(evidence.own_exposed(g.rank, g.k) for g in gathers)))
    if cost <= 0 or not evidence.on_device:
        return None
    return Finding(
        "last_unit_regather",
        f"the last unit{f' ({gathers[0].unit})' if gathers[0].unit else ''} is freed after forward and gathered "
        "again at once",
        cost,
        {"unit": gathers[0].unit, "bytes": gathers[0].bytes},
        Settings(
            deepspeed=("stage3_max_reuse_distance: at least the last layer's parameters",),
            fsdp2=("fully_shard(last layer, reshard_after_forward=False)",),
            fsdp1=("sharding_strategy=SHARD_GRAD_OP for the last unit",),
        ).of(evidence.framework),
    )


def backward_regathers(evidence: Evidence) -> Finding | None:
    """Backward gathers what forward had, and neither prefetch nor compute hides it."""
    if not evidence.sharding or not evidence.on_device:
        return None
    queued = behind_reductions(evidence)
    special = recompute_gathers(evidence) | {(g.rank, g.k) for g in last_unit_gathers(evidence)}
    cost = 0
    for position, stall in evidence.each_stall():
        own = evidence.kind_waited(position, stall) == "all_gather" and stall.phase == "backward"
        if own and (position, stall.waited) not in special and not stall.late:
            cost += max(0, stall.own - stall.hideable - queued.get((position, stall.waited), 0))
    gathers = [g for own in evidence.gathers for g in own if g.phase == "backward"]
    if not cost or not gathers:
        return None
    held = evidence.mean(sum(max(0, g.bytes) for g in gathers)) / evidence.micro_batches
    return Finding(
        "backward_regathers",
        "backward gathers the parameters again, and compute is too short to hide it",
        evidence.mean(cost),
        {"gathers_per_step": round(evidence.mean(len(gathers)), 1), "bytes_to_keep_instead": round(held)},
        Settings(
            deepspeed=("stage3_max_reuse_distance: larger, as memory allows",),
            fsdp2=("reshard_after_forward=False", "reshard_after_forward=<ranks of a node>"),
            fsdp1=("sharding_strategy=SHARD_GRAD_OP",),
        ).of(evidence.framework),
    )
