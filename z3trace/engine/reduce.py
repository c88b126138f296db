"""Gradients: collected from the parameters into one buffer, sent, and added to the shard's gradient.

A reduction is issued and left alone; it is finished when its buffer is needed again or the optimizer steps.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from z3trace.engine.collectives import Communicator, Handle, add_received, reduce_scatter
from z3trace.engine.ranges import labelled
from z3trace.engine.storage import ShardedPartition

IN_FLIGHT = 2
"""Reductions of one size that may be under way: one is sent while the next is collected."""


@dataclass(eq=False)
class _Lane:
    """Buffers for one reduction of `full.numel()` elements."""

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


class GradientReducer:
    """Averages gradients over the ranks into one flat gradient per partition, in the master's dtype."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lanes: dict[int, deque[_Lane]] = {}
        self._gradients: dict[str, Tensor] = {}
        self._fresh: set[str] = set()

    def reduce(self, partition: ShardedPartition) -> Handle:
        """Collect the gradients of the partition's parameters, clear them there, and send them off.

        A parameter without a gradient counts as zeros.
        """
        lane = self._lane(partition)
        self._collect(partition, lane)
        lane.partition = partition
        lane.handle = reduce_scatter(lane.received, lane.full, self._comm)
        return lane.handle

    def finish(self) -> None:
        """Finish everything that was issued."""
        for lanes in self._lanes.values():
            for lane in lanes:
                self._finish(lane)

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
        self._finish(lane)
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

    def _finish(self, lane: _Lane) -> None:
        partition, handle = lane.partition, lane.handle
        if partition is None or handle is None:
            return
        name = partition.plan.name
        with labelled("reduce_wait", unit=partition.plan.unit):
            handle.wait()
        total = self._gradients.get(name)
        if total is None:
            total = self._gradients[name] = torch.empty_like(partition.master)
        add_received(total, lane.received, self._comm, first=name not in self._fresh)
        self._fresh.add(name)
        lane.partition = lane.handle = None
