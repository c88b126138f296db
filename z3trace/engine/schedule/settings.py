"""Every key of `zero_optimization` that DeepSpeed 0.19 accepts for stage 3: name, default, what it does.

Fields carry the names of the JSON keys. Sizes are in elements. Pure Python: the engine's configuration, the
schedule, the simulator and the advice all read this one table.
"""

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from z3trace.errors import UserError


class Effect(str, Enum):
    """What a knob changes in a stage-3 run."""

    SCHEDULE = "schedule"  # which collectives are issued, where, and of what size
    EXECUTION = "execution"  # memory, streams, compute or checkpoints; the same collectives
    DEAD = "dead"  # read by other stages or by nothing: no effect in stage 3
    UNMODELLED = "unmodelled"  # changes collectives in a way the schedule here does not follow


@dataclass(frozen=True)
class Knob:
    """One row of the table: `about` says in one sentence what the knob does in stage 3."""

    name: str
    default: Any
    effect: Effect
    about: str


def _knob(effect: Effect, about: str, minimum: int | None = None) -> dict[str, Any]:
    return {"effect": effect, "about": about, "minimum": minimum}


@dataclass(frozen=True)
class LeafModules:
    """`leaf_module`: which modules are fetched as a whole. A class matches by short or full name.

    A key that is given replaces its default.
    """

    classes: tuple[str, ...] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offload:
    """`offload_param` or `offload_optimizer`: where it goes, and the remaining options as given."""

    device: str = "none"
    options: tuple[tuple[str, Any], ...] = ()


_OFFLOAD_PARAM_KEYS = frozenset(
    {"device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"}
)
_OFFLOAD_OPTIMIZER_KEYS = frozenset(
    {
        "device",
        "nvme_path",
        "buffer_count",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
        "ratio",
        "super_offload",
        "cpuadam_cores_perc",
    }
)


@dataclass(frozen=True)
class ZeroSettings:
    """The stage-3 part of a DeepSpeed configuration, checked and with `auto` resolved.

    `overlap_comm` left out (or null) is true, as in DeepSpeed's stage 3.
    """

    stage3_prefetch_bucket_size: int = field(
        default=50_000_000,
        metadata=_knob(
            Effect.SCHEDULE,
            "Elements that each module call may prefetch in one collective, overshooting by a parameter; "
            "not a cap on what is in flight.",
            0,
        ),
    )
    stage3_param_persistence_threshold: int = field(
        default=100_000,
        metadata=_knob(
            Effect.SCHEDULE,
            "Parameters of up to this many elements stay gathered between steps; each costs one small "
            "all-gather after every optimizer step.",
            0,
        ),
    )
    stage3_model_persistence_threshold: int = field(
        default=sys.maxsize,
        metadata=_knob(
            Effect.SCHEDULE,
            "Cap on the elements of all persistent parameters together, taken in the order of "
            "named_parameters().",
            0,
        ),
    )
    stage3_max_live_parameters: int = field(
        default=1_000_000_000,
        metadata=_knob(
            Effect.SCHEDULE,
            "Gathered elements above which nothing more is prefetched; it never releases anything nor "
            "delays a demanded gather.",
            0,
        ),
    )
    stage3_max_reuse_distance: int = field(
        default=1_000_000_000,
        metadata=_knob(
            Effect.SCHEDULE,
            "A parameter used again within this many elements of the recorded order is not released; "
            "0 releases all.",
            0,
        ),
    )
    stage3_module_granularity_threshold: int = field(
        default=0,
        metadata=_knob(
            Effect.SCHEDULE,
            "Modules with at most this many elements per module with parameters in them become leaf "
            "modules, outermost first.",
        ),
    )
    leaf_module: LeafModules = field(
        default=LeafModules(),
        metadata=_knob(
            Effect.SCHEDULE,
            "Modules fetched whole, all below them included, in one gather: by class, name or name suffix.",
        ),
    )
    reduce_bucket_size: int = field(
        default=500_000_000,
        metadata=_knob(
            Effect.SCHEDULE,
            "Elements of gradient collected before one reduce-scatter; the rest goes at the end of each "
            "backward.",
            1,
        ),
    )
    reduce_scatter: bool = field(
        default=True,
        metadata=_knob(
            Effect.SCHEDULE,
            "False, with contiguous_gradients, reduces each bucket by one all-reduce instead of one "
            "reduce-scatter.",
        ),
    )
    stage3_allgather_sequential: bool = field(
        default=False,
        metadata=_knob(
            Effect.SCHEDULE,
            "One all-gather per parameter, without copies, and a prefetch bucket of 1 element.",
        ),
    )
    stage3_use_all_reduce_for_fetch_params: bool = field(
        default=False,
        metadata=_knob(
            Effect.SCHEDULE,
            "Fetches several parameters by one all-reduce of a zero-filled buffer: twice the wire bytes.",
        ),
    )
    zero_hpz_partition_size: int = field(
        default=1,
        metadata=_knob(
            Effect.SCHEDULE,
            "Ranks that keep a second shard among themselves: re-gathers until the next optimizer step stay "
            "inside that group.",
            0,
        ),
    )
    overlap_comm: bool = field(
        default=True,
        metadata=_knob(
            Effect.EXECUTION,
            "Separate streams for all-gathers and reduce-scatters; the same collectives in the same order.",
        ),
    )
    contiguous_gradients: bool = field(
        default=True,
        metadata=_knob(Effect.EXECUTION, "Gradients are copied into one bucket buffer as they come."),
    )
    sub_group_size: int = field(
        default=1_000_000_000,
        metadata=_knob(
            Effect.EXECUTION,
            "Elements of shard updated at a time in step(); the norm of each part is one scalar all-reduce.",
            0,
        ),
    )
    offload_param: Offload = field(
        default=Offload(),
        metadata=_knob(
            Effect.EXECUTION,
            "Shards live in host memory (cpu) or on disk (nvme, which also holds back prefetching).",
        ),
    )
    offload_optimizer: Offload = field(
        default=Offload(),
        metadata=_knob(Effect.EXECUTION, "Optimizer state and update live in host memory or on disk."),
    )
    memory_efficient_linear: bool = field(
        default=True, metadata=_knob(Effect.EXECUTION, "Linear layers save no gathered weight for backward.")
    )
    override_module_apply: bool = field(
        default=True,
        metadata=_knob(Effect.EXECUTION, "Module.apply gathers parameters while it runs under zero.Init."),
    )
    load_from_fp32_weights: bool = field(
        default=True,
        metadata=_knob(Effect.EXECUTION, "Master weights are loaded from the checkpoint's fp32 copies."),
    )
    pipeline_loading_checkpoint: bool = field(
        default=False, metadata=_knob(Effect.EXECUTION, "Ranks load a checkpoint one after the other.")
    )
    stage3_gather_16bit_weights_on_model_save: bool = field(
        default=False,
        metadata=_knob(
            Effect.EXECUTION, "Saving gathers whole 16-bit weights; training steps are untouched."
        ),
    )
    save_muon_momentum_buffer_in_memory: bool = field(
        default=False,
        metadata=_knob(Effect.EXECUTION, "Muon's momentum stays in memory when optimizer state is on disk."),
    )
    log_trace_cache_warnings: bool = field(
        default=False,
        metadata=_knob(
            Effect.EXECUTION, "Prints when the recorded order no longer holds: turn it on while tuning."
        ),
    )
    enable_sanity_checks: bool = field(
        default=False,
        metadata=_knob(
            Effect.EXECUTION,
            "Checks states of parameters, and by small broadcasts that all ranks reduce the same.",
        ),
    )
    zero_quantized_weights: bool = field(
        default=False,
        metadata=_knob(Effect.UNMODELLED, "Gathers int8 weights and, in a second collective, their scales."),
    )
    zero_quantized_nontrainable_weights: bool = field(
        default=False,
        metadata=_knob(
            Effect.UNMODELLED, "Stores frozen weights in int8 and gathers them apart, with their scales."
        ),
    )
    zero_quantized_gradients: bool = field(
        default=False,
        metadata=_knob(
            Effect.UNMODELLED, "Reduces gradients quantized, by all-to-all, where there is more than a node."
        ),
    )
    zenflow: Any = field(
        default=None,
        metadata=_knob(Effect.UNMODELLED, "Updates important gradients at once, the others later."),
    )
    allgather_bucket_size: int = field(
        default=500_000_000,
        metadata=_knob(Effect.DEAD, "Stages 1 and 2 only: never handed to the stage-3 optimizer.", 0),
    )
    allgather_partitions: bool = field(default=True, metadata=_knob(Effect.DEAD, "Stages 1 and 2 only."))
    use_multi_rank_bucket_allreduce: bool = field(
        default=True, metadata=_knob(Effect.DEAD, "Stages 1 and 2 only.")
    )
    round_robin_gradients: bool = field(
        default=False, metadata=_knob(Effect.DEAD, "Stages 1 and 2 with offload only.")
    )
    parameter_alignment: bool = field(default=False, metadata=_knob(Effect.DEAD, "Stages 1 and 2 only."))
    ignore_unused_parameters: bool = field(default=True, metadata=_knob(Effect.DEAD, "Stage 2 only."))
    elastic_checkpoint: bool = field(
        default=False, metadata=_knob(Effect.DEAD, "No longer supported in stage 3.")
    )
    legacy_stage1: bool = field(default=False, metadata=_knob(Effect.DEAD, "Stage 1 only."))
    compute_grad_norm: bool = field(
        default=True, metadata=_knob(Effect.DEAD, "Stages 1 and 2 only; false is an error in stage 3.")
    )

    @property
    def prefetch_limit(self) -> int:
        """Elements that one module call may prefetch; sequential gathers force it to 1."""
        return 1 if self.stage3_allgather_sequential else self.stage3_prefetch_bucket_size

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], *, hidden_size: int | None = None, where: str = "zero_optimization"
    ) -> "ZeroSettings":
        """Check a `zero_optimization` mapping, in DeepSpeed's JSON names or its short ones.

        `hidden_size` resolves `auto` by the formulas of the transformers library's Trainer. Without it, or
        for another key, `auto` means DeepSpeed's default: so DeepSpeed itself reads it.
        Raises UserError for an unknown key (naming the nearest), a removed one, or a value out of range.
        """
        stage = config.get("stage", 3)
        if isinstance(stage, bool) or stage != 3:
            raise UserError(f"{where}.stage is {stage!r}: ZeRO-3 needs 3")
        values: dict[str, Any] = {}
        for key, value in config.items():
            name = _canonical(key, where)
            if name is None:
                continue
            if name in _DEPRECATED:
                name, value = _DEPRECATED[name][0], _DEPRECATED[name][1](value)
            if value == "auto":
                value = None if hidden_size is None else auto_values(hidden_size).get(name)
                if value is None:
                    continue
            if name in values:
                raise UserError(f"{where}.{key} sets {name}, which is already set: keep one of them")
            values[name] = _checked(name, value, f"{where}.{key}")
        return cls(**values)

    def to_config(self) -> dict[str, Any]:
        """A `zero_optimization` mapping with `stage` and every value that is not the default."""
        config: dict[str, Any] = {"stage": 3}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != entry.default:
                config[entry.name] = _plain(value)
        return config


KNOBS: Mapping[str, Knob] = {
    entry.name: Knob(entry.name, entry.default, entry.metadata["effect"], entry.metadata["about"])
    for entry in fields(ZeroSettings)
}


def set_keys(config: Mapping[str, Any], effect: Effect) -> tuple[str, ...]:
    """The keys of a `zero_optimization` mapping that have this effect: which of a user's keys are dead."""
    names = (_canonical(key, "zero_optimization") for key in config)
    return tuple(name for name in names if name and name in KNOBS and KNOBS[name].effect is effect)


def auto_values(hidden_size: int) -> dict[str, int]:
    """What `auto` means to the transformers library (integrations/deepspeed.py, trainer_config_finalize)."""
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


_SHORT = {name.removeprefix("stage3_"): name for name in KNOBS if name.startswith("stage3_")}
_IGNORED = frozenset({"stage", "cpu_offload_use_pin_memory"})
_REMOVED = frozenset({"mics_shard_size", "mics_hierarchical_params_gather"})
_DEPRECATED: Mapping[str, tuple[str, Any]] = {
    "cpu_offload_param": ("offload_param", lambda on: {"device": "cpu"} if on else None),
    "cpu_offload": ("offload_optimizer", lambda on: {"device": "cpu"} if on else None),
    "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", lambda on: on),
}


def _canonical(key: str, where: str) -> str | None:
    """The field that a key names; None where it names none but is accepted."""
    if key in _IGNORED:
        return None
    if key in KNOBS or key in _DEPRECATED:
        return key
    if key in _SHORT:
        return _SHORT[key]
    if key in _REMOVED:
        raise UserError(
            f"{where}.{key} was removed from DeepSpeed: use zero_hpz_partition_size or leave it out"
        )
    raise UserError(f"{where}.{key} is no DeepSpeed setting{_nearest(key, [*KNOBS, *_SHORT, *_DEPRECATED])}")


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else ": leave it out"


def _checked(name: str, value: Any, where: str) -> Any:
    entry = ZeroSettings.__dataclass_fields__[name]
    if name == "leaf_module":
        return _leaf_modules(value, where)
    if name == "offload_param":
        return _offload(value, where, _OFFLOAD_PARAM_KEYS)
    if name == "offload_optimizer":
        return _offload(value, where, _OFFLOAD_OPTIMIZER_KEYS)
    if name == "zenflow":
        return value
    if isinstance(entry.default, bool):
        if name == "overlap_comm" and value is None:
            return True
        if not isinstance(value, bool):
            raise UserError(f"{where} is {value!r}: give true or false")
        if name == "compute_grad_norm" and not value:
            raise UserError(f"{where} is false: stage 3 always computes the norm, leave it out")
        return value
    return _elements(value, where, entry.metadata["minimum"])


def _elements(value: Any, where: str, minimum: int | None) -> int:
    number = value
    if isinstance(number, str):
        try:
            number = float(number)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number != number // 1:
        raise UserError(f"{where} is {value!r}: give a whole number of elements")
    if minimum is not None and number < minimum:
        raise UserError(f"{where} is {value!r}: give at least {minimum}")
    return int(number)


def _leaf_modules(value: Any, where: str) -> LeafModules:
    if value is None:
        return LeafModules()
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is {value!r}: give a mapping with classes, names or name_suffixes")
    known = [entry.name for entry in fields(LeafModules)]
    lists: dict[str, tuple[str, ...]] = {}
    for key, names in value.items():
        if key not in known:
            raise UserError(f"{where}.{key} is no DeepSpeed setting{_nearest(key, known)}")
        entries = [names] if isinstance(names, str) else names
        if not isinstance(entries, (list, tuple)):
            raise UserError(f"{where}.{key} is {names!r}: give a list of names")
        lists[key] = tuple(dict.fromkeys(str(name) for name in entries))
    return LeafModules(**lists)


def _offload(value: Any, where: str, known: frozenset[str]) -> Offload:
    if value is None:
        return Offload()
    if not isinstance(value, Mapping):
        raise UserError(f'{where} is {value!r}: give a mapping such as {{"device": "cpu"}}')
    for key in value:
        if key not in known:
            raise UserError(f"{where}.{key} is no DeepSpeed setting{_nearest(key, sorted(known))}")
    device = value.get("device") or "none"
    if device not in ("none", "cpu", "nvme"):
        raise UserError(f"{where}.device is {device!r}: give none, cpu or nvme")
    return Offload(device, tuple((key, item) for key, item in value.items() if key != "device"))


def _plain(value: Any) -> Any:
    if isinstance(value, LeafModules):
        default = LeafModules()
        return {
            entry.name: list(getattr(value, entry.name))
            for entry in fields(value)
            if getattr(value, entry.name) != getattr(default, entry.name)
        }
    if isinstance(value, Offload):
        return {"device": value.device, **dict(value.options)}
    return value
