"""From torch's hooks to the runtime's events."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
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


def hook_modules(model: nn.Module, paths: Iterable[str], runtime: Runtime) -> None:
    """Report the forwards and backwards of the modules at these paths.

    Backward is noticed by hooks on the output tensors: unlike a node around the module they forbid no
    in-place operation on what it returns.
    """
    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(partial(_before_forward, runtime, path), prepend=True)
        module.register_forward_hook(partial(_after_forward, runtime, path), always_call=True)


def hook_modules_exactly(
    model: nn.Module, paths: Iterable[str], runtime: Runtime, partition_of: Mapping[int, str]
) -> None:
    """Report the modules' events in DeepSpeed's order: by autograd nodes around their positional inputs and
    their outputs, one for each tensor, and as each parameter has its gradient.

    `partition_of` gives the partition of a parameter by its id.
    """
    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(partial(_enter, runtime, path))
        module.register_forward_hook(partial(_leave, runtime, path, partition_of), always_call=True)
    for parameter in model.parameters():
        name = partition_of.get(id(parameter))
        if name is not None and parameter.requires_grad:
            accumulated = partial(_accumulated, runtime, name)
            parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]


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


class _Notice(torch.autograd.Function):
    """The identity; calls `notify` when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, notify: Callable[[], None]) -> Tensor:
        ctx.notify = notify
        return tensor.detach()  # unlike a view, it may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.notify()
        return gradient, None


def _notice(value: Any, notify: Callable[[], None]) -> Any:
    """The value with every tensor in it that requires a gradient replaced; mappings and dataclasses in place."""
    if isinstance(value, Tensor):
        return _Notice.apply(value, notify) if value.requires_grad else value  # type: ignore[no-untyped-call]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_notice(item, notify) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_notice(item, notify) for item in value)
    if isinstance(value, MutableMapping):
        for key, item in value.items():
            value[key] = _notice(item, notify)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            object.__setattr__(value, entry.name, _notice(getattr(value, entry.name), notify))
    return value


class _Countdown:
    """Tells that a call's backward is over when all its inputs have their gradients."""

    def __init__(self, runtime: Runtime, path: str, count: int) -> None:
        self._runtime = runtime
        self._path = path
        self._left = count

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._runtime.end_backward(self._path)


def _enter(runtime: Runtime, path: str, module: nn.Module, args: Any) -> Any:
    runtime.pre_forward(path)
    count = sum(tensor.requires_grad for tensor in tensors_in(args)) if torch.is_grad_enabled() else 0
    return _notice(args, _Countdown(runtime, path, count)) if count else None


def _leave(
    runtime: Runtime, path: str, partition_of: Mapping[int, str], module: nn.Module, args: Any, output: Any
) -> Any:
    differentiable = False
    for tensor in tensors_in(output):
        differentiable |= tensor.requires_grad
        if id(tensor) in partition_of:
            runtime.returned(path, partition_of[id(tensor)])
    call = runtime.post_forward(path, differentiable=differentiable)
    if differentiable and torch.is_grad_enabled():
        return _notice(output, partial(runtime.begin_backward, call))
    return None


def _accumulated(runtime: Runtime, partition: str, parameter: Tensor) -> None:
    runtime.gradient_ready(partition)
