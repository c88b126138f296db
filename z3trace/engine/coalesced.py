"""Several partitions in one collective, with the copies that this costs.

A collective's buffer is a matrix of one row per rank; each partition has a range of its columns, as wide as its
shard. Rank r's row holds the r-th shards of all partitions.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from z3trace.engine.collectives import Communicator, Handle, all_gather, all_reduce_sum
from z3trace.engine.ranges import labelled
from z3trace.engine.storage import ShardedPartition


class CoalescedGather:
    """Gathers partitions through a common buffer; `sources` are this rank's shards of them.

    By all-reduce: every rank fills its own row of zeros, and the rows are added up.
    """

    def __init__(
        self,
        partitions: Sequence[ShardedPartition],
        sources: Sequence[Tensor],
        comm: Communicator,
        *,
        by_all_reduce: bool,
    ) -> None:
        self._partitions = partitions
        self._widths = [source.numel() for source in sources]
        row = sum(self._widths)
        size = row * comm.size * sources[0].element_size()
        allocate = torch.zeros if by_all_reduce else torch.empty
        self._buffer: Tensor | None = allocate(
            (comm.size, row), dtype=sources[0].dtype, device=sources[0].device
        )
        with labelled("copy_in", bytes=size // comm.size, params=len(partitions)):
            own = torch.cat(tuple(sources), out=self._buffer[comm.rank] if by_all_reduce else None)
        flat = self._buffer.view(-1)
        self._handle: Handle = all_reduce_sum(flat, comm) if by_all_reduce else all_gather(flat, own, comm)

    def wait(self) -> None:
        """Wait for the collective and copy into the partitions' own buffers; once, however often called."""
        if self._buffer is None:
            return
        self._handle.wait()
        size = self._buffer.numel() * self._buffer.element_size()
        with labelled("copy_out", bytes=size, params=len(self._partitions)):
            parts = torch.split(self._buffer, self._widths, dim=1)
            for partition, part in zip(self._partitions, parts, strict=True):
                if partition.slot is not None:
                    partition.slot.buffer.view(part.shape).copy_(part)
        self._buffer = None


def pack_gradients(partitions: Sequence[ShardedPartition], rows: int) -> Tensor:
    """The gradients of partitions of one parameter each as such a buffer; they are cleared where they were.

    A parameter without a gradient counts as zeros. With one row there is no padding.
    """
    like = partitions[0].shard
    widths = [p.numel if rows == 1 else p.padded_numel // rows for p in partitions]
    buffer = torch.zeros((rows, sum(widths)), dtype=like.dtype, device=like.device)
    for partition, part in zip(partitions, torch.split(buffer, widths, dim=1), strict=True):
        for target, gradient in _rows(part, partition):
            target.copy_(gradient)
    return buffer


def _rows(part: Tensor, partition: ShardedPartition) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of target and source: the whole rows of a flat gradient, and the rest of it."""
    (member,) = partition.members
    gradient = member.parameter.grad
    if gradient is None:
        return
    member.parameter.grad = None
    flat = gradient.reshape(-1)
    width = part.shape[1]
    whole = flat.numel() // width
    yield part[:whole], flat[: whole * width].view(whole, width)
    if flat.numel() > whole * width:
        yield part[whole, : flat.numel() - whole * width], flat[whole * width :]
