"""Gradients: collected from the parameters into one buffer, sent, and added to the shard's gradient.

A reduction is issued and left alone; it is finished when its buffer is needed again or the optimizer steps.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from z3trace.engine.coalesced import pack_gradients
from z3trace.engine.collectives import Communicator, Handle, all_reduce_sum, received_mean, reduce_scatter
from z3trace.engine.ranges import labelled
from z3trace.engine.schedule.interface import Collective
from z3trace.engine.storage import ShardedPartition

IN_FLIGHT = 2
"""Reductions (of one size) that may be under way: one is sent while the next is collected."""


@dataclass(eq=False)
class _Lane:
    """Buffers for reductions of one partition of `full.numel()` elements, one at a time."""

    full: Tensor
    received: Tensor
    partition: ShardedPartition | None = None
    handle: Handle | None = None
    views: dict[str, list[Tensor]] = field(default_factory=dict)

    def views_of(self, partition: ShardedPartition) -> list[Tensor]:
        found = self.views.get(partition.plan.name)
        if found is None:
            found = [member.view(self.full) for member in partition.members]
            self.views[partition.plan.name] = found
        return found


@dataclass(eq=False)
class _Bucket:
    """One reduction of several partitions. Whole: an all-reduce, of which every rank takes its shards."""

    partitions: Sequence[ShardedPartition]
    received: Tensor
    handle: Handle
    whole: bool


class GradientReducer:
    """Averages gradients over the ranks into one flat gradient per partition, in the master's dtype."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lanes: dict[int, deque[_Lane]] = {}
        self._buckets: deque[_Bucket] = deque()
        self._gradients: dict[str, Tensor] = {}
        self._fresh: set[str] = set()

    def reduce(self, partitions: Sequence[ShardedPartition], collective: Collective) -> None:
        """Collect the gradients of the partitions' parameters, clear them there, and send them off.

        A parameter without a gradient counts as zeros. Several partitions are of one parameter each.
        """
        if len(partitions) > 1 or collective is Collective.ALL_REDUCE:
            self._reduce_bucket(partitions, whole=collective is Collective.ALL_REDUCE)
            return
        lane = self._lane(partitions[0])
        self._collect(partitions[0], lane)
        lane.partition = partitions[0]
        lane.handle = reduce_scatter(lane.received, lane.full, self._comm)

    def finish(self) -> None:
        """Finish everything that was issued."""
        for lanes in self._lanes.values():
            for lane in lanes:
                self._finish_lane(lane)
        while self._buckets:
            self._finish_bucket(self._buckets.popleft())

    def gradient(self, partition: ShardedPartition) -> Tensor | None:
        """The accumulated gradient of the shard; None when none was reduced since `clear`."""
        name = partition.plan.name
        return self._gradients[name] if name in self._fresh else None

    def clear(self) -> None:
        """The gradients are used up: the next reduction of each partition overwrites."""
        self._fresh.clear()

    def _lane(self, partition: ShardedPartition) -> _Lane:
        lanes = self._lanes.setdefault(partition.padded_numel, deque())
        if len(lanes) < IN_FLIGHT:
            like = partition.shard
            full = torch.zeros(partition.padded_numel, dtype=like.dtype, device=like.device)
            lanes.append(_Lane(full, torch.empty_like(full)))
            return lanes[-1]
        lane = lanes[0]
        lanes.rotate(-1)
        self._finish_lane(lane)
        return lane

    def _collect(self, partition: ShardedPartition, lane: _Lane) -> None:
        targets: list[Tensor] = []
        gradients: list[Tensor] = []
        for member, view in zip(partition.members, lane.views_of(partition), strict=True):
            gradient = member.parameter.grad
            if gradient is None:
                view.zero_()
            else:
                targets.append(view)
                gradients.append(gradient)
                member.parameter.grad = None
        if targets:
            torch._foreach_copy_(targets, gradients)
        lane.full[partition.numel :].zero_()

    def _finish_lane(self, lane: _Lane) -> None:
        partition, handle = lane.partition, lane.handle
        if partition is None or handle is None:
            return
        self._wait(handle, partition.plan.unit)
        self._add(partition, received_mean(lane.received, self._comm))
        lane.partition = lane.handle = None

    def _reduce_bucket(self, partitions: Sequence[ShardedPartition], *, whole: bool) -> None:
        if len(self._buckets) == IN_FLIGHT:
            self._finish_bucket(self._buckets.popleft())
        size = sum(p.padded_numel for p in partitions) * partitions[0].shard.element_size()
        with labelled("copy_in", bytes=size, params=len(partitions)):
            packed = pack_gradients(partitions, 1 if whole else self._comm.size)
        if whole:
            received, handle = packed, all_reduce_sum(packed, self._comm)
        else:
            received = torch.empty_like(packed)
            handle = reduce_scatter(received.view(-1), packed.view(-1), self._comm)
        self._buckets.append(_Bucket(partitions, received, handle, whole))

    def _finish_bucket(self, bucket: _Bucket) -> None:
        self._wait(bucket.handle, bucket.partitions[0].plan.unit)
        for partition, parts in zip(bucket.partitions, self._shards(bucket), strict=True):
            self._add(partition, parts)

    def _shards(self, bucket: _Bucket) -> Iterator[list[tuple[Tensor, float]]]:
        """Per partition, what sums up to this rank's shard of its gradient."""
        if not bucket.whole:
            terms = received_mean(bucket.received.view(-1), self._comm)
            split = [
                [(t, w) for t in torch.split(row, [p.shard_numel for p in bucket.partitions])]
                for row, w in terms
            ]
            yield from map(list, zip(*split, strict=True))
            return
        numels = [p.numel for p in bucket.partitions]
        for partition, whole in zip(
            bucket.partitions, torch.split(bucket.received.view(-1), numels), strict=True
        ):
            own = whole[self._comm.rank * partition.shard_numel :][: partition.shard_numel]
            padding = (0, partition.shard_numel - own.numel())
            yield [(torch.nn.functional.pad(own, padding), 1.0 / self._comm.size)]

    def _add(self, partition: ShardedPartition, terms: Sequence[tuple[Tensor, float]]) -> None:
        """Add weighted terms (shard_numel elements each) to the partition's gradient."""
        name = partition.plan.name
        total = self._gradients.get(name)
        if total is None:
            total = self._gradients[name] = torch.empty_like(partition.master)
        for term, weight in terms:
            if name in self._fresh:
                total.add_(term, alpha=weight)
            elif term.dtype == total.dtype:
                torch.mul(term, weight, out=total)
            else:
                total.copy_(term).mul_(weight)
            self._fresh.add(name)

    @staticmethod
    def _wait(handle: Handle, unit: str) -> None:
        with labelled("reduce_wait", unit=unit):
            handle.wait()
