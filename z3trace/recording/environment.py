"""What the job ran on: versions, host, device, and the environment variables that change communication."""

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from z3trace import __version__

# Libraries whose version explains a trace; asked only when the script imported them.
LIBRARIES = ("deepspeed", "accelerate", "transformers", "peft", "lightning", "torchtitan", "triton", "numpy")
VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "OMP_NUM_THREADS",
)
PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "UCX_")


def versions() -> dict[str, str]:
    """Versions of Python, torch, its communication libraries, and the training libraries in use."""
    import torch

    found = {"z3trace": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["rocm"] = torch.version.hip
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    for name in LIBRARIES:
        if name in sys.modules:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def device(kind: str) -> dict[str, Any]:
    """The device a rank trains on: kind (`cuda`, `rocm`, `cpu`, …), name, how many the host has."""
    import torch

    if kind == "cuda" and torch.cuda.is_available():
        shown = "rocm" if torch.version.hip else "cuda"
        return {"kind": shown, "name": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}
    return {"kind": kind, "name": _processor(), "count": os.cpu_count()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The set environment variables that change communication, memory or threading; nothing else."""
    return {k: v for k, v in sorted(environ.items()) if k in VARIABLES or k.startswith(PREFIXES)}
