"""Driving a schedule through training, and predicting a run's collectives from a model and its settings."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .calls import Event, EventKind, backward_events, call_tree, forward_events
from .deepspeed import DeepSpeedSchedule
from .interface import (
    SECONDARY_GROUP,
    Action,
    Actions,
    Collective,
    Gather,
    MicroBatch,
    Partition,
    Phase,
    Reduce,
    Schedule,
)
from .model_file import DTYPE_BYTES, Description

GRADIENT_NORM_BYTES = 8  # one float64


@dataclass(frozen=True)
class Pass:
    """One forward of the whole model and, unless it is an evaluation, the backward after it."""

    micro_batch: MicroBatch
    forward: Sequence[Event]
    backward: Sequence[Event] = ()


@dataclass(frozen=True)
class OptimizerStep:
    """The optimizer steps; `skipped` when it finds an overflow and changes nothing."""

    skipped: bool = False


@dataclass(frozen=True)
class Answer:
    """An action of a schedule and where it was given; `step` counts the optimizer steps done before."""

    step: int
    micro_batch: int
    phase: Phase
    action: Action


@dataclass(frozen=True)
class Prediction:
    """One collective of a run.

    `numel` is without padding. `bytes`, padding included, are an all-gather's output, a reduce-scatter's
    input, an all-reduce's buffer. `reason` is a `Reason`'s value, "gradient" or "gradient_norm".
    """

    step: int
    micro_batch: int
    phase: Phase
    kind: Collective
    module: str
    reason: str
    partitions: tuple[str, ...]
    numel: int
    bytes: int
    group: str
    group_size: int


def tell(schedule: Schedule, event: Event) -> Actions:
    """Report one event inside a pass."""
    match event.kind:
        case EventKind.PRE_FORWARD:
            return schedule.pre_forward(event.module, recompute=event.recompute)
        case EventKind.POST_FORWARD:
            return schedule.post_forward(event.module, recompute=event.recompute)
        case EventKind.PARAMETER_READ:
            return schedule.parameter_read(event.module, event.partition)
        case EventKind.PARAMETER_RETURNED:
            return schedule.parameter_returned(event.module, event.partition)
        case EventKind.PRE_BACKWARD:
            return schedule.pre_backward(event.module)
        case EventKind.GRADIENT_READY:
            return schedule.gradient_ready(event.partition)
        case EventKind.POST_BACKWARD:
            return schedule.post_backward(event.module)


def drive(schedule: Schedule, training: Iterable[Pass | OptimizerStep]) -> Iterator[Answer]:
    """Report a whole training to a schedule and yield what it answers."""
    for step, micro_batch, part in _located(training):
        for phase, action in _run(schedule, part):
            yield Answer(step, micro_batch, phase, action)


def _located(
    training: Iterable[Pass | OptimizerStep],
) -> Iterator[tuple[int, int, Pass | OptimizerStep]]:
    step = micro_batch = 0
    for part in training:
        if isinstance(part, Pass):
            micro_batch = part.micro_batch.index
        yield step, micro_batch, part
        step += isinstance(part, OptimizerStep)


def _run(schedule: Schedule, part: Pass | OptimizerStep) -> Iterator[tuple[Phase, Action]]:
    def answers(phase: Phase, actions: Actions) -> Iterator[tuple[Phase, Action]]:
        return ((phase, action) for action in actions)

    if isinstance(part, OptimizerStep):
        yield from answers(Phase.OPTIMIZER, schedule.step_begins())
        yield from answers(Phase.OPTIMIZER, schedule.step_ends(skipped=part.skipped))
        return
    yield from answers(Phase.FORWARD, schedule.forward_begins(part.micro_batch))
    for event in part.forward:
        yield from answers(Phase.FORWARD, tell(schedule, event))
    yield from answers(Phase.FORWARD, schedule.forward_ends())
    if part.micro_batch.grad_enabled:
        for event in part.backward:
            yield from answers(Phase.BACKWARD, tell(schedule, event))
        yield from answers(Phase.BACKWARD, schedule.backward_ends())


def training_of(
    description: Description, steps: int, evaluate_before: Collection[int] = ()
) -> Iterator[Pass | OptimizerStep]:
    """The passes of a static model: each step's micro-batches, and an evaluation before the steps named."""
    call = call_tree(description.model, description.facts)
    forward = forward_events(call)
    backward = backward_events(description.model, call, description.facts)
    last = description.gradient_accumulation_steps - 1
    for step in range(steps):
        if step in evaluate_before:
            yield Pass(MicroBatch(grad_enabled=False), forward)
        for index in range(last + 1):
            yield Pass(MicroBatch(True, index == last, index), forward, backward)
        yield OptimizerStep()


def predict(
    description: Description, steps: int, *, evaluate_before: Collection[int] = ()
) -> Iterator[Prediction]:
    """Every collective of the first `steps` optimizer steps under DeepSpeed's policy.

    In the first micro-batch the order of modules is recorded: expect the second one to be the first that is
    like all later ones. Groups of one rank communicate nothing and are left out. The optimizer is taken to
    have one parameter group. Of step() only the norm and the persistent parameters are predicted: fp16's
    overflow check is one more small all-reduce.
    """
    schedule = DeepSpeedSchedule(
        description.model,
        description.settings,
        leaves=description.leaves,
        leaves_after=description.leaves_after,
        autocast_dtypes=description.autocast_dtypes,
    )
    sizes = _Sizes(description)
    for step, micro_batch, part in _located(training_of(description, steps, evaluate_before)):
        if isinstance(part, OptimizerStep):
            yield from sizes.norms(step, micro_batch)
        for phase, action in _run(schedule, part):
            if isinstance(action, (Gather, Reduce)):
                yield from sizes.collective(Answer(step, micro_batch, phase, action), action)


class _Sizes:
    """Bytes and group sizes of a description's collectives."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._partitions = {entry.name: entry for entry in description.model.partitions}

    def collective(self, answer: Answer, action: Gather | Reduce) -> Iterator[Prediction]:
        parts = [self._partitions[name] for name in action.partitions]
        second = isinstance(action, Gather) and action.group == SECONDARY_GROUP
        group = SECONDARY_GROUP if second else parts[0].group
        if self._size(group) == 1:
            return
        unpadded = isinstance(action, Reduce) and action.collective is Collective.ALL_REDUCE
        yield Prediction(
            answer.step,
            answer.micro_batch,
            answer.phase,
            action.collective,
            action.module,
            action.reason.value if isinstance(action, Gather) else "gradient",
            action.partitions,
            sum(part.numel for part in parts),
            sum(
                (part.numel if unpadded else self._padded(part)) * DTYPE_BYTES[action.dtype or part.dtype]
                for part in parts
            ),
            group,
            self._size(group),
        )

    def norms(self, step: int, micro_batch: int) -> Iterator[Prediction]:
        """The gradient norm: one scalar all-reduce for each of the optimizer's sub-groups.

        Trainable parameters of one process group form a sub-group until their shards reach `sub_group_size`.
        """
        groups: dict[str, list[Partition]] = {}
        for part in self._partitions.values():
            if part.trainable:
                groups.setdefault(part.group, []).append(part)
        for group, parts in groups.items():
            size = self._size(group)
            shards = [self._padded(part) // size for part in parts]
            for _ in range(_sub_groups(shards, self._description.settings.sub_group_size) if size > 1 else 0):
                yield Prediction(
                    step,
                    micro_batch,
                    Phase.OPTIMIZER,
                    Collective.ALL_REDUCE,
                    "",
                    "gradient_norm",
                    (),
                    1,
                    GRADIENT_NORM_BYTES,
                    group,
                    size,
                )

    def _size(self, group: str) -> int:
        if group == SECONDARY_GROUP:
            return self._description.settings.zero_hpz_partition_size
        return self._description.groups.get(group, self._description.world_size)

    def _padded(self, part: Partition) -> int:
        """A parameter is padded to a multiple of its group's size, also where a second shard is gathered."""
        size = self._description.groups.get(part.group, self._description.world_size)
        return -(-part.numel // size) * size


def _sub_groups(shards: Sequence[int], limit: int) -> int:
    if sum(shards) <= limit:
        return 1
    count = filled = 0
    for number, shard in enumerate(shards, start=1):
        filled += shard
        if filled >= limit or number == len(shards):
            count, filled = count + 1, 0
    return count
