"""`initialize` and the engine it returns."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from z3trace.engine import describe, hooks, observe, whole
from z3trace.engine.collectives import Communicator, broadcast_from_zero
from z3trace.engine.config import Config, ZeroConfig, load_config
from z3trace.engine.counter import CollectiveCounter, Progress
from z3trace.engine.executor import Executor
from z3trace.engine.guard import guard
from z3trace.engine.layout import PartitionPlan, sharded_parameters
from z3trace.engine.linear import memory_efficient_linear
from z3trace.engine.optimizer import OptimizerSource, ShardedOptimizer, build_optimizer, group_of
from z3trace.engine.policies import Policy, make_policy
from z3trace.engine.reduce import GradientReducer
from z3trace.engine.registration import check_registration
from z3trace.engine.runtime import Runtime
from z3trace.engine.schedule.interface import Schedule
from z3trace.engine.storage import ShardedPartition, SlotPool, cut, scatter_weights, take_over
from z3trace.engine.world import join_world, world_group
from z3trace.errors import UserError

logger = logging.getLogger("z3trace.engine")


class Engine:
    """A model under ZeRO-3: `loss = engine(batch); engine.backward(loss); engine.step()`.

    `optimizer` is the user's torch optimizer (schedulers may be built on it), `schedule` decides the
    collectives, `counter` counts them.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        comm: Communicator,
        partitions: Mapping[str, ShardedPartition],
        policy: Policy,
        optimizer: ShardedOptimizer,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module = model
        self.config = config
        self.policy = policy
        self.partitions = partitions
        self.device = device
        self.dtype = dtype
        self.comm = comm
        self.call_order: list[str] = []
        self._progress = Progress()
        self.counter = CollectiveCounter(self._progress)
        self._sharded_optimizer = optimizer
        self._reducer = GradientReducer(comm)
        self._slots = SlotPool(dtype, device)
        second = _second_group(config, comm)
        executor = Executor(
            partitions, self._slots, self._reducer, comm, second, self.counter,
            self._progress,
        )  # fmt: skip
        if second is not comm:
            executor.cut_second_shards()
        self._runtime = Runtime(
            policy.schedule, executor, policy.needs, self._progress, config.gradient_accumulation_steps,
            self._tell_step_started,
        )  # fmt: skip
        if policy.exact:
            homes = {id(m.parameter): name for name, p in partitions.items() for m in p.members}
            hooks.hook_modules_exactly(model, policy.needs, self._runtime, homes)
        else:
            hooks.hook_modules(model, policy.needs, self._runtime)
        for name, partition in partitions.items():
            for member in partition.members:
                guard(member.parameter, member.name, partial(self._runtime.fetch, name))
        self._order_hooks = hooks.record_call_order(model, self.call_order)
        self._norm: Tensor | None = None
        self._efficient_linear = policy.exact and config.zero_optimization.memory_efficient_linear
        whole.register(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. With bf16, floating-point tensors among the arguments are cast."""
        if self.dtype is torch.bfloat16:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        with memory_efficient_linear(self._efficient_linear):
            output = self.module(*args, **kwargs)
        if self._order_hooks:
            for handle in self._order_hooks:
                handle.remove()
            self._order_hooks = []
        return output

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> Tensor:
        """Backward of a scalar loss, divided by the accumulation steps; gradients are averaged over ranks."""
        if loss.numel() != 1:
            raise UserError(
                f"backward() was given a loss of shape {tuple(loss.shape)}: reduce it to a scalar"
            )
        if not loss.requires_grad:
            raise UserError(
                "backward() was given a loss without a graph: it was computed under no_grad or detached"
            )
        scaled = loss / self.gradient_accumulation_steps if self.gradient_accumulation_steps > 1 else loss
        with memory_efficient_linear(self._efficient_linear):
            self._runtime.backward(lambda: torch.autograd.backward(scaled, retain_graph=retain_graph))
        return loss

    def step(self) -> None:
        """Step the optimizer when as many backwards were run as are accumulated; else do nothing.

        Raises UserError when no backward was run since the last step.
        """
        if self._progress.micro_batch == 0:
            raise UserError("step() without a backward since the last step: call engine.backward(loss) first")
        if not self.is_gradient_accumulation_boundary():
            return
        self._runtime.step(self._update)
        for observer in observe.observers():
            observer.step_finished(self, self._progress.step - 1)

    def _update(self) -> None:
        self._reducer.finish()
        self._norm = self._sharded_optimizer.step(
            self._reducer,
            self.comm,
            self.counter,
            self.config.gradient_clipping,
            norm=self.policy.exact,  # DeepSpeed always computes it
        )
        for partition in self.partitions.values():
            partition.publish()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._sharded_optimizer.optimizer

    @property
    def schedule(self) -> Schedule:
        return self.policy.schedule

    @property
    def global_steps(self) -> int:
        """Optimizer steps done."""
        return self._progress.step

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps

    @property
    def dead_settings(self) -> tuple[str, ...]:
        """Keys of the configuration that were given and have no effect."""
        return self.config.dead

    @property
    def training(self) -> bool:
        return self.module.training

    def train(self, mode: bool = True) -> "Engine":
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() steps the optimizer."""
        return self._runtime.at_boundary

    def get_global_grad_norm(self) -> Tensor | None:
        """The norm of all gradients at the last step before clipping; None when clipping is off."""
        return self._norm

    def shard_gradient(self, partition: ShardedPartition) -> Tensor | None:
        """This rank's shard of the gradient accumulated so far; None when there is none."""
        self._reducer.finish()
        return self._reducer.gradient(partition)

    def describe(self) -> dict[str, Any]:
        """The engine in JSON's types: world, dtype, settings, modules, units, parameters."""
        return describe.describe(self)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.dtype)
        return value

    def _tell_step_started(self, step: int) -> None:
        for observer in observe.observers():
            observer.step_started(self, step)


def initialize(model: nn.Module, optimizer: OptimizerSource = None, config: Config = None) -> Engine:
    """Shard `model` over the ranks and return the engine that trains it.

    `optimizer` is a torch optimizer class, a factory from parameters to an optimizer, or an optimizer built
    on the model's parameters; without one the configuration's section `optimizer` is used. `config` is a
    mapping with DeepSpeed's keys, the path of a JSON file, or a ZeroConfig. Weights and buffers are those
    of rank 0. The process group is made if there is none, from torchrun's environment or for this process alone.

    Raises UserError for a configuration or optimizer that cannot be used, and on every rank when the ranks
    were given models of different sizes.
    """
    device = join_world(model)
    comm = Communicator(world_group())
    settings = load_config(config, world_size=comm.size, hidden_size=_hidden_size(model))
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    _check_dtypes(model, dtype)
    torch_optimizer = build_optimizer(optimizer, settings.optimizer, model)
    groups = group_of(torch_optimizer)
    policy = make_policy(model, settings, groups, dtype)
    partitions = _shard(model, policy.plans, comm, dtype, device)
    sharded = ShardedOptimizer(torch_optimizer, groups, list(partitions.values()), comm.rank)
    engine = Engine(model, settings, comm, partitions, policy, sharded, device, dtype)
    if settings.dead and comm.rank == 0:
        logger.warning("these settings have no effect in ZeRO stage 3: %s", ", ".join(settings.dead))
    for observer in observe.observers():
        observer.engine_created(engine)
    return engine


def _shard(
    model: nn.Module,
    plans: Sequence[PartitionPlan],
    comm: Communicator,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, ShardedPartition]:
    parameters = sharded_parameters(model)
    partitions = {
        plan.name: cut(
            plan, [parameters[name] for name in plan.parameters], world=comm.size, dtype=dtype, device=device
        )
        for plan in plans
    }
    check_registration(list(partitions.values()), comm)
    for partition in partitions.values():
        scatter_weights(partition, comm, 0)
        take_over(partition)
    _follow_rank_zero(model, comm, dtype, device)
    return partitions


@torch.no_grad()
def _follow_rank_zero(model: nn.Module, comm: Communicator, dtype: torch.dtype, device: torch.device) -> None:
    """Buffers, and parameters that are not sharded, as rank 0 has them; floating buffers in `dtype`."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            kind = dtype if buffer.is_floating_point() and dtype is not torch.float32 else buffer.dtype
            value = buffer.to(device=device, dtype=kind).contiguous()
            broadcast_from_zero(value, comm)
            if value is not buffer:
                setattr(module, name, value)
    sharded = sharded_parameters(model)
    for name, parameter in model.named_parameters():
        if name not in sharded:
            parameter.data = parameter.data.to(device).contiguous()
            broadcast_from_zero(parameter.data, comm)


def _second_group(config: ZeroConfig, comm: Communicator) -> Communicator:
    """The ranks among which this one keeps second shards (zero_hpz_partition_size); all, where it keeps none."""
    size = config.zero_optimization.zero_hpz_partition_size
    if config.z3trace.schedule != "deepspeed" or size <= 1:
        return comm
    if comm.size % size:
        raise UserError(
            f"zero_hpz_partition_size {size} does not divide the {comm.size} ranks: give one that does"
        )
    group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
    return Communicator(group)


def _check_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(f"parameter {name} has no values (meta device): give the model its weights first")
        if parameter.is_complex():
            raise UserError(f"parameter {name} is complex: the engine shards real parameters")
        if parameter.is_floating_point() and dtype is torch.float32 and parameter.dtype is not dtype:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"parameter {name} is {kind}: set bf16.enabled, or call model.float() first")


def _hidden_size(model: nn.Module) -> int | None:
    """What `auto` values depend on, from the configuration that Hugging Face models carry."""
    config = getattr(model, "config", None)
    size = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0])
    return size if isinstance(size, int) and size > 0 else None
