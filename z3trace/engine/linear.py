"""`memory_efficient_linear`: linear layers that save their weight itself for backward, as DeepSpeed has them.

torch's own saves a transposed view, and computes the gradient of the bias before that of the weight: which
gradient comes first decides where a bucket of gradients ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_native = F.linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(value, weight)
        return _native(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        value, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        needs_value, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            gradient.matmul(weight) if needs_value else None,
            rows.t().matmul(value.reshape(-1, value.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _linear(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not torch.is_grad_enabled() or weight.dim() != 2 or torch.is_autocast_enabled(value.device.type):
        return _native(value, weight, bias)
    result: Tensor = _Linear.apply(value, weight, bias)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def memory_efficient_linear(enabled: bool) -> Iterator[None]:
    """While it lasts, torch.nn.functional.linear is the one of this module."""
    before = F.linear
    if enabled:
        F.linear = _linear  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = before
