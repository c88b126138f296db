"""What DeepSpeed's stage 3 fetches, prefetches and releases at each module call.

Follows `PartitionedParameterCoordinator` and its hooks in DeepSpeed 0.19.8, quirks included.
"""

from collections import defaultdict
from collections.abc import Mapping

from .interface import Action, Phase, Reason
from .recorder import Mode, Recorder
from .residency import Residency
from .settings import ZeroSettings
from .structure import Structure


class Coordinator:
    """Answers a module's entries and exits, forward and backward."""

    def __init__(
        self, structure: Structure, settings: ZeroSettings, autocast_dtypes: Mapping[str, str]
    ) -> None:
        self._structure = structure
        self._settings = settings
        self._persistent = frozenset(structure.persistent)
        self.residency = Residency(structure, settings, autocast_dtypes)
        self.recorder = Recorder()
        # Parameters that a module uses without owning them, in the order in which that was found out.
        self._external: dict[str, dict[str, None]] = defaultdict(dict)
        self._kept_whole: set[str] = set()
        # Frozen parameters that a recompute fetched stay with the module in whose backward it ran.
        self._recomputed: dict[str, set[str]] = defaultdict(set)
        self._in_backward: dict[str, None] = {}
        self._release_memo: dict[tuple[str, int], set[str]] = {}
        self._root = next(iter(structure.modules))
        self._forward_stack = [self._root]

    def begin_pass(self) -> list[Action]:
        self._forward_stack = [self._root]
        actions = self.residency.drain()
        self.recorder.begin_pass(lambda module: self._structure.ordered(self._parameters(module)))
        self.residency.live = 0
        return actions

    def enter_forward(self, module: str, *, recompute: bool) -> list[Action]:
        self._forward_stack.append(module)
        return self._fetch(module, forward=True, recompute=recompute)

    def enter_backward(self, module: str) -> list[Action]:
        return self._fetch(module, forward=False, recompute=False)

    def leave_forward(self, module: str) -> list[Action]:
        self._forward_stack.pop()
        return self._release(module, forward=True)

    def leave_backward(self, module: str) -> list[Action]:
        return self._release(module, forward=False)

    def read(self, module: str, name: str) -> list[Action]:
        """A parameter read while it is sharded belongs to its reader, too, from now on."""
        if not self.residency.is_sharded(name):
            return []
        self._external[module][name] = None
        return self.residency.gather_alone((name,), module, Phase.FORWARD, Reason.DEMAND)

    def returned(self, module: str, name: str) -> list[Action]:
        """A parameter that leaves its module is its caller's, too, and stays whole until the step."""
        callers = self._forward_stack[:-1]
        if any(name in self._external[caller] for caller in callers):
            return []
        self._kept_whole.add(name)
        self._external[callers[-1]][name] = None
        self._external[module].pop(name, None)
        return self.residency.gather_alone((name,), module, Phase.FORWARD, Reason.DEMAND)

    def end_backward(self) -> list[Action]:
        """Release for the modules whose backward was entered and never left, the latest first."""
        actions: list[Action] = []
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            names = self._structure.ordered({*self._parameters(module), *self._recomputed.pop(module, ())})
            for name in names:
                self.residency.leave(name, module)
            free = set(names) - self._persistent - self._kept_whole
            actions += self.residency.free(self._structure.ordered(free), module)
        return actions

    def _parameters(self, module: str) -> tuple[str, ...]:
        """What a fetch of the module needs; a leaf's includes all below it."""
        return self._iterate(module, module in self._structure.leaves)

    def _iterate(self, module: str, recurse: bool) -> tuple[str, ...]:
        own = self._structure.below(module) if recurse else self._structure.direct(module)
        return (*own, *self._external[module])

    def _fetch(self, module: str, *, forward: bool, recompute: bool) -> list[Action]:
        recorder, residency = self.recorder, self.residency
        actions = [] if recorder.enter(module) else residency.drain()
        if not forward:
            self._in_backward.setdefault(module)
        names = self._structure.ordered(self._parameters(module))
        phase = Phase.FORWARD if forward and not recompute else Phase.BACKWARD
        actions += residency.gather(names, module, phase, Reason.RECOMPUTE if recompute else Reason.DEMAND)
        for name in names:
            residency.use(name, module)
            if recompute and self._in_backward and not self._structure.partitions[name].trainable:
                owner = next(reversed(self._in_backward))
                self._recomputed[owner].add(name)
                residency.use(name, owner)
        actions += residency.wait(names, module)
        if recorder.mode is Mode.COMPLETE:
            recorder.take_own(module, names)
            actions += self._prefetch(module, phase)
        recorder.step += 1
        return actions

    def _prefetch(self, module: str, phase: Phase) -> list[Action]:
        limit = min(
            self._settings.stage3_max_live_parameters - self.residency.live, self._settings.prefetch_limit
        )
        if self._settings.prefetch_limit == 0:
            return []
        ahead = self.recorder.take_ahead(
            limit, self.residency.is_sharded, lambda name: self._structure.partitions[name].numel
        )
        return self.residency.gather(ahead, module, phase, Reason.PREFETCH)

    def _release(self, module: str, *, forward: bool) -> list[Action]:
        own = self._parameters(module)
        released = self._to_release(module) if self.recorder.mode is Mode.COMPLETE else set(own)
        names = set(own)
        if not forward:
            recomputed = self._recomputed.pop(module, set())
            # Adds to the memoised set itself, so that later calls at this step release them, too.
            released |= recomputed - self._persistent
            names |= recomputed
            self._in_backward.pop(module, None)
        for name in names:
            self.residency.leave(name, module)
        free = self._structure.ordered((names & released) - self._kept_whole)
        return self.residency.free(free, module)

    def _to_release(self, module: str) -> set[str]:
        """Own parameters that are neither persistent, nor prefetched for later, nor used again soon.

        Decided once for each module and step and never again, even after the recorded order broke.
        """
        recorder = self.recorder
        key = (module, recorder.step)
        if key not in self._release_memo:
            names = set(self._parameters(module)) - self._persistent
            names = {name for name in names if recorder.latest_use(name) <= recorder.step}
            # The distance counts all parameters below each module if the released one is a leaf, and else
            # only the modules' own ones: a leaf met on the way then counts for nothing.
            recurse = module in self._structure.leaves
            passed = 0
            for later in recorder.modules[recorder.step :]:
                if passed >= self._settings.stage3_max_reuse_distance:
                    break
                if not names:
                    break
                met = self._iterate(later, recurse)
                names.difference_update(met)
                passed += self._structure.numel(met)
            self._release_memo[key] = names
        return self._release_memo[key]
