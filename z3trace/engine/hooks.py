"""From torch's hooks to the runtime's events."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from z3trace.engine.runtime import Runtime


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output, however nested in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name))


def hook_modules(model: nn.Module, paths: Iterable[str], runtime: Runtime) -> list[RemovableHandle]:
    """Report the forwards and backwards of the modules at these paths.

    Backward is noticed by hooks on the output tensors: unlike a node around the module they forbid no
    in-place operation on what it returns.
    """
    handles: list[RemovableHandle] = []
    for path in paths:
        module = model.get_submodule(path)
        handles.append(
            module.register_forward_pre_hook(partial(_before_forward, runtime, path), prepend=True)
        )
        handles.append(module.register_forward_hook(partial(_after_forward, runtime, path), always_call=True))
    return handles


def record_call_order(model: nn.Module, order: list[str]) -> list[RemovableHandle]:
    """Append to `order` the path of each module when its forward is first called."""
    seen: set[str] = set()

    def called(path: str, module: nn.Module, args: Any) -> None:
        if path not in seen:
            seen.add(path)
            order.append(path)

    return [
        m.register_forward_pre_hook(partial(called, path), prepend=True) for path, m in model.named_modules()
    ]


def _before_forward(runtime: Runtime, path: str, module: nn.Module, args: Any) -> None:
    runtime.pre_forward(path)


def _after_forward(runtime: Runtime, path: str, module: nn.Module, args: Any, output: Any) -> None:
    differentiable = [t for t in tensors_in(output) if t.requires_grad]
    call = runtime.post_forward(path, differentiable=bool(differentiable))
    arrived = partial(runtime.gradient_arrived, call)
    for tensor in differentiable:
        tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
        # An in-place operation on a view gives it a new history, without the hook; its base keeps its own.
        base = tensor._base
        if base is not None and base.grad_fn is not None:
            base.register_hook(arrived)  # type: ignore[no-untyped-call]
