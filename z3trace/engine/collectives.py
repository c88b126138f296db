"""The collectives, as functions from buffers to handles; nothing here knows of modules or schedules.

gloo carries out a reduce-scatter as an all-reduce of the whole tensor, twice the bytes and several times as
slow as an all-to-all followed by a local sum; so on gloo that is what a reduce-scatter is. Issuing never
waits: gloo works on its own threads, NCCL on its own stream, which is made to wait for what the current
stream was given before the call. Waiting makes the current stream wait (NCCL) or the caller (gloo).
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two and warns about the names that exist since 1.13.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Handle(Protocol):
    """A collective that was issued."""

    def wait(self) -> object:
        """From here on the current stream (NCCL) or thread (gloo) can use the result."""
        ...


class Communicator:
    """A process group and what the engine needs to know of it. `sequence` counts what it issued.

    It does not keep the group alive: a gloo group that outlives `destroy_process_group()` lets its worker
    threads run into the interpreter's shutdown, which aborts the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.name = str(group.group_name)
        self.native_reduce_scatter = dist.get_backend(group) != "gloo"
        self.sequence = 0

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"process group {self.name} is destroyed: the engine cannot communicate any more"
            )
        return group

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence - 1


def all_gather(output: Tensor, shard: Tensor, comm: Communicator) -> Handle:
    """Fill `output` (size * n elements, contiguous) with the shards (n elements) of all ranks, in rank order."""
    handle: Handle = _all_gather(output, shard, group=comm.group, async_op=True)
    return handle


def reduce_scatter(received: Tensor, full: Tensor, comm: Communicator) -> Handle:
    """Send chunk r of `full` (size * n elements) to rank r.

    What arrives in `received` (size * n elements) is for `received_mean` to read: on gloo the chunks of all
    ranks, natively their mean in the first n elements.
    """
    if comm.native_reduce_scatter:
        mine = received[: full.numel() // comm.size]
        handle: Handle = _reduce_scatter(mine, full, op=dist.ReduceOp.AVG, group=comm.group, async_op=True)
    else:
        handle = dist.all_to_all_single(received, full, group=comm.group, async_op=True)
    return handle


def received_mean(received: Tensor, comm: Communicator) -> list[tuple[Tensor, float]]:
    """What arrived (see `reduce_scatter`) as terms: chunks of n elements, and the weight of each in the mean."""
    chunks = list(received.view(comm.size, -1))
    return (
        [(chunks[0], 1.0)] if comm.native_reduce_scatter else [(chunk, 1.0 / comm.size) for chunk in chunks]
    )


def all_reduce_sum(value: Tensor, comm: Communicator) -> Handle:
    """Replace `value` by its sum over the ranks."""
    handle: Handle = dist.all_reduce(value, group=comm.group, async_op=True)
    return handle


def broadcast_from_zero(value: Tensor, comm: Communicator) -> None:
    """Overwrite a contiguous tensor of any dtype by rank 0's, byte by byte: gloo has no booleans."""
    if value.numel():
        dist.broadcast(value.detach().view(-1).view(torch.uint8), group_src=0, group=comm.group)
