"""Tells the schedule what happens in the training, and has its answers carried out."""

from collections.abc import Callable, Iterable

import torch

from z3trace.engine.counter import Progress
from z3trace.engine.executor import Executor
from z3trace.engine.ranges import OpenRanges, labelled
from z3trace.engine.schedule.interface import Actions, MicroBatch, Phase, Schedule
from z3trace.engine.storage import ShardedPartition, unpin

ROOT = ""


class Runtime:
    """The state of one training pass: forward, backward, step. Hooks report to it by module path."""

    def __init__(
        self,
        schedule: Schedule,
        executor: Executor,
        partitions: Iterable[ShardedPartition],
        progress: Progress,
        accumulation_steps: int,
        on_step_started: Callable[[int], None],
    ) -> None:
        self._schedule = schedule
        self._executor = executor
        self._partitions = tuple(partitions)
        self._progress = progress
        self._accumulation_steps = accumulation_steps
        self._on_step_started = on_step_started
        self._step_started = False
        self._forwards = OpenRanges("forward", Phase.FORWARD.value)
        self._backwards = OpenRanges("backward", Phase.BACKWARD.value)
        self._graphs = 0
        self._running: list[str] = []
        self.backwards_begun = 0

    # Forward

    def pre_forward(self, module: str) -> None:
        """The module's forward is about to run."""
        self._running.append(module)
        if self._progress.phase is Phase.BACKWARD:
            with labelled("fetch", module=module, phase=Phase.BACKWARD.value):
                self._executor.run(self._schedule.pre_forward(module, recompute=True))
            return
        if module == ROOT:
            self._begin_forward()
        self._forwards.begin(module)
        with labelled("fetch", module=module, phase=Phase.FORWARD.value):
            self._executor.run(self._schedule.pre_forward(module))

    def post_forward(self, module: str, *, differentiable: bool) -> None:
        """The module's forward is over (perhaps by an exception); `differentiable`: an output needs a gradient."""
        self._running.pop()
        if self._progress.phase is Phase.BACKWARD:
            self._executor.run(
                self._schedule.post_forward(module, recompute=True, differentiable=differentiable)
            )
            return
        self._executor.run(self._schedule.post_forward(module, differentiable=differentiable))
        self._forwards.end(module)
        if module == ROOT:
            self._executor.run(self._schedule.forward_ends())
            self._executor.pin = False
            self._progress.phase = Phase.OTHER

    def _begin_forward(self) -> None:
        grad = torch.is_grad_enabled()
        if grad and not self._step_started:
            self._step_started = True
            self._on_step_started(self._progress.step)
        self._progress.phase = Phase.FORWARD
        self._executor.pin = grad
        self._graphs += grad
        index = self._progress.micro_batch
        micro_batch = MicroBatch(grad, index + 1 == self._accumulation_steps, index)
        self._executor.run(self._schedule.forward_begins(micro_batch))

    def fetch(self, partition: str) -> bool:
        """Somebody reads a sharded parameter: fetch it if a forward is running, else return False."""
        if not self._running:
            return False
        self._executor.run(self._schedule.parameter_read(self._running[-1], partition))
        return True

    # Backward

    def backward(self, run: Callable[[], None]) -> None:
        """Run autograd, and reduce what is left when it is done."""
        self._progress.phase = Phase.BACKWARD
        self.backwards_begun += 1
        self._backwards.begin(ROOT)
        try:
            run()
            self._executor.run(self._schedule.backward_ends())
        finally:
            self._backwards.end_all()
            self._progress.phase = Phase.OTHER
        self._progress.micro_batch += 1
        self._graphs = max(self._graphs - 1, 0)
        if self._graphs == 0:
            unpin(self._partitions)

    def pre_backward(self, module: str) -> None:
        """The gradient of an output of this module has arrived."""
        if self._progress.phase is not Phase.BACKWARD:
            raise RuntimeError("backward outside the engine: call engine.backward(loss), not loss.backward()")
        if module != ROOT:
            self._backwards.end_all_but_enclosing(module)
            self._backwards.begin(module)
        with labelled("fetch", module=module, phase=Phase.BACKWARD.value):
            self._executor.run(self._schedule.pre_backward(module))

    # Step

    @property
    def at_boundary(self) -> bool:
        """Whether as many backwards were run as make an optimizer step."""
        return self._progress.micro_batch >= self._accumulation_steps

    def step(self, update: Callable[[], None]) -> None:
        """Let `update` change the shards, with nothing stale left behind."""
        self._progress.phase = Phase.OPTIMIZER
        try:
            with labelled("optimizer", phase=Phase.OPTIMIZER.value):
                self.run(self._schedule.step_begins())
                update()
                self.run(self._schedule.step_ends())
        finally:
            self._progress.phase = Phase.OTHER
        self._graphs = 0
        unpin(self._partitions)
        self._progress.step += 1
        self._progress.micro_batch = 0
        self._step_started = False

    def run(self, actions: Actions) -> None:
        self._executor.run(actions)
