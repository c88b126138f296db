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


class Collective(str, Enum):
    """The operation that carries out an action."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


SECONDARY_GROUP = "secondary"
"""The group within which a second shard is kept (DeepSpeed's hpZ)."""


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

    `class_name` is dotted where the module of the class is known ("package.module.Class"), "" where the
    class is not. `partitions` are those its own parameters live in (not its children's), in registration
    order, without duplicates; `children` are paths of direct children in registration order.
    """

    path: str
    class_name: str
    partitions: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """Everything about the model that a schedule may use.

    Modules in the order of `named_modules()`, root first. The order of `partitions` is the one in which they
    were sharded: gathers and prefetches go by it.
    """

    modules: tuple[Module, ...]
    partitions: tuple[Partition, ...]


@dataclass(frozen=True)
class Gather:
    """Issue one collective that makes these partitions whole, without waiting for it.

    `group` is SECONDARY_GROUP where second shards are gathered, else "": the partitions' own group. `dtype`
    is the one in which it is communicated, "" as stored. An all-reduce adds up buffers that are zero outside
    the own shard.
    """

    partitions: tuple[str, ...]
    module: str  # where it is issued
    phase: Phase
    reason: Reason
    group: str = ""
    collective: Collective = Collective.ALL_GATHER
    dtype: str = ""


@dataclass(frozen=True)
class Wait:
    """Wait until these partitions, gathered earlier, can be used."""

    partitions: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True)
class Release:
    """Free the gathered form of these partitions; only the shard stays.

    Where second shards are kept (hpZ), the executor makes one now unless the partition has one.
    """

    partitions: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True)
class Reduce:
    """Issue one collective that averages the gradients of these partitions and leaves each rank its shard.

    `dtype` is the one in which it is communicated, "" the gradients' own.
    """

    partitions: tuple[str, ...]
    module: str = ""
    collective: Collective = Collective.REDUCE_SCATTER
    dtype: str = ""


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

    `module` is a path. Every module that is called is reported; a schedule ignores those it does not hook
    (below a leaf). `pre_backward(m)` comes once for each output tensor of a call whose gradient arrives,
    before m's own backward runs; `post_backward(m)` once per call, when the gradients of all positional
    tensor inputs that require one are there. Either may be missing (no such output or input):
    `backward_ends` settles what is left. `recompute` is true when activation checkpointing runs a forward
    inside backward; a recompute that stops early reports no `post_forward` for the modules it leaves.
    """

    def forward_begins(self, micro_batch: MicroBatch) -> Actions: ...

    def pre_forward(self, module: str, *, recompute: bool = False) -> Actions: ...

    def parameter_read(self, module: str, partition: str) -> Actions:
        """`module`, the innermost one whose forward runs, is about to read a parameter of another module."""
        ...

    def parameter_returned(self, module: str, partition: str) -> Actions:
        """The forward of `module` returns a parameter itself; comes before its `post_forward`."""
        ...

    def post_forward(self, module: str, *, recompute: bool = False, differentiable: bool = True) -> Actions:
        """`differentiable`: an output requires a gradient, so a `pre_backward` may come."""
        ...

    def forward_ends(self) -> Actions: ...

    def pre_backward(self, module: str, *, call: int | None = None) -> Actions:
        """`call`: which forward of the module in its pass, counted from 0, where the caller knows it."""
        ...

    def gradient_ready(self, partition: str) -> Actions:
        """Every trainable parameter of the partition has its gradient of this micro-batch."""
        ...

    def post_backward(self, module: str) -> Actions: ...

    def backward_ends(self) -> Actions: ...

    def step_begins(self) -> Actions:
        """The optimizer is about to change the shards: whatever was gathered is stale afterwards."""
        ...

    def step_ends(self, *, skipped: bool = False) -> Actions:
        """The optimizer is done (post-step gathers); `skipped` when it changed nothing (fp16 overflow)."""
        ...
