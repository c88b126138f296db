"""What a schedule is told and what it answers: the border between deciding and doing.

A schedule is a state machine without torch. Whoever drives it reports what happens in the training
(a module is about to run, a gradient is complete, ...) and carries out the actions it answers with, in
their order. The engine drives it with real modules and carries actions out as collectives; the simulator
drives the same code with a clock.

Units: every size here is in *elements*, as DeepSpeed's knobs are; the executor knows dtypes and bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Phase(str, Enum):
    """The part of a training step in which something happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class Reason(str, Enum):
    """Why a gather is issued."""

    DEMAND = "demand"  # needed now: whoever issues it will wait for it at once
    PREFETCH = "prefetch"  # needed later
    POST_STEP = "post_step"  # the optimizer changed it and it must stay whole
    RECOMPUTE = "recompute"  # needed now, by activation checkpointing's second forward


@dataclass(frozen=True)
class Partition:
    """Something sharded and gathered as a whole: one parameter (DeepSpeed) or one flat unit (layer-wise).

    `parameters` are fully qualified names as `named_parameters()` gives them, in storage order. `numel` is
    without padding. `group` names the process group that shares it ("" = all ranks).
    """

    name: str
    parameters: tuple[str, ...]
    numel: int
    dtype: str = "float32"
    trainable: bool = True
    group: str = ""


@dataclass(frozen=True)
class Module:
    """One module of the model: its path ("" = the model itself), class and what it owns.

    `partitions` are those its own parameters live in (not its children's), in registration order, without
    duplicates; `children` are paths of direct children in registration order.
    """

    path: str
    class_name: str
    partitions: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """Everything about the model that a schedule may use. Modules in registration order, root first."""

    modules: tuple[Module, ...]
    partitions: tuple[Partition, ...]


@dataclass(frozen=True)
class Gather:
    """Issue one all-gather (exactly one collective) of these partitions, without waiting for it."""

    partitions: tuple[str, ...]
    module: str  # where it is issued
    phase: Phase
    reason: Reason


@dataclass(frozen=True)
class Wait:
    """Wait until these partitions, gathered earlier, can be used."""

    partitions: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True)
class Release:
    """Free the gathered form of these partitions; only the shard stays."""

    partitions: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True)
class Reduce:
    """Issue one reduce-scatter (exactly one collective) of the gradients of these partitions."""

    partitions: tuple[str, ...]
    module: str = ""


Action = Gather | Wait | Release | Reduce
Actions = Sequence[Action]


@dataclass(frozen=True)
class MicroBatch:
    """What is known when a forward of the whole model begins."""

    grad_enabled: bool = True  # False for evaluation: no backward will follow
    boundary: bool = True  # the optimizer steps after this micro-batch's backward
    index: int = field(default=0, compare=False)


class Schedule(Protocol):
    """The events, in the order in which they happen. Each answers with actions to carry out in order.

    `module` is a path. `pre_backward(m)` comes when the gradient of m's output is there, before m's own
    backward runs; `post_backward(m)` when the gradient of m's input is there. Either may be missing for a
    module (no grad-requiring output or input): `backward_ends` settles what is left. `recompute` is true
    when activation checkpointing runs a forward inside backward.
    """

    def forward_begins(self, micro_batch: MicroBatch) -> Actions: ...

    def pre_forward(self, module: str, *, recompute: bool = False) -> Actions: ...

    def post_forward(self, module: str, *, recompute: bool = False) -> Actions: ...

    def forward_ends(self) -> Actions: ...

    def pre_backward(self, module: str) -> Actions: ...

    def post_backward(self, module: str) -> Actions: ...

    def gradient_ready(self, partition: str) -> Actions:
        """Every trainable parameter of the partition has its gradient of this micro-batch."""
        ...

    def backward_ends(self) -> Actions: ...

    def step_begins(self) -> Actions:
        """The optimizer is about to change the shards: whatever was gathered is stale afterwards."""
        ...

    def step_ends(self) -> Actions:
        """The optimizer is done (post-step gathers)."""
        ...
