"""The process group and the device of this process."""

import os

import torch
import torch.distributed as dist
from torch import nn


def world_group() -> dist.ProcessGroup:
    """The default process group, which must exist."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the default process group does not exist")
    return group


def join_world(model: nn.Module) -> torch.device:
    """The device to train on; the default process group is made where there is none.

    A model on an accelerator stays there. One on the host moves to this process's accelerator, unless the
    process group is one for hosts (gloo). Without torchrun's environment the group holds this process alone.
    """
    placed = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
    if placed is not None:
        device = placed
    elif torch.cuda.is_available() and not (dist.is_initialized() and dist.get_backend() == "gloo"):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(
                backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
            )
    return device
