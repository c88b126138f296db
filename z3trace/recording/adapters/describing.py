"""A module tree in the words of `z3trace.engine.schedule.model_file`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def modules_of(model: "nn.Module") -> dict[str, Any]:
    """`modules` in registration order, and their `classes`."""
    named = list(model.named_modules())
    return {
        "modules": [path for path, _ in named],
        "classes": {path: class_of(module) for path, module in named},
    }


def parameters_of(model: "nn.Module") -> dict[str, dict[str, Any]]:
    """Shape, numel, dtype, trainable of each parameter, as the library shows them now."""
    return {
        name: {
            "shape": list(parameter.shape),
            "numel": parameter.numel(),
            "dtype": dtype_of(parameter),
            "trainable": parameter.requires_grad,
        }
        for name, parameter in model.named_parameters()
    }


def owners_of(model: "nn.Module") -> dict[int, list[str]]:
    """id of a parameter -> the paths of all modules that own it: several for tied weights."""
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(path)
    return owners


def class_of(module: "nn.Module") -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def dtype_of(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")
