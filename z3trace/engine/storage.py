"""Where parameters live: a flat shard on every rank, and a buffer that holds them whole while they are used.

A partition's shard is 1/world of its parameters laid end to end and padded. A gather fills a buffer straight
from the shards, and the parameters are views of that buffer: nothing is copied in or out.

Buffers ("slots") are shared by partitions of the same size that are never whole at the same time. Autograd
keeps views of weights between forward and backward (a linear layer saves its transposed weight), so before
the backward of a module its partitions must be in the slots in which its forward found them. They nearly
always are, for a partition takes the slot that it had before if nobody holds it; else it is moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from z3trace.engine.collectives import Communicator, Handle
from z3trace.engine.guard import hide, reveal
from z3trace.engine.layout import PartitionPlan


class State(Enum):
    """SHARDED -> GATHERING (issued) -> GATHERED (waited for) -> SHARDED."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(eq=False)
class Slot:
    """A buffer for one whole partition of `buffer.numel()` elements, and who holds it now."""

    buffer: Tensor
    holder: "ShardedPartition | None" = None


@dataclass(frozen=True)
class Member:
    """A parameter within its partition: elements [offset, offset + numel)."""

    name: str
    parameter: nn.Parameter
    offset: int
    shape: torch.Size
    kind: type[nn.Parameter]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(eq=False)
class ShardedPartition:
    """Parameters that are sharded, gathered and reduced together.

    `shard` is what this rank sends in a gather, in the dtype of the computation; `master` is what the
    optimizer changes, and the same tensor where the dtypes agree.
    """

    plan: PartitionPlan
    members: tuple[Member, ...]
    shard: Tensor
    master: Tensor
    world: int
    state: State = State.SHARDED
    slot: Slot | None = None
    second_shard: Tensor | None = field(default=None, repr=False)
    handle: Handle | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        return sum(member.numel for member in self.members)

    @property
    def shard_numel(self) -> int:
        return self.shard.numel()

    @property
    def padded_numel(self) -> int:
        return self.shard.numel() * self.world

    def begin_gather(self, slot: Slot) -> Tensor:
        """Take the slot and return the buffer to gather into."""
        if self.state is not State.SHARDED:
            raise RuntimeError(
                f"{self.plan.name or 'the root unit'} is {self.state.value}: it cannot be gathered"
            )
        if slot is not self.slot:
            self._bind(slot)
        slot.holder = self
        self.state = State.GATHERING
        return slot.buffer

    def end_gather(self) -> None:
        """Wait for the gather: from here on the parameters can be read."""
        if self.handle is not None:
            self.handle.wait()
        self.state = State.GATHERED
        self.handle = None
        for member in self.members:
            reveal(member.parameter, member.kind)

    def release(self) -> None:
        """Give the slot to others: the parameters can no longer be read."""
        if self.slot is not None:
            self.slot.holder = None
        self.state = State.SHARDED
        for member in self.members:
            hide(member.parameter)

    def move(self, slot: Slot) -> None:
        """Go on living in another slot."""
        old = self.slot
        if old is not None and self.state is not State.SHARDED:
            if self.handle is not None:
                self.handle.wait()
                self.handle = None
            slot.buffer.copy_(old.buffer)
            old.holder, slot.holder = None, self
        self._bind(slot)

    def cut_again(self, comm: Communicator) -> Tensor:
        """A second shard, for a smaller group, of the partition while it is whole."""
        if self.slot is None:
            raise RuntimeError(f"{self.plan.name} was never gathered: there is nothing to cut")
        return self.slot.buffer.view(comm.size, -1)[comm.rank].clone()

    def publish(self) -> None:
        """After the optimizer changed `master`: bring `shard` up to date."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)

    def _bind(self, slot: Slot) -> None:
        self.slot = slot
        for member in self.members:
            reveal(member.parameter, member.kind)
            member.parameter.data = member.view(slot.buffer)
            if self.state is not State.GATHERED:
                hide(member.parameter)


class SlotPool:
    """The buffers, by size. There are as many of a size as were ever held at once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._slots: dict[int, list[Slot]] = {}

    def take(self, partition: ShardedPartition) -> Slot:
        """A slot that nobody holds: the partition's own if possible, for then its views need no change."""
        own = partition.slot
        return own if own is not None and own.holder is None else self._free(partition.padded_numel)

    def settle(self, partition: ShardedPartition, slot: Slot) -> None:
        """Have the partition, gathered or not, live in this slot; who holds it moves out."""
        if slot.holder is not None and slot.holder is not partition:
            slot.holder.move(self._free(partition.padded_numel))
        if partition.slot is not slot:
            partition.move(slot)

    def _free(self, numel: int) -> Slot:
        slots = self._slots.setdefault(numel, [])
        slot = next((slot for slot in slots if slot.holder is None), None)
        if slot is None:
            slot = Slot(torch.zeros(numel, dtype=self._dtype, device=self._device))
            slots.append(slot)
        return slot

    @property
    def numel(self) -> int:
        """Elements of all buffers together."""
        return sum(size * len(slots) for size, slots in self._slots.items())


def cut(
    plan: PartitionPlan,
    parameters: Sequence[nn.Parameter],
    *,
    world: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ShardedPartition:
    """A partition with an empty shard of 1/world of the parameters' elements, rounded up.

    The parameters are not touched yet: see `fill`. Trainable shards are kept in fp32 as well.
    """
    members: list[Member] = []
    offset = 0
    for name, parameter in zip(plan.parameters, parameters, strict=True):
        members.append(Member(name, parameter, offset, parameter.shape, type(parameter)))
        offset += parameter.numel()
    shard = torch.zeros(-(-offset // world), dtype=dtype, device=device)
    master = shard.to(torch.float32) if plan.trainable else shard
    return ShardedPartition(plan, tuple(members), shard, master, world)


@torch.no_grad()
def scatter_weights(partition: ShardedPartition, comm: Communicator, source: int) -> None:
    """Give every rank its shard of the parameters as they are on the rank `source`."""
    shard, device = partition.shard, partition.shard.device
    mine = torch.empty(shard.numel(), dtype=torch.float32, device=device)
    chunks: list[Tensor] | None = None
    if comm.rank == source:
        flat = torch.zeros(partition.padded_numel, dtype=torch.float32, device=device)
        for member in partition.members:
            member.view(flat).copy_(member.parameter)
        chunks = list(flat.chunk(comm.size))
    dist.scatter(mine, chunks, group_src=source, group=comm.group)
    shard.copy_(mine)
    if partition.master is not shard:
        partition.master.copy_(mine)


def take_over(partition: ShardedPartition) -> None:
    """Free the parameters' own memory: from now on they live in the partition."""
    placeholder = torch.zeros((), dtype=partition.shard.dtype, device=partition.shard.device)
    for member in partition.members:
        member.parameter.grad = None
        member.parameter.data = placeholder.expand(member.shape)
        hide(member.parameter)
