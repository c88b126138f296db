"""The one check that all ranks hold shards of the same sizes, made when a model is registered.

The sizes compared are those of the shards that exist, not sizes computed from shapes: only so can a wrong
shard be noticed. Gathers can then rely on fixed counts and exchange nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from z3trace.engine.collectives import Communicator
from z3trace.engine.storage import ShardedPartition
from z3trace.errors import UserError


def check_registration(partitions: Sequence[ShardedPartition], comm: Communicator) -> None:
    """Raise UserError on every rank when the ranks disagree on a unit, a parameter or a shard's size."""
    mine = {
        _unit(p): {"shard": p.shard.numel(), "parameters": {m.name: tuple(m.shape) for m in p.members}}
        for p in partitions
    }
    everyone: list[Any] = [None] * comm.size
    dist.all_gather_object(everyone, mine, group=comm.group)
    for unit in dict.fromkeys(unit for theirs in everyone for unit in theirs):
        _compare(f"unit {unit}", [unit in theirs or None for theirs in everyone])
        parameters = [theirs[unit]["parameters"] for theirs in everyone]
        for name in dict.fromkeys(name for theirs in parameters for name in theirs):
            _compare(f"parameter {name} of unit {unit}: shapes", [theirs.get(name) for theirs in parameters])
        _compare(f"unit {unit}: elements of the shard", [theirs[unit]["shard"] for theirs in everyone])


def _unit(partition: ShardedPartition) -> str:
    return partition.plan.name or "(root)"


def _compare(what: str, values: Sequence[Any]) -> None:
    if len(set(values)) > 1:
        seen = ", ".join(f"rank {rank} {'has none' if v is None else v}" for rank, v in enumerate(values))
        raise UserError(
            f"ranks were given different models: {what} differ: {seen}; build the same model on all ranks"
        )
