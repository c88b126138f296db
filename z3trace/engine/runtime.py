"""Tells the schedule what happens in the training, and has its answers carried out."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from z3trace.engine.counter import Progress
from z3trace.engine.executor import Executor, Place
from z3trace.engine.ranges import OpenRanges, labelled
from z3trace.engine.schedule.interface import MicroBatch, Phase, Schedule

ROOT = ""


@dataclass(eq=False)
class Call:
    """One forward of a module, and the slots in which it found the parameters it read.

    Autograd may have saved views of these slots: its backward needs the parameters in the same places.
    """

    module: str
    number: int | None
    """Which forward of the module in its pass; None when checkpointing ran it again."""
    places: list[Place]
    backward: int = 0
    """The last backward that reached it, counted from 1."""


class Runtime:
    """The state of one training pass: forward, backward, step. Hooks report to it by module path."""

    def __init__(
        self,
        schedule: Schedule,
        executor: Executor,
        needs: Mapping[str, Iterable[str]],
        progress: Progress,
        accumulation_steps: int,
        on_step_started: Callable[[int], None],
    ) -> None:
        self._schedule = schedule
        self._executor = executor
        self._needs = {module: list(partitions) for module, partitions in needs.items()}
        self._progress = progress
        self._accumulation_steps = accumulation_steps
        self._on_step_started = on_step_started
        self._step_started = False
        self._forwards = OpenRanges("forward", Phase.FORWARD.value)
        self._backwards = OpenRanges("backward", Phase.BACKWARD.value)
        self._running: list[tuple[str, int]] = []
        self._numbers: Counter[str] = Counter()
        self._calls: dict[str, list[Call]] = {}  # those whose backward is still to come
        self._reached = ROOT  # the module whose backward began last
        self._backward_count = 0
        self._broken = False

    # Forward

    def pre_forward(self, module: str) -> None:
        """The module's forward is about to run."""
        if module == ROOT and self._progress.phase is not Phase.BACKWARD:
            self._begin_forward()
        self._running.append((module, self._numbers[module]))
        if self._progress.phase is Phase.BACKWARD:
            with labelled("fetch", module=module, phase=Phase.BACKWARD.value):
                self._executor.run(self._schedule.pre_forward(module, recompute=True))
            return
        self._numbers[module] += 1
        self._forwards.begin(module)
        with labelled("fetch", module=module, phase=Phase.FORWARD.value):
            self._executor.run(self._schedule.pre_forward(module))

    def post_forward(self, module: str, *, differentiable: bool) -> Call:
        """The module's forward is over (perhaps by an exception); `differentiable`: an output needs a gradient.

        `gradient_arrived` wants the result back.
        """
        recompute = self._progress.phase is Phase.BACKWARD
        if not self._running or self._running[-1][0] != module:  # an error before it began
            return Call(module, None, [])
        _, number = self._running.pop()
        places = self._executor.places(self._needs.get(module, ()))
        call = Call(module, None if recompute else number, places)
        calls = self._calls.setdefault(module, [])
        if not recompute and differentiable:
            calls.append(call)
        elif recompute and calls and module != self._reached:
            calls[-1].places = call.places  # autograd uses the views of the second forward
        self._executor.run(
            self._schedule.post_forward(module, recompute=recompute, differentiable=differentiable)
        )
        if not recompute:
            self._forwards.end(module)
            if module == ROOT:
                self._executor.run(self._schedule.forward_ends())
                self._progress.phase = Phase.OTHER
        return call

    def _begin_forward(self) -> None:
        if self._broken:
            raise RuntimeError("a backward failed half way: the ranks may be out of step, start them again")
        grad = torch.is_grad_enabled()
        if grad and not self._step_started:
            self._step_started = True
            self._on_step_started(self._progress.step)
        self._progress.phase = Phase.FORWARD
        self._running.clear()
        self._numbers.clear()
        index = self._progress.micro_batch
        micro_batch = MicroBatch(grad, index + 1 == self._accumulation_steps, index)
        self._executor.run(self._schedule.forward_begins(micro_batch))

    def fetch(self, partition: str) -> bool:
        """Somebody reads a sharded parameter: fetch it if a forward is running, else return False."""
        if not self._running:
            return False
        reader, _ = self._running[-1]
        self._executor.run(self._schedule.parameter_read(reader, partition))
        needed = self._needs.setdefault(reader, [])
        if partition not in needed:
            needed.append(partition)
        return True

    def returned(self, module: str, partition: str) -> None:
        """The forward of this module is about to return a parameter itself."""
        self._executor.run(self._schedule.parameter_returned(module, partition))

    # Backward

    def backward(self, run: Callable[[], None]) -> None:
        """Run autograd, and reduce what is left when it is done."""
        self._progress.phase = Phase.BACKWARD
        self._backward_count += 1
        self._reached = ROOT
        self._backwards.begin(ROOT)
        self._broken = True
        try:
            run()
            self._executor.run(self._schedule.backward_ends())
            self._broken = False
        finally:
            self._backwards.end_all()
            self._progress.phase = Phase.OTHER
        self._progress.micro_batch += 1

    def gradient_arrived(self, call: Call, gradient: Tensor) -> None:
        """The gradient of an output of this call is there: its backward begins with the first of them."""
        if call.backward != self._backward_count:
            self.begin_backward(call)

    def begin_backward(self, call: Call) -> None:
        """Tell the schedule that the backward of this call begins."""
        if self._progress.phase is not Phase.BACKWARD:
            raise RuntimeError("backward outside the engine: call engine.backward(loss), not loss.backward()")
        call.backward = self._backward_count
        module = self._reached = call.module
        if call in self._calls.get(module, ()):
            self._calls[module].remove(call)
        if module != ROOT:
            self._backwards.end_all_but_enclosing(module)
            self._backwards.begin(module)
        with labelled("fetch", module=module, phase=Phase.BACKWARD.value):
            self._executor.run(self._schedule.pre_backward(module, call=call.number))
            self._executor.settle(call.places)

    def end_backward(self, module: str) -> None:
        """The gradients of the inputs of a call of this module are there."""
        self._executor.run(self._schedule.post_backward(module))
        if module != ROOT:
            self._backwards.end(module)

    def gradient_ready(self, partition: str) -> None:
        """The parameters of the partition have their gradients."""
        self._executor.run(self._schedule.gradient_ready(partition))

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
                self._executor.run(self._schedule.step_begins())
                update()
                self._executor.shards_changed()
                actions = self._schedule.step_ends()
                if actions:
                    with labelled("post_step_gather", phase=Phase.OPTIMIZER.value):
                        self._executor.run(actions)
        finally:
            self._progress.phase = Phase.OTHER
        self._calls.clear()
        self._progress.step += 1
        self._progress.micro_batch = 0
        self._step_started = False
