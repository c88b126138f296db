"""Whole parameters and gradients outside a forward: reading them, and changing parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from z3trace.engine.collectives import all_gather
from z3trace.engine.guard import hide, reveal
from z3trace.engine.schedule.interface import Collective, Phase, Reason
from z3trace.engine.storage import ShardedPartition, State, scatter_weights
from z3trace.errors import UserError

if TYPE_CHECKING:
    from z3trace.engine.engine import Engine

_engines: WeakValueDictionary[int, "Engine"] = WeakValueDictionary()


def register(engine: "Engine") -> None:
    """Let `gathered` find the engine by its model."""
    _engines[id(engine.module)] = engine


@contextmanager
def gathered(source: "Engine | nn.Module", modifier_rank: int | None = None) -> Iterator[nn.Module]:
    """The model with all its parameters whole and readable; all ranks must enter and leave together.

    With `modifier_rank`, what that rank changed in place is kept on all ranks; without, changes are lost.
    Takes as much memory as the whole model. Raises UserError for a model that no engine has.
    """
    engine = _engines.get(id(source)) if isinstance(source, nn.Module) else source
    if engine is None:
        raise UserError("gathered() was given a model that was not passed to initialize()")
    partitions = list(engine.partitions.values())
    before = [_reveal(partition, engine) for partition in partitions]
    try:
        yield engine.module
        if modifier_rank is not None:
            for partition in partitions:
                scatter_weights(partition, engine.comm, modifier_rank)
    finally:
        for partition, views in zip(partitions, before, strict=True):
            for member, view in zip(partition.members, views, strict=True):
                reveal(member.parameter, member.kind)
                member.parameter.data = view
                if partition.state is not State.GATHERED:
                    hide(member.parameter)


def full_gradients(engine: "Engine") -> dict[str, Tensor]:
    """The gradients that the next optimizer step will use, before clipping, by parameter name; collective.

    Averaged over the ranks, summed over the micro-batches so far; a parameter without one is left out.
    Takes as much memory as all gradients.
    """
    gradients: dict[str, Tensor] = {}
    for partition in engine.partitions.values():
        shard = engine.shard_gradient(partition)
        if shard is not None:
            whole = _gather(shard, partition, engine)
            gradients |= {member.name: member.view(whole) for member in partition.members}
    return gradients


def _reveal(partition: ShardedPartition, engine: "Engine") -> list[Tensor]:
    """Point the parameters at a buffer of their own and return what they pointed at."""
    buffer = _gather(partition.shard, partition, engine)
    before = []
    for member in partition.members:
        reveal(member.parameter, member.kind)
        before.append(member.parameter.data)
        member.parameter.data = member.view(buffer)
    return before


def _gather(shard: Tensor, partition: ShardedPartition, engine: "Engine") -> Tensor:
    whole = torch.empty(partition.padded_numel, dtype=shard.dtype, device=shard.device)
    size = whole.numel() * whole.element_size()
    engine.comm.next_sequence()
    engine.counter.add(
        Collective.ALL_GATHER.value,
        size,
        phase=Phase.OTHER,
        unit=partition.plan.unit,
        module="",
        reason=Reason.DEMAND.value,
    )
    all_gather(whole, shard, engine.comm).wait()
    return whole
