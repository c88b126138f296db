"""Trainings in plain torch, DDP and FSDP: the model is what is called first, a step is what an optimizer makes."""

import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from z3trace.recording.adapters import ddp, fsdp1, fsdp2, huggingface
from z3trace.recording.adapters.describing import modules_of, parameters_of
from z3trace.recording.steps import Authority, Steps

if TYPE_CHECKING:
    import torch
    from torch import nn


_KINDS = (fsdp2, fsdp1, ddp)


class TorchTraining:
    """A model that is trained by a torch optimizer, whatever distributes it."""

    def __init__(self, model: "nn.Module") -> None:
        self._model = weakref.ref(model)
        self.framework = next((kind.FRAMEWORK for kind in _KINDS if kind.distributes(model)), "unknown")
        self.device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        self._told: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        model = self._model()
        if model is not None:  # else the script has dropped it: what was told before still holds
            own = ddp.unwrapped(model)
            self._told = {**modules_of(own), "parameters": parameters_of(own), **huggingface.describe()}
            for kind in _KINDS:
                if kind.distributes(model):
                    self._told |= kind.describe(model)
        return self._told

    def collectives(self, steps: tuple[int, ...]) -> list[dict[str, Any]]:
        return []


def watch_forward(module: ModuleType, steps: Steps) -> None:
    """The first module that is called to be trained is the model, and there the first step begins.

    The hook is gone before that module runs, so compiled code never sees it.
    """

    def before_forward(model: "nn.Module", _args: Any) -> None:
        import torch

        if not (model.training and torch.is_grad_enabled()):
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        hook.remove()
        if not steps.has_engine:
            training = TorchTraining(model)
            steps.created(training, Authority.OPTIMIZER)
            steps.began(training, Authority.OPTIMIZER)

    hook = module.register_module_forward_pre_hook(before_forward)


def watch_optimizers(module: ModuleType, steps: Steps) -> None:
    """Each step of the optimizer that steps first is a step of the training.

    A script may have several (one a parameter group, or a GAN's two): they do not add up.
    """
    counted: weakref.ref[Any] | None = None

    def after_step(optimizer: "torch.optim.Optimizer", _args: Any, _kwargs: Any) -> None:
        nonlocal counted
        if counted is None or counted() is None:
            counted = weakref.ref(optimizer)
        if counted() is optimizer:
            steps.finished(None, Authority.OPTIMIZER)

    module.register_optimizer_step_post_hook(after_step)
