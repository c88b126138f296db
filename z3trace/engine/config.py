"""The configuration: DeepSpeed's JSON names for what DeepSpeed has, our own keys under `z3trace`."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from z3trace.engine.schedule.settings import Effect, ZeroSettings, set_keys
from z3trace.errors import UserError

SCHEDULES = ("layerwise", "deepspeed")
UNITS = ("block", "module")

# Accepted because DeepSpeed's users have them; the engine has nothing that they could change.
_WITHOUT_EFFECT = frozenset({
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown",
    "memory_breakdown", "dump_state", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients",
    "communication_data_type", "disable_allgather", "comms_logger", "flops_profiler", "tensorboard", "wandb",
    "csv_monitor", "comet", "monitor_config", "checkpoint", "data_types", "elasticity", "autotuning", "aio",
    "activation_checkpointing", "fp16", "amp", "data_efficiency", "curriculum_learning", "compile",
})  # fmt: skip


_CLASS_LISTS = ("unit_classes", "leaf_classes_after")


@dataclass(frozen=True)
class EngineSettings:
    """The section `z3trace`.

    `unit` says what one gather of the layer-wise schedule fetches: a repeated block of the model or every
    module that owns parameters. `unit_classes` names the classes of the blocks (short or full name) where
    the one found from the model is not wanted. `prefetch` is how many units are fetched ahead.
    `leaf_classes_after` names classes that DeepSpeed's schedule takes as leaves set after initialize: too
    late for the hooks of what lies in them, which is a mistake worth studying.
    """

    schedule: str = "layerwise"
    unit: str = "block"
    unit_classes: tuple[str, ...] = ()
    prefetch: int = 1
    leaf_classes_after: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerSettings:
    """The section `optimizer`: the name of a class in torch.optim and its keyword arguments."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ZeroConfig:
    """A checked configuration. `dead` lists the keys that were given and have no effect here."""

    gradient_accumulation_steps: int = 1
    gradient_clipping: float = 0.0
    train_micro_batch_size_per_gpu: int | None = None
    train_batch_size: int | None = None
    bf16: bool = False
    optimizer: OptimizerSettings | None = None
    zero_optimization: ZeroSettings = field(default_factory=ZeroSettings)
    z3trace: EngineSettings = field(default_factory=EngineSettings)
    dead: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration in JSON's types, defaults included; `load_config` reads it back."""
        result: dict[str, Any] = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in ("bf16", "optimizer", "zero_optimization", "z3trace", "dead")
        }
        result["bf16"] = {"enabled": self.bf16}
        if self.optimizer is not None:
            result["optimizer"] = {"type": self.optimizer.type, "params": dict(self.optimizer.params)}
        simple = {k: v for k, v in asdict(self.zero_optimization).items() if isinstance(v, int)}
        result["zero_optimization"] = {**simple, **self.zero_optimization.to_config()}
        lists = {name: list(getattr(self.z3trace, name)) for name in _CLASS_LISTS}
        result["z3trace"] = {**asdict(self.z3trace), **lists}
        return result


Config = Mapping[str, Any] | str | PathLike[str] | ZeroConfig | None

_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
         "gradient_clipping", "bf16", "bfloat16", "optimizer", "scheduler", "zero_optimization", "z3trace")  # fmt: skip


def load_config(config: Config, *, world_size: int = 1, hidden_size: int | None = None) -> ZeroConfig:
    """Check a configuration: a mapping, the path of a JSON file, one that is checked already, or nothing.

    `hidden_size` resolves `auto`, see `ZeroSettings.parse`. Raises UserError for a key that is unknown
    (naming the nearest), a value out of range, or batch sizes that do not fit together.
    """
    if isinstance(config, ZeroConfig):
        return config
    raw = _read(config)
    for key in raw:
        if key not in _KEYS and key not in _WITHOUT_EFFECT:
            raise UserError(
                f"configuration key {key!r} is unknown{_nearest(key, [*_KEYS, *_WITHOUT_EFFECT])}"
            )
    if _enabled(raw, "fp16") or _enabled(raw, "amp"):
        raise UserError("fp16.enabled: this engine trains in fp32 or bf16; set bf16.enabled instead")
    if raw.get("scheduler"):
        raise UserError("scheduler: build a torch learning-rate scheduler on engine.optimizer instead")
    zero = raw.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise UserError(f"zero_optimization is {zero!r}: give a mapping")
    micro, steps, whole = _batch_sizes(raw, world_size)
    return ZeroConfig(
        gradient_accumulation_steps=steps,
        gradient_clipping=_clipping(raw.get("gradient_clipping", 0.0)),
        train_micro_batch_size_per_gpu=micro,
        train_batch_size=whole,
        bf16=_enabled(raw, "bf16") or _enabled(raw, "bfloat16"),
        optimizer=_optimizer(raw.get("optimizer")),
        zero_optimization=ZeroSettings.parse(zero, hidden_size=hidden_size),
        z3trace=_engine_settings(raw.get("z3trace", {})),
        dead=(
            *(key for key in raw if key in _WITHOUT_EFFECT),
            *(f"zero_optimization.{key}" for key in set_keys(zero, Effect.DEAD)),
        ),
    )


def _read(config: Mapping[str, Any] | str | PathLike[str] | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"configuration {path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"configuration {path} holds no JSON object")
    return raw


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else ": leave it out"


def _enabled(raw: Mapping[str, Any], section: str) -> bool:
    value = raw.get(section)
    if value is None:
        return False
    if not isinstance(value, Mapping):
        raise UserError(f'{section} is {value!r}: give {{"enabled": true}} or leave it out')
    enabled = value.get("enabled", False)
    if enabled == "auto":
        return False
    if not isinstance(enabled, bool):
        raise UserError(f"{section}.enabled is {enabled!r}: give true or false")
    return enabled


def _count(raw: Mapping[str, Any], key: str) -> int | None:
    value = raw.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key} is {value!r}: give a whole number of at least 1")
    return value


def _batch_sizes(raw: Mapping[str, Any], world_size: int) -> tuple[int | None, int, int | None]:
    """Micro-batch, accumulation steps and whole batch: whole = micro * steps * world, as far as known."""
    micro = _count(raw, "train_micro_batch_size_per_gpu")
    steps = _count(raw, "gradient_accumulation_steps")
    whole = _count(raw, "train_batch_size")
    if whole is not None and micro is not None and steps is None:
        steps = max(whole // (micro * world_size), 1)
    steps = steps or 1
    if whole is not None and micro is None:
        micro = max(whole // (steps * world_size), 1)
    if whole is not None and micro is not None and whole != micro * steps * world_size:
        raise UserError(
            f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} * "
            f"gradient_accumulation_steps {steps} * {world_size} ranks: leave one of them out"
        )
    return micro, steps, whole if whole is not None or micro is None else micro * steps * world_size


def _clipping(value: Any) -> float:
    if value == "auto":
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise UserError(f"gradient_clipping is {value!r}: give the largest norm, or 0 for none")
    return float(value)


def _optimizer(value: Any) -> OptimizerSettings | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise UserError(f'optimizer is {value!r}: give {{"type": "AdamW", "params": {{"lr": 1e-3}}}}')
    params = {key: item for key, item in value.get("params", {}).items() if item != "auto"}
    return OptimizerSettings(value["type"], params)


def _engine_settings(value: Any) -> EngineSettings:
    if not isinstance(value, Mapping):
        raise UserError(f"z3trace is {value!r}: give a mapping")
    known = [entry.name for entry in fields(EngineSettings)]
    for key in value:
        if key not in known:
            raise UserError(f"configuration key 'z3trace.{key}' is unknown{_nearest(key, known)}")
    schedule = value.get("schedule", "layerwise")
    if schedule not in SCHEDULES:
        raise UserError(f"z3trace.schedule is {schedule!r}: give one of {', '.join(SCHEDULES)}")
    unit = value.get("unit", "block")
    if unit not in UNITS:
        raise UserError(f"z3trace.unit is {unit!r}: give one of {', '.join(UNITS)}")
    unit_classes, leaf_classes_after = (_class_names(value, key) for key in _CLASS_LISTS)
    prefetch = value.get("prefetch", 1)
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise UserError(f"z3trace.prefetch is {prefetch!r}: give how many units to fetch ahead, 0 for none")
    return EngineSettings(schedule, unit, unit_classes, prefetch, leaf_classes_after)


def _class_names(value: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = value.get(key, ())
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise UserError(f"z3trace.{key} is {names!r}: give a list of class names")
    return tuple(names)
