"""The `layerwise` policy: one gather per unit, fetched ahead, and nothing gathered that is still there.

Forward follows the order of the last forward, and falls back to fetching on demand where a model leaves it.
Backward is the forward reversed: autograd runs nodes in strictly reverse order of their creation, so when
the gradient of a call's output is there, every call that began after that output existed is complete. What
backward issues therefore depends on the forward alone, never on which gradients happened to arrive: a unit
that a rank did not use is reduced (as zeros) in the same place as on the other ranks.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from z3trace.engine.schedule.interface import (
    Action,
    Actions,
    Gather,
    MicroBatch,
    Model,
    Phase,
    Reason,
    Reduce,
    Release,
    Wait,
)

ROOT = ""
_FORWARDS_REMEMBERED = 256
_LATER = 1 << 62

# A training repeats the same few actions: each is made once.
_gather_action = lru_cache(maxsize=None)(lambda partition, *where: Gather((partition,), *where))
_wait_action = lru_cache(maxsize=None)(lambda partition, module: Wait((partition,), module))
_release_action = lru_cache(maxsize=None)(lambda partition, module: Release((partition,), module))
_reduce_action = lru_cache(maxsize=None)(lambda partition, module: Reduce((partition,), module))


@dataclass(eq=False)
class _Call:
    """One forward of a module, by the places of its beginning and end among all events of the pass."""

    module: str
    enter: int
    exit: int = _LATER
    number: int = 0


class LayerwiseSchedule:
    """A `Schedule` over units. `needs` maps each module it wants to hear of to the partitions it reads.

    At most `prefetch` units are fetched ahead of the one that runs. The root's own partitions are gathered
    first, and stay until the optimizer steps. A unit is released when the next one begins, which leaves
    the last of forward in place for backward, and the last of backward for the next micro-batch.
    """

    def __init__(self, model: Model, needs: Mapping[str, tuple[str, ...]], prefetch: int = 1) -> None:
        self._needs = dict(needs)
        self._prefetch = prefetch
        self._trainable = dict.fromkeys(p.name for p in model.partitions if p.trainable)
        self._root = self._needs.get(ROOT, ())
        self._order: tuple[str, ...] = tuple(
            m.path for m in model.modules if m.path in self._needs and m.path != ROOT
        )
        self._live: dict[str, bool] = {}  # gathered partitions: whether they were waited for
        # Forward: calls that run now, calls that ended (differentiable ones), and the place in the order.
        self._clock = 0
        self._running: list[_Call] = []
        self._ended: list[_Call] = []
        self._begun: list[str] = []
        self._place = 0
        self._grad = False
        # Backward: forwards that wait for theirs, what is left of the current one, and what runs.
        self._forwards: deque[list[_Call]] = deque(maxlen=_FORWARDS_REMEMBERED)
        self._last: list[_Call] = []
        self._left: list[_Call] | None = None
        self._open: list[_Call] = []
        self._uses: Counter[str] = Counter()
        self._reduced: set[str] = set()
        self._recomputing: list[str] = []

    def forward_begins(self, micro_batch: MicroBatch) -> Actions:
        self._grad = micro_batch.grad_enabled
        self._clock = self._place = 0
        self._running, self._ended, self._begun = [], [], []
        ahead = self._order[: self._prefetch + 1]
        return [
            *self._release_all_but(self._partitions(ahead)),
            *self._gather(self._root, ROOT, Phase.FORWARD, Reason.DEMAND),
            *self._fetch_ahead(ahead, ROOT, Phase.FORWARD),
        ]

    def pre_forward(self, module: str, *, recompute: bool = False) -> Actions:
        if module not in self._needs and module != ROOT:
            return ()
        if recompute:
            return self._recompute(module)
        self._running.append(_Call(module, self._tick(), number=self._begun.count(module)))
        if module == ROOT:
            return self._wait(self._root, ROOT)
        self._begun.append(module)
        self._advance(module)
        needed = self._needs[module]
        ahead = self._order[self._place : self._place + self._prefetch]
        running = self._partitions(call.module for call in self._running)
        return [
            *self._release_all_but(running, self._partitions(ahead), module),
            *self._gather(needed, module, Phase.FORWARD, Reason.DEMAND),
            *self._wait(needed, module),
            *self._fetch_ahead(ahead, module, Phase.FORWARD),
        ]

    def parameter_read(self, module: str, partition: str) -> Actions:
        """From now on the partition is fetched with the unit around the module that reads it."""
        reader = self._inner_unit(module)
        if partition not in self._needs.get(reader, ()):
            self._needs[reader] = (*self._needs.get(reader, ()), partition)
            self._root = self._needs.get(ROOT, ())
        phase = Phase.FORWARD if self._left is None else Phase.BACKWARD
        return [*self._gather((partition,), module, phase, Reason.DEMAND), *self._wait((partition,), module)]

    def parameter_returned(self, module: str, partition: str) -> Actions:
        return ()

    def post_forward(self, module: str, *, recompute: bool = False, differentiable: bool = True) -> Actions:
        if recompute:
            if module in self._recomputing:
                self._recomputing.remove(module)
            return ()
        call = next((c for c in reversed(self._running) if c.module == module), None)
        if call is not None:
            self._running.remove(call)
            call.exit = self._tick()
            if differentiable:
                self._ended.append(call)
        return ()

    def forward_ends(self) -> Actions:
        if self._begun:
            self._order = tuple(self._begun)
        if not self._grad:
            return self._release_all_but(())
        self._forwards.append(self._ended)
        return ()

    def pre_backward(self, module: str, *, call: int | None = None) -> Actions:
        self._begin_backward()
        assert self._left is not None
        index = next(
            (
                i
                for i in reversed(range(len(self._left)))
                if self._left[i].module == module and call in (None, self._left[i].number)
            ),
            None,
        )
        if index is None:
            if any(other.module == module and call in (None, other.number) for other in self._open):
                return self._wait(self._needs.get(module, ()), module)
            return self._unforeseen(module)
        actions: list[Action] = []
        while len(self._left) > index + 1:  # calls without a gradient on this rank
            actions += self._enter_backward(self._left.pop(), module, wait=False)
        actions += self._enter_backward(self._left.pop(), module, wait=True)
        return actions

    def gradient_ready(self, partition: str) -> Actions:
        return ()

    def post_backward(self, module: str) -> Actions:
        return ()

    def backward_ends(self) -> Actions:
        self._begin_backward()
        assert self._left is not None
        actions: list[Action] = []
        while self._left:
            actions += self._enter_backward(self._left.pop(), ROOT, wait=False)
        actions += self._complete(lambda call: True, ROOT)
        actions += self._reduce((p for p in self._trainable if p not in self._reduced), ROOT)
        self._left = None
        ahead = self._order[: self._prefetch + 1]
        actions += self._release_all_but(self._partitions(ahead))
        return actions

    def step_begins(self) -> Actions:
        return self._release(tuple(self._live), ROOT)

    def step_ends(self, *, skipped: bool = False) -> Actions:
        self._forwards.clear()
        self._last = []
        return ()

    # Forward

    def _inner_unit(self, module: str) -> str:
        while module and module not in self._needs:
            module = module.rpartition(".")[0]
        return module

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _advance(self, module: str) -> None:
        """Move the place in the expected order behind this module, if it comes there."""
        try:
            self._place = self._order.index(module, self._place) + 1
        except ValueError:
            if module in self._order:
                self._place = self._order.index(module) + 1

    def _recompute(self, module: str) -> Actions:
        actions: list[Action] = []
        if self._left is not None:
            actions += self._complete(
                lambda call: call.enter == _LATER and not _encloses(call.module, module), module
            )
        self._recomputing.append(module)
        needed = self._needs[module]
        return [
            *actions,
            *self._release_unused(module, ()),
            *self._gather(needed, module, Phase.BACKWARD, Reason.RECOMPUTE),
            *self._wait(needed, module),
        ]

    # Backward

    def _begin_backward(self) -> None:
        if self._left is not None:
            return
        # A second backward through the same graph finds nothing new: it repeats the last one.
        self._last = self._forwards.pop() if self._forwards else self._last
        self._left = list(self._last)
        self._open = []
        self._uses = Counter(p for call in self._left for p in self._needs.get(call.module, ()))
        self._reduced = set()
        self._recomputing = []

    def _enter_backward(self, call: _Call, module: str, *, wait: bool) -> Iterator[Action]:
        """The backward of `call` begins, as noticed in the hook of `module`."""
        assert self._left is not None
        yield from self._complete(lambda other: other.enter > call.exit, module)
        self._open.append(call)
        needed = self._needs.get(call.module, ())
        count = self._prefetch + (call.module == ROOT)
        ahead = [c.module for c in self._left[: -count - 1 : -1] if c.module != ROOT]
        yield from self._release_unused(module, ahead)
        yield from self._gather(needed, module, Phase.BACKWARD, Reason.DEMAND if wait else Reason.PREFETCH)
        if wait:
            yield from self._wait(needed, module)
        yield from self._fetch_ahead(ahead, module, Phase.BACKWARD)

    def _unforeseen(self, module: str) -> Actions:
        """A backward without a forward of its own: of what reentrant checkpointing has computed again."""
        needed = self._needs.get(module, ())
        actions = [
            *self._complete(lambda call: call.enter == _LATER and not _encloses(call.module, module), module),
        ]
        self._open.append(_Call(module, _LATER))
        return [
            *actions,
            *self._release_unused(module, ()),
            *self._gather(needed, module, Phase.BACKWARD, Reason.DEMAND),
            *self._wait(needed, module),
        ]

    def _complete(self, done: Callable[[_Call], bool], module: str) -> Iterator[Action]:
        """Reduce what was used for the last time by open calls of which `done` holds, innermost first."""
        for call in [call for call in reversed(self._open) if done(call)]:
            self._open.remove(call)
            for partition in self._needs.get(call.module, ()):
                self._uses[partition] -= call.enter != _LATER
                if self._uses[partition] <= 0:
                    yield from self._reduce((partition,), module)

    def _release_unused(self, module: str, ahead: Iterable[str]) -> Iterator[Action]:
        in_use = {*(call.module for call in self._open), *self._recomputing}
        yield from self._release_all_but(self._partitions([*in_use, *ahead]), module=module)

    # Actions

    def _partitions(self, modules: Iterable[str]) -> tuple[str, ...]:
        return tuple(p for module in modules for p in self._needs.get(module, ()))

    def _gather(
        self, partitions: Iterable[str], module: str, phase: Phase, reason: Reason
    ) -> Iterator[Action]:
        for partition in partitions:
            if partition not in self._live:
                self._live[partition] = False
                yield _gather_action(partition, module, phase, reason)

    def _fetch_ahead(self, modules: Iterable[str], module: str, phase: Phase) -> Iterator[Action]:
        if self._prefetch:
            yield from self._gather(self._partitions(modules), module, phase, Reason.PREFETCH)

    def _wait(self, partitions: Iterable[str], module: str) -> list[Action]:
        actions: list[Action] = []
        for partition in partitions:
            if not self._live[partition]:
                self._live[partition] = True
                actions.append(_wait_action(partition, module))
        return actions

    def _release_all_but(
        self, kept: Iterable[str], also: Iterable[str] = (), module: str = ROOT
    ) -> list[Action]:
        """Release everything but these partitions and the root's own."""
        keep = {*self._root, *kept, *also}
        return self._release([p for p in self._live if p not in keep], module)

    def _release(self, partitions: Iterable[str], module: str) -> list[Action]:
        actions: list[Action] = []
        for partition in partitions:
            del self._live[partition]
            actions.append(_release_action(partition, module))
        return actions

    def _reduce(self, partitions: Iterable[str], module: str) -> Iterator[Action]:
        for partition in partitions:
            if partition in self._trainable:
                self._reduced.add(partition)
                yield _reduce_action(partition, module)


def _encloses(outer: str, inner: str) -> bool:
    return outer == ROOT or inner == outer or inner.startswith(outer + ".")
