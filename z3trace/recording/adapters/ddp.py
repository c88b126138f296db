"""DistributedDataParallel: which buckets its gradients are reduced in. It gathers nothing."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

FRAMEWORK = "ddp"
_MODULE = "torch.nn.parallel.distributed"


def distributes(model: "nn.Module") -> bool:
    return _wrapper(model) is not None


def unwrapped(model: "nn.Module") -> "nn.Module":
    """The user's own model, without the wrapper around it."""
    return next(model.children()) if _wrapper(model) is model else model


def describe(model: "nn.Module") -> dict[str, Any]:
    """Sizes in bytes. Buckets are formed anew after the first backward, in the order of its gradients."""
    wrapper = _wrapper(model)
    if wrapper is None:
        return {}
    told = wrapper._get_ddp_logging_data()
    sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    return {
        "ddp": {
            "bucket_bytes": [int(size) for size in str(sizes).split(",") if size.strip()],
            "bucket_cap_bytes": told.get("bucket_cap_bytes"),
            "find_unused_parameters": told.get("find_unused_parameters"),
            "gradient_as_bucket_view": told.get("gradient_as_bucket_view"),
            "static_graph": told.get("static_graph"),
        }
    }


def _wrapper(model: "nn.Module") -> Any:
    kind = getattr(sys.modules.get(_MODULE), "DistributedDataParallel", None)
    return None if kind is None else next((m for m in model.modules() if isinstance(m, kind)), None)
