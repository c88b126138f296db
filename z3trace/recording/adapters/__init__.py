"""What recording knows of each training library: one module each, put to work when the script imports it.

An adapter tells `Steps` of trainings and of their steps, and writes labels (see `z3trace.engine.labels`) around
what its library does. It never imports the library, and whatever goes wrong in it costs labels, not the training.
"""

from collections.abc import Callable
from types import ModuleType

from z3trace.recording.imports import after_import
from z3trace.recording.messages import say
from z3trace.recording.steps import Steps

__all__ = ["install"]


def install(steps: Steps, *, labels: bool = True) -> None:
    """Watch for every library that is known; write labels unless told not to."""
    from z3trace.recording.adapters import (
        deepspeed,
        deepspeed_labels,
        fsdp1,
        huggingface,
        profilers,
        torch_training,
        z3_engine,
    )

    z3_engine.observe_engines(steps)
    _on("torch.optim.optimizer", "steps", lambda module: torch_training.watch_optimizers(module, steps))
    _on("torch.nn.modules.module", "steps", lambda module: torch_training.watch_forward(module, steps))
    _on("torch.autograd.profiler", "steps", lambda module: profilers.watch_profilers(module, steps))
    _on("deepspeed.runtime.engine", "steps", lambda module: deepspeed.watch_engines(module, steps))
    _on("transformers.trainer", "configuration", huggingface.watch_trainers)
    if labels:
        name = "deepspeed.runtime.zero.partitioned_param_coordinator"
        _on(name, "labels", deepspeed_labels.label_coordinator)
        _on("deepspeed.runtime.zero.partition_parameters", "labels", deepspeed_labels.label_parameters)
        _on("deepspeed.runtime.zero.stage3", "labels", deepspeed_labels.label_optimizer)
        _on("torch.distributed.fsdp._flat_param", "labels", fsdp1.label_handles)
        _on("torch.distributed.fsdp._runtime_utils", "labels", fsdp1.label_runtime)


def _on(module: str, what: str, action: Callable[[ModuleType], None]) -> None:
    def guarded(found: ModuleType) -> None:
        try:
            action(found)
        except Exception as error:
            library = module.partition(".")[0]
            say(
                f"no {what} from this version of {library} ({type(error).__name__}: {error}); training goes on"
            )

    after_import(module, guarded)
