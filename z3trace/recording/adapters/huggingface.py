"""Settings that Accelerate and the Trainer of transformers were given, for the run's description."""

import functools
import sys
from types import ModuleType
from typing import Any

_arguments: list[Any] = []  # of the Trainer that was made last; it may be gone itself when we describe it

# What decides how much is communicated and when. Paths and tokens stay out of the run.
_TRAINER_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "bf16",
    "fp16",
    "optim",
    "torch_compile",
    "dataloader_num_workers",
    "max_grad_norm",
    "logging_steps",
)


def watch_trainers(module: ModuleType) -> None:
    """Remember the arguments of each new Trainer."""
    kind = module.Trainer
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _arguments[:] = [self.args]

    kind.__init__ = __init__


def describe() -> dict[str, Any]:
    """`accelerate` and `trainer`, each only where it is in use; the accumulation that they ask for."""
    found: dict[str, Any] = {}
    accelerate = _accelerate()
    if accelerate:
        found["accelerate"] = accelerate
    for arguments in _arguments:
        found["trainer"] = {key: _plain(getattr(arguments, key, None)) for key in _TRAINER_KEYS}
    steps = found.get("trainer", accelerate).get("gradient_accumulation_steps")
    if isinstance(steps, int) and steps > 0:
        found["gradient_accumulation_steps"] = steps
    return found


def _accelerate() -> dict[str, Any]:
    state = sys.modules.get("accelerate.state")
    shared = dict(getattr(getattr(state, "AcceleratorState", None), "_shared_state", {}))
    if not shared:
        return {}
    gradients = getattr(getattr(state, "GradientState", None), "_shared_state", {})
    plugin = dict(gradients.get("plugin_kwargs") or {})
    return {
        "distributed_type": _plain(shared.get("distributed_type")),
        "mixed_precision": _plain(shared.get("_mixed_precision")),
        "gradient_accumulation_steps": plugin.get("num_steps", 1),
    }


def _plain(value: Any) -> Any:
    kept = value if isinstance(value, bool | int | float) or value is None else getattr(value, "value", value)
    return kept if isinstance(kept, bool | int | float | str) or kept is None else str(kept)
