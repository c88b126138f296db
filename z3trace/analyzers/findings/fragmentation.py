"""Too many small collectives: more than one gather for a layer, gathers of next to nothing."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from z3trace.analyzers.findings import invalidation, repeats
from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding, Settings
from z3trace.analyzers.findings.evidence import HOOKS, PASSES, Evidence, Gather

_NO_LAYER = ("root", "none")

_ONE_PER_LAYER = Settings(
    deepspeed=("leaf_module.classes = [the layer's class]", "stage3_prefetch_bucket_size = one layer"),
    fsdp2=("fully_shard on whole layers, not on their parts",),
    fsdp1=("auto_wrap_policy = transformer_auto_wrap_policy with the layer's class",),
    z3trace=("z3trace.schedule = layerwise", "leaf_module.classes = [the layer's class]"),
)


@dataclass(frozen=True)
class Extra:
    """Gathers beyond one a layer in one phase, means per pass: of `count` gathers `extra` are too many."""

    count: float
    extra: float
    per_layer: float

    @property
    def fraction(self) -> float:
        return self.extra / self.count if self.count else 0.0


def is_layer(name: str) -> bool:
    return name not in _NO_LAYER and "+" not in name


def has_tiny_majority(gathers: Sequence[Gather]) -> bool:
    """Whether most gathers of a pass carry next to nothing."""
    tiny = sum(0 <= g.bytes <= th.TINY_BYTES for g in gathers)
    return tiny >= th.TINY_SHARE * len(gathers) and tiny > 1


def extra_gathers(evidence: Evidence) -> dict[str, Extra]:
    """Phase -> gathers beyond one a layer; those of passes without prefetch by an invalid trace, and tiny ones
    where they are the majority, are left to their own findings."""
    sums: dict[str, list[list[float]]] = defaultdict(list)
    left_out = invalidation.invalid_passes(evidence) | repeats.generating_passes(evidence).keys()
    for key, gathers in evidence.passes.items():
        if key in left_out:
            continue
        if has_tiny_majority(gathers):
            gathers = [g for g in gathers if not 0 <= g.bytes <= th.TINY_BYTES]
        # What is fetched twice in one pass is fetched again, not in parts.
        once = {(g.layer, g.parameters or g.unit or g.k): g for g in gathers}
        layers = Counter(g.layer for g in once.values() if is_layer(g.layer))
        extra = sum(n - 1 for n in layers.values())
        sums[key[3]].append([len(gathers), extra, sum(layers.values()), len(layers)])
    found = {}
    for phase, rows in sums.items():
        count, extra, in_layers, layers = np.mean(rows, axis=0).tolist()
        found[phase] = Extra(count, extra, in_layers / layers if layers else 0.0)
    return found


def is_fragmented(evidence: Evidence) -> bool:
    return any(e.per_layer > th.GATHERS_PER_LAYER for e in extra_gathers(evidence).values())


def host_time_of_extra_gathers(evidence: Evidence) -> float:
    """Idle time, and communication exposed, because the host prepares gathers that one a layer would save."""
    total = 0.0
    for phase, extra in extra_gathers(evidence).items():
        if extra.per_layer > th.GATHERS_PER_LAYER:
            total += extra.fraction * (
                evidence.idle(*HOOKS, phases=(phase,)) + evidence.late_share(*HOOKS, phases=(phase,))
            )
    return total


@dataclass(frozen=True)
class Tiny:
    """The tiny gathers of one phase and their share of its gathers."""

    gathers: tuple[Gather, ...]
    share: float


def _tiny_by_phase(evidence: Evidence) -> dict[str, Tiny]:
    """Phase -> tiny gathers, where they are the majority in every pass."""
    invalid = invalidation.invalid_passes(evidence)
    passes: dict[str, list[list[Gather]]] = defaultdict(list)
    for key, members in evidence.passes.items():
        if key not in invalid:
            passes[key[3]].append(members)
    found = {}
    for phase, lists in passes.items():
        if all(has_tiny_majority(members) for members in lists):
            tiny = tuple(g for members in lists for g in members if 0 <= g.bytes <= th.TINY_BYTES)
            found[phase] = Tiny(tiny, len(tiny) / sum(map(len, lists)))
    return found


def host_time_of_tiny_gathers(evidence: Evidence) -> float:
    """Idle time, and communication exposed, because the host prepares gathers that carry next to nothing."""
    return sum(
        tiny.share * (evidence.idle(*HOOKS, phases=(phase,)) + evidence.late_share(*HOOKS, phases=(phase,)))
        for phase, tiny in _tiny_by_phase(evidence).items()
    )


def alpha_ns(evidence: Evidence) -> float:
    """Fixed time of one all-gather, of the group that has most of them."""
    links = [link for link in evidence.joined.links if link.kind == "all_gather"]
    return max(links, key=lambda link: link.count).alpha_ns if links else 0.0


def _fixed_fraction(evidence: Evidence, phase: str) -> float:
    """The part of a phase's gather time that is fixed time, by the fit of the link."""
    links = [link for link in evidence.joined.links if link.kind == "all_gather"]
    sizes = [g.bytes for own in evidence.gathers for g in own if g.phase == phase and g.bytes > 0]
    if not links or not sizes:
        return 0.0
    link = max(links, key=lambda link: link.count)
    return link.alpha_ns * len(sizes) / max(1.0, sum(link.time_of(size) for size in sizes))


def exposed_gathers(evidence: Evidence, phase: str) -> float:
    """Exposed time of the gathers of a phase, waiting for peers left out, ns per step."""
    return evidence.mean(
        sum(evidence.own_exposed(g.rank, g.k) for own in evidence.gathers for g in own if g.phase == phase)
    )


def fragmented_all_gathers(evidence: Evidence) -> Finding | None:
    """A layer's parameters come in several gathers."""
    if not evidence.sharding or not is_fragmented(evidence):
        return None
    extras, alpha = extra_gathers(evidence), alpha_ns(evidence)
    host = host_time_of_extra_gathers(evidence)
    fixed, micro_batches = 0.0, evidence.micro_batches
    for phase, extra in extras.items():
        if extra.per_layer > th.GATHERS_PER_LAYER:
            room = evidence.late_room.get(phase, 0.0)
            left = max(0.0, exposed_gathers(evidence, phase) - room)
            fixed += max(
                min(extra.extra * micro_batches * alpha, left),
                left * extra.fraction * _fixed_fraction(evidence, phase),
            )
    per_layer = max(e.per_layer for e in extras.values())
    sizes = [g.bytes for key, members in evidence.passes.items() for g in members if g.bytes > 0]
    bucket = evidence.setting("stage3_prefetch_bucket_size")
    settings = list(_ONE_PER_LAYER.of(evidence.framework))
    title = f"{per_layer:.3g} all-gathers for one layer in a pass where one would do"
    if isinstance(bucket, int) and _prefetches(evidence) and _below_a_layer(evidence, bucket):
        title += f": a prefetch bucket of {bucket} elements fetches about one matrix at a time"
        settings[0:0] = [s for s in settings if s.startswith("stage3_prefetch")]
        settings = list(dict.fromkeys(settings))
    return Finding(
        "fragmented_all_gathers",
        title,
        host + fixed,
        {
            "gathers_per_layer": {phase: round(e.per_layer, 2) for phase, e in extras.items()},
            "gathers_per_pass": {phase: round(e.count, 2) for phase, e in extras.items()},
            "median_bytes": int(np.median(sizes)) if sizes else None, "fixed_ns_per_gather": round(alpha),
            "host_ns": round(host), "exposed_fixed_ns": round(fixed),
            "stage3_prefetch_bucket_size": bucket,
        },
        settings,
    )  # fmt: skip


def _below_a_layer(evidence: Evidence, elements: int) -> bool:
    """Whether so many elements, of two bytes at least, are less than what one layer gathers in a pass."""
    per_layer = [
        sum(g.bytes for g in members if g.layer == layer)
        for members in evidence.passes.values()
        for layer in {g.layer for g in members if is_layer(g.layer)}
    ]
    return bool(per_layer) and 2 * elements < float(np.median(per_layer))


def _prefetches(evidence: Evidence) -> bool:
    reasons = [g.reason for own in evidence.gathers for g in own if g.phase in PASSES and g.reason]
    return sum(r == "prefetch" for r in reasons) > 0.5 * len(reasons) if reasons else False


def tiny_parameters(evidence: Evidence) -> Finding | None:
    """Most gathers carry a norm, a bias or an adapter."""
    if not evidence.sharding:
        return None
    cost = host_time_of_tiny_gathers(evidence)
    alpha, tiny_count, largest = alpha_ns(evidence), 0.0, 0
    for tiny in _tiny_by_phase(evidence).values():
        count = evidence.mean(len(tiny.gathers))
        exposed = evidence.mean(sum(evidence.own_exposed(g.rank, g.k) for g in tiny.gathers))
        cost += min(exposed, max(exposed / 2, count * alpha))
        tiny_count += count
        largest = max([largest, *(g.bytes for g in tiny.gathers)])
    if not tiny_count:
        return None
    return Finding(
        "tiny_parameters",
        f"{tiny_count:.0f} all-gathers a step carry at most {th.TINY_BYTES // 1024} KiB each",
        cost,
        {"tiny_gathers_per_step": round(tiny_count, 1), "largest_tiny_bytes": largest},
        Settings(
            deepspeed=("stage3_param_persistence_threshold: above the small parameters' size",
                       "leaf_module.classes = [the layer's class]"),
            fsdp2=("fully_shard on whole layers, so that small parameters ride along",),
            fsdp1=("auto_wrap_policy: wrap layers, not adapters",),
        ).of(evidence.framework),
    )  # fmt: skip


def expert_gathers(evidence: Evidence) -> Finding | None:
    """The experts of a mixture are fetched one by one."""
    if not evidence.sharding:
        return None
    per_pass = [
        Counter(_expert_block(g) for g in members if _expert_block(g)) for members in evidence.passes.values()
    ]
    counts = [n for blocks in per_pass for n in blocks.values()]
    if not counts or np.mean(counts) <= th.GATHERS_PER_LAYER:
        return None
    experts = [g for own in evidence.gathers for g in own if g.phase in PASSES and _expert_block(g)]
    n = evidence.mean(len(experts))
    saved = 1 - 1 / float(np.mean(counts))
    exposed = evidence.mean(sum(evidence.own_exposed(g.rank, g.k) for g in experts))
    passes = evidence.mean(sum(len(own) for own in evidence.gathers)) or 1
    host = (evidence.idle(*HOOKS, phases=PASSES) + evidence.late_share(*HOOKS)) * n / passes
    return Finding(
        "expert_gathers",
        f"{np.mean(counts):.3g} all-gathers for the experts of one layer in a pass",
        saved * (host + min(exposed, n * alpha_ns(evidence))),
        {"gathers_per_block": round(float(np.mean(counts)), 2), "expert_gathers_per_step": round(n, 1)},
        Settings(
            deepspeed=("leaf_module.classes = [the class of the mixture-of-experts block]",),
            fsdp2=("fully_shard on the block of experts as one unit",),
            fsdp1=("auto_wrap_policy: wrap the block of experts",),
        ).of(evidence.framework),
    )


def _expert_block(gather: Gather) -> str | None:
    paths = gather.parameters or ((gather.unit,) if gather.unit else ())
    for path in paths:
        head, marker, rest = path.partition(".experts.")
        if marker and rest.split(".")[0].isdigit():
            return head
    return None


def fragmented_reduce_scatters(evidence: Evidence) -> Finding | None:
    """Gradients are reduced in many small pieces."""
    if not evidence.sharding:
        return None
    count = bytes_ = exposed = 0
    for position, rank in enumerate(evidence.ranks):
        c = rank.collectives
        for k in np.flatnonzero(c.is_kind("reduce_scatter") & evidence.joined.used(position)).tolist():
            count += 1
            bytes_ += max(0, int(c.bytes[k]))
            exposed += evidence.own_exposed(position, k)
    layers = len({g.layer for own in evidence.gathers for g in own if is_layer(g.layer)})
    per_micro_batch = evidence.mean(count) / evidence.micro_batches
    if not layers or per_micro_batch <= th.REDUCES_PER_LAYER * (layers + 2):
        return None
    extra = evidence.mean(count) * (1 - (layers + 2) / per_micro_batch)
    links = [link for link in evidence.joined.links if link.kind == "reduce_scatter"]
    alpha = max(links, key=lambda link: link.count).alpha_ns if links else 0.0
    bucket = evidence.setting("reduce_bucket_size")
    return Finding(
        "fragmented_reduce_scatters",
        f"{per_micro_batch:.0f} reduce-scatters in a micro-batch of {layers} layers",
        min(extra * alpha, evidence.mean(exposed)),
        {
            "reduce_scatters_per_micro_batch": round(per_micro_batch, 1), "layers": layers,
            "mean_bytes": round(bytes_ / count), "reduce_bucket_size": bucket,
        },
        Settings(
            deepspeed=("reduce_bucket_size: at least the parameters of one layer",),
            fsdp2=("fully_shard on whole layers, not on their parts",),
            fsdp1=("auto_wrap_policy: wrap layers",),
        ).of(evidence.framework),
    )  # fmt: skip
