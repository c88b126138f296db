"""The user's optimizer, made to work on the flat shards.

The optimizer object is kept, with its class, hyper-parameters and groups, and so are schedulers built on it;
only its parameters are exchanged for ranges of the shards. That is right for optimizers that treat every
element alike, which are all of torch.optim but those refused here.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from z3trace.engine.collectives import Communicator, all_reduce_sum
from z3trace.engine.config import OptimizerSettings
from z3trace.engine.counter import CollectiveCounter
from z3trace.engine.reduce import GradientReducer
from z3trace.engine.schedule.interface import Collective, Phase
from z3trace.engine.storage import ShardedPartition
from z3trace.errors import UserError

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OptimizerSource = torch.optim.Optimizer | type[torch.optim.Optimizer] | Factory | None

# These look at whole matrices, or at all parameters at once.
_NOT_ELEMENTWISE = frozenset({"LBFGS", "Adafactor", "Muon", "SparseAdam"})


def build_optimizer(
    source: OptimizerSource, settings: OptimizerSettings | None, model: nn.Module
) -> torch.optim.Optimizer:
    """The optimizer on the model's own parameters. A class is made with its defaults.

    Raises UserError when there is none, when it has state already, or when it is not element-wise.
    """
    if source is None:
        if settings is None:
            raise UserError(
                "initialize() needs an optimizer: give a class, a factory, an optimizer, or the section "
                "'optimizer' of the configuration"
            )
        source = _from_settings(settings)
    if isinstance(source, torch.optim.Optimizer):
        optimizer = source
    else:
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise UserError(
                "initialize(): no parameter of the model requires a gradient: there is nothing to train"
            )
        optimizer = cast(Factory, source)(trainable)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"the optimizer factory returned {type(optimizer).__name__}: return a torch optimizer"
            )
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise UserError("the optimizer has state already: call initialize() before its first step")
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & _NOT_ELEMENTWISE:
        raise UserError(
            f"{type(optimizer).__name__} does not work element by element, and shards are flat: use another optimizer"
        )
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            "the optimizer holds parameters that are not the model's: build it on model.parameters()"
        )
    return optimizer


def _from_settings(settings: OptimizerSettings) -> Factory:
    kind = getattr(torch.optim, settings.type, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError(
            f"optimizer.type {settings.type!r} is no class of torch.optim: give for example AdamW"
        )

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return kind(parameters, **settings.params)
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer.params: {error}") from error

    return build


def group_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The index of the optimizer's group by the id of the parameter."""
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


class ShardedOptimizer:
    """The optimizer on ranges of the master shards. `groups` is what `group_of` gave for it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Mapping[int, int],
        partitions: Sequence[ShardedPartition],
        rank: int,
    ) -> None:
        self.optimizer = optimizer
        self._ranges: list[tuple[ShardedPartition, nn.Parameter, slice]] = []
        shards: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for partition in partitions:
            if partition.plan.trainable:
                for index, part in _group_slices(partition, groups, rank):
                    shard = nn.Parameter(partition.master[part])
                    self._ranges.append((partition, shard, part))
                    shards[index].append(shard)
        for group, parameters in zip(optimizer.param_groups, shards, strict=True):
            group["params"] = parameters
        if optimizer.state:
            _initialize_again(optimizer)

    def step(
        self,
        reducer: GradientReducer,
        comm: Communicator,
        counter: CollectiveCounter,
        clip: float,
        *,
        norm: bool,
    ) -> Tensor | None:
        """Step on the reduced gradients; what was not reduced counts as zeros.

        With `norm`, the norm of all gradients before clipping is returned (a scalar, the same on all ranks);
        with `clip` > 0 gradients are scaled down to it.
        """
        gradients: list[Tensor] = []
        for partition, shard, part in self._ranges:
            total = reducer.gradient(partition)
            shard.grad = torch.zeros_like(shard) if total is None else total[part]
            gradients.append(shard.grad)
        total_norm = _norm(gradients, comm, counter) if norm or clip > 0 else None
        if total_norm is not None and clip > 0:
            # As torch.nn.utils.clip_grad_norm_ does it, and without asking the device for the value.
            torch._foreach_mul_(gradients, (clip / (total_norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        for _, shard, _ in self._ranges:
            shard.grad = None
        reducer.clear()
        return total_norm


def _group_slices(
    partition: ShardedPartition, groups: Mapping[int, int], rank: int
) -> Iterable[tuple[int, slice]]:
    """Per group of the optimizer, the part of this rank's shard that it owns. Members lie in group order."""
    low = rank * partition.shard_numel
    high = low + partition.shard_numel
    bounds: dict[int, tuple[int, int]] = {}
    for member in partition.members:
        group = groups.get(id(member.parameter), -1)
        start, _ = bounds.get(group, (member.offset, 0))
        bounds[group] = (start, member.offset + member.numel)
    for group, (start, end) in bounds.items():
        if group >= 0:
            first = max(start, low)
            yield group, slice(first - low, max(min(end, high), first) - low)


def _initialize_again(optimizer: torch.optim.Optimizer) -> None:
    """For optimizers that make their state at once (Adagrad): on the exchanged parameters."""
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    optimizer.state.clear()
    type(optimizer).__init__(optimizer, optimizer.param_groups, **arguments)


def _norm(gradients: Sequence[Tensor], comm: Communicator, counter: CollectiveCounter) -> Tensor:
    norms = torch._foreach_norm(list(gradients))
    square = torch.stack(norms).to(torch.float64).square().sum()
    comm.next_sequence()
    handle = all_reduce_sum(square, comm)
    counter.add(
        Collective.ALL_REDUCE.value,
        square.element_size(),
        phase=Phase.OPTIMIZER,
        unit="",
        module="",
        reason="gradient_norm",
    )
    handle.wait()
    return square.sqrt().to(torch.float32)
