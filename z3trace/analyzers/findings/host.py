"""The host is the limit: hooks, synchronizes, the allocator, the data loader."""

from collections import defaultdict

from z3trace.analyzers.findings import fragmentation
from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding, Settings
from z3trace.analyzers.findings.evidence import HOOKS, PASSES, SYNCS, Evidence
from z3trace.analyzers.findings.peers import only_some_ranks

_LARGER_UNITS = Settings(
    deepspeed=("leaf_module.classes = [the layer's class, or a block of several]",
               "stage3_module_granularity_threshold"),
    fsdp2=("fully_shard on groups of layers instead of single ones",),
    fsdp1=("auto_wrap_policy: wrap groups of layers",),
    z3trace=("z3trace.unit_classes = [a block of several layers]",),
)  # fmt: skip


def host_bound(evidence: Evidence) -> Finding | None:
    """The device waits for the host between launches, and neither a synchronize nor communication is why."""
    causes = (*HOOKS, "host_dispatch", "host_other")
    if not evidence.on_device:
        return None  # the host is the device
    # Host time of single ranks is their own trouble: the median is what holds for the run.
    idle = {name: evidence.typical_idle(name, phases=PASSES) for name in causes}
    late = evidence.late_share(*causes)
    # What merging fragmented gathers, or keeping tiny ones, would win belongs to those findings.
    elsewhere = 0.0
    if evidence.sharding:
        elsewhere = fragmentation.host_time_of_extra_gathers(evidence)
        elsewhere += fragmentation.host_time_of_tiny_gathers(evidence)
    # Units of twice the size have half the hooks, and their gathers are issued in time.
    hooked = (idle["host_hooks"] + idle["host_collective_issue"]) * th.HOOKS_SAVED
    cost = hooked + idle["host_dispatch"] + idle["host_other"] + late - elsewhere
    if cost <= 0:
        return None
    hooks = idle["host_hooks"] + idle["host_collective_issue"]
    in_hooks = hooks >= 0.5 * sum(idle.values())
    where = "sharding hooks and the preparation of collectives" if in_hooks else "launching operators"
    settings: tuple[str, ...] = ()
    if in_hooks and evidence.sharding:
        settings = _LARGER_UNITS.of(evidence.framework)
    elif not in_hooks:
        settings = ("torch.compile or CUDA graphs", "a larger micro-batch")
    return Finding(
        "host_bound",
        f"the device waits for the host, which is mostly in {where}",
        cost,
        {
            **{f"idle_{name}_ns": round(ns) for name, ns in idle.items()},
            "exposed_by_late_launches_ns": round(late), "left_to_fragmentation_ns": round(elsewhere),
        },
        settings,
    )  # fmt: skip


def host_sync(evidence: Evidence) -> Finding | None:
    """The program waits for the device in the middle of a step, so the host cannot run ahead."""
    in_passes = 0.0
    rest: dict[tuple[int, int], list[float]] = defaultdict(list)
    names: dict[str, float] = defaultdict(float)
    calls = evidence.idle_calls(*SYNCS)
    for position, phase, row, ns in calls:
        rank = evidence.ranks[position]
        step = int(rank.steps.index_at(rank.trace.ts[row : row + 1])[0])
        if phase in PASSES:
            in_passes += ns
            names[_caller(evidence, position, row)] += ns
        else:
            rest[position, step].append(ns)
    # Of those outside the passes one a step is every training loop's own.
    extra = sum(sum(sorted(members)[: -th.SYNCS_PER_STEP]) for members in rest.values())
    late = evidence.late_share(*SYNCS) if in_passes else 0.0
    cost = evidence.mean(in_passes + extra) + late
    if cost <= 0:
        return None
    count = sum(phase in PASSES for _, phase, _, _ in calls)
    caller = max(names, key=lambda name: names[name]) if names else "the training loop"
    return Finding(
        "host_sync",
        f"the host waits for the device {evidence.mean(count):.0f} times in a step's passes, in {caller}",
        cost,
        {
            "synchronizes_per_step": round(evidence.mean(count), 2), "caller": caller,
            "idle_ns": round(evidence.mean(in_passes + extra)), "exposed_by_late_launches_ns": round(late),
        },
        (f"remove {caller} (.item(), .cpu(), print of a tensor) from the step, or do it every n-th step",),
    )  # fmt: skip


def _caller(evidence: Evidence, position: int, row: int) -> str:
    """The outermost operator around a runtime call: what the program wrote."""
    trace = evidence.ranks[position].trace
    name, parent = trace.name_of(row), int(trace.parents[row])
    while parent >= 0:
        if "::" in trace.name_of(parent) and not trace.name_of(parent).startswith("autograd::"):
            name = trace.name_of(parent)
        parent = int(trace.parents[parent])
    return name


def allocator_stalls(evidence: Evidence) -> Finding | None:
    """cudaMalloc and cudaFree inside steps: the caching allocator has run out and the device drains."""
    calls = evidence.idle_calls("allocator")
    idle = evidence.idle("allocator")
    if not calls or idle <= 0:
        return None
    names = sorted({evidence.ranks[p].trace.name_of(row) for p, _, row, _ in calls})
    ranks = sorted({evidence.ranks[p].rank for p, _, _, _ in calls})
    return Finding(
        "allocator_stalls",
        f"the device waits for {' and '.join(names)} inside steps",
        idle + evidence.late_share("allocator"),
        {"calls_per_step": round(evidence.mean(len(calls)), 2), "idle_ns": round(idle), "ranks": ranks},
        (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "less memory per step: a smaller micro-batch, activation checkpointing",
            *Settings(
                deepspeed=("a smaller stage3_max_live_parameters or stage3_prefetch_bucket_size",),
                fsdp1=("limit_all_gathers=True",),
            ).of(evidence.framework if evidence.sharding else "none"),
        ),
    )  # fmt: skip


def data_wait(evidence: Evidence) -> Finding | None:
    """All ranks wait for their data loaders."""
    idle = evidence.idle("host_dataloader")
    if idle <= 0 or only_some_ranks(evidence, "host_dataloader"):
        return None
    return Finding(
        "data_wait",
        "the device waits for the next batch",
        idle + evidence.late_share("host_dataloader"),
        {"idle_ns": round(idle)},
        ("DataLoader(num_workers=…, prefetch_factor=…, pin_memory=True, persistent_workers=True)",),
    )


def offload_bound(evidence: Evidence) -> Finding | None:
    """The optimizer runs on the host (offload_optimizer) while the device idles."""
    idle = evidence.idle_while("host_optimizer", "host_dispatch", "host_other", phase="optimizer")
    names = ("CPUAdam", "cpu_adam", "DeepSpeedCPU", "offload")
    seen = [
        name for rank in evidence.ranks[:1] for name in rank.trace.values("name")
        if isinstance(name, str) and any(part in name for part in names)
    ]  # fmt: skip
    offload = evidence.setting("offload_optimizer")
    asked = isinstance(offload, dict) and offload.get("device", "none") not in (None, "none")
    if idle <= 0 or not (seen or asked) or not evidence.on_device:
        return None
    return Finding(
        "offload_bound",
        "the device idles while the optimizer runs on the host",
        idle,
        {"idle_ns": round(idle), "seen": seen[:3], "offload_optimizer": bool(asked)},
        ("offload_optimizer: remove it if memory allows, or set pin_memory and ratio < 1",
         "deepspeed --bind_cores_to_rank"),
    )  # fmt: skip
