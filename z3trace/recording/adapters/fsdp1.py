"""FSDP1 (`FullyShardedDataParallel`): its ranges name no unit, so its gathers and reductions get labels."""

import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from z3trace.recording.adapters.describing import class_of, dtype_of
from z3trace.recording.adapters.labelling import Labels, inside_backward

if TYPE_CHECKING:
    from torch import nn

FRAMEWORK = "fsdp1"
_INNER = "_fsdp_wrapped_module"
_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"


def distributes(model: "nn.Module") -> bool:
    return bool(_wrapped(model))


def describe(model: "nn.Module") -> dict[str, Any]:
    """`units`: what one all-gather fetches, under the name that the labels carry."""
    units = []
    for module in _wrapped(model).values():
        handle = module._handle
        if handle is None:
            continue
        precision = module.mixed_precision
        units.append({
            "name": unit_of(handle),
            "parameters": _parameters(handle),
            "numel": sum(handle.flat_param._numels),
            "sharding_strategy": module.sharding_strategy.name,
            "param_dtype": _text(precision.param_dtype),
            "reduce_dtype": _text(precision.reduce_dtype),
            "backward_prefetch": getattr(module.backward_prefetch, "name", None),
            "forward_prefetch": module.forward_prefetch,
            "limit_all_gathers": module.limit_all_gathers,
        })  # fmt: skip
    wrapped = [module._handle.flat_param for module in _wrapped(model).values() if module._handle is not None]
    # The later of two with one path is what the user wrote.
    modules = {_clean(path): class_of(module) for path, module in model.named_modules()}
    return {
        "units": units,
        "modules": list(modules),
        "classes": modules,
        "parameters": {
            name: {
                "shape": list(shape),
                "numel": shape.numel(),
                "dtype": dtype_of(flat),
                "trainable": flat.requires_grad,
            }
            for unit, flat in zip(units, wrapped, strict=True)
            for name, shape in zip(unit["parameters"], flat._shapes, strict=True)
        },
    }


def label_handles(module: ModuleType) -> None:
    """`gather` around each all-gather of a flat parameter."""
    kind, labels = module.FlatParamHandle, _LABELS
    gather = kind._all_gather_flat_param

    @functools.wraps(gather)
    def _all_gather_flat_param(self: Any, padded_unsharded_flat_param: Any) -> Any:
        def values() -> dict[str, int | str]:
            return {
                "unit": unit_of(self),
                "module": unit_of(_prefetching[-1]) if _prefetching else unit_of(self),
                "phase": _phase(self),
                "reason": _reason(self),
                "bytes": padded_unsharded_flat_param.numel() * padded_unsharded_flat_param.element_size(),
                "params": len(self.flat_param._fqns),
            }

        with labels.around("gather", values):
            return gather(self, padded_unsharded_flat_param)

    kind._all_gather_flat_param = _all_gather_flat_param


_prefetching: list[Any] = []  # handles in whose hooks others are fetched ahead
_LABELS = Labels("FSDP1")


def label_runtime(module: ModuleType) -> None:
    """Which gathers are prefetches, and `reduce` around each reduction of gradients."""
    prefetch, reduce = module._prefetch_handle, module._reduce_grad

    @functools.wraps(prefetch)
    def _prefetch_handle(state: Any, current_handle: Any, *args: Any, **kwargs: Any) -> Any:
        _prefetching.append(current_handle)
        try:
            return prefetch(state, current_handle, *args, **kwargs)
        finally:
            _prefetching.pop()

    @functools.wraps(reduce)
    def _reduce_grad(state: Any, handle: Any) -> Any:
        def values() -> dict[str, int | str]:
            return {"unit": unit_of(handle), "phase": "backward", "params": len(handle.flat_param._fqns)}

        with _LABELS.around("reduce", values):
            return reduce(state, handle)

    vars(module).update(_prefetch_handle=_prefetch_handle, _reduce_grad=_reduce_grad)


def unit_of(handle: Any) -> str:
    """The path of the module that the handle's wrapper wraps, "" for the model; known from the first forward on."""
    path = getattr(handle, _PATH, None)
    return "" if path is None else str(path)


_PATH = "_z3trace_path"


def _wrapped(model: "nn.Module") -> dict[str, Any]:
    """The wrappers by path, told to their handles: a handle knows only what lies below its own module."""
    kind = getattr(sys.modules.get(_MODULE), "FullyShardedDataParallel", None)
    if kind is None:
        return {}
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, kind):
            found[_clean(path)] = module
            if module._handle is not None:
                setattr(module._handle, _PATH, _clean(path))
    return found


def _parameters(handle: Any) -> list[str]:
    prefix = f"{unit_of(handle)}." if unit_of(handle) else ""
    return [prefix + _clean(name) for name in handle.flat_param._fqns]


def _clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != _INNER)


def _phase(handle: Any) -> str:
    return "backward" if handle._training_state.name == "BACKWARD_PRE" or inside_backward() else "forward"


def _reason(handle: Any) -> str:
    if _prefetching:
        return "prefetch"
    return "recompute" if handle._training_state.name == "FORWARD" and inside_backward() else "demand"


def _text(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
