"""A parameter whose elements are spread over the ranks must not be read: its memory belongs to others now.

While it is sharded a parameter's class is `ShardedParameter`, which answers questions about shape, dtype and
gradient. For everything that would touch elements it fetches the parameter if a forward is running (of
another module than its own: DeepSpeed calls it an external parameter), and else raises. Changing the class
of an object costs less than a tenth of a microsecond, and every view that autograd saved stays what it was.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_NAME = "_z3trace_name"
_FETCH = "_z3trace_fetch"


def _accessors(name: str) -> tuple[Any, ...]:
    attribute = getattr(Tensor, name)
    return attribute.__get__, attribute.__set__, attribute.__delete__


_ALLOWED: frozenset[Any] = frozenset({
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "is_leaf", "grad_fn", "ndim", "itemsize", "nbytes",
        "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_quantized", "output_nr", "_version",
    )),
    *_accessors("grad"),
    *_accessors("requires_grad"),
    *(getattr(Tensor, name) for name in (
        "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex",
        "is_contiguous", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__",
        "__len__",
    )),
    torch.is_floating_point, torch.is_complex, torch.numel,
})  # fmt: skip


class ShardedParameter(nn.Parameter):
    """A parameter of which only a shard is here."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, cls) and not getattr(value, _FETCH)():
                raise RuntimeError(
                    f"parameter {getattr(value, _NAME)} is sharded over the ranks and cannot be read outside "
                    "a forward: read it inside `with z3trace.engine.gathered(engine):`"
                )
        return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedParameter({getattr(self, _NAME, '')}, {tuple(self.shape)}, {self.dtype})"


def guard(parameter: nn.Parameter, name: str, fetch: Callable[[], bool]) -> None:
    """Prepare a parameter for `hide`: its name for the error, and a function that makes it readable if it may
    be read now (and tells whether)."""
    setattr(parameter, _NAME, name)
    setattr(parameter, _FETCH, fetch)


def hide(parameter: nn.Parameter) -> None:
    """Make reading the parameter an error, or fetch it."""
    try:  # noqa: SIM105 (contextlib.suppress costs five times as much, for every parameter of every gather)
        parameter.__class__ = ShardedParameter
    except TypeError:
        # A class of the user's with another memory layout cannot be exchanged: it is left as it is.
        pass


def reveal(parameter: nn.Parameter, original: type[nn.Parameter]) -> None:
    """Undo `hide`; `original` is the class it had."""
    parameter.__class__ = original
