"""Which parameters are whole, on their way or sharded, who uses them, and how much counts as live."""

from collections import defaultdict
from collections.abc import Mapping
from enum import Enum

from z3trace.errors import UserError

from .interface import SECONDARY_GROUP, Action, Collective, Gather, Phase, Reason, Release, Wait
from .settings import ZeroSettings
from .structure import Structure


class State(str, Enum):
    SHARDED = "sharded"
    IN_FLIGHT = "in flight"
    WHOLE = "whole"


class Residency:
    """The state of every parameter, changed only together with the actions that change it.

    `live` is the count that `stage3_max_live_parameters` limits: elements gathered for modules since the
    current forward began, less those released. What the optimizer step or an access outside a module's own
    gathers is not in it, so it can fall below zero.
    """

    def __init__(
        self, structure: Structure, settings: ZeroSettings, autocast_dtypes: Mapping[str, str]
    ) -> None:
        self._structure = structure
        self._settings = settings
        self._autocast_dtypes = autocast_dtypes
        self._state = dict.fromkeys(structure.partitions, State.SHARDED)
        self._users: dict[str, set[str]] = defaultdict(set)
        self._second_shard = set(structure.partitions) if settings.zero_hpz_partition_size > 1 else set()
        self.live = 0

    def is_sharded(self, name: str) -> bool:
        return self._state[name] is State.SHARDED

    def use(self, name: str, module: str) -> None:
        self._users[name].add(module)

    def leave(self, name: str, module: str) -> None:
        self._users[name].discard(module)

    def gather(
        self, names: list[str] | tuple[str, ...], module: str, phase: Phase, reason: Reason
    ) -> list[Action]:
        """Gather for modules what is sharded among `names`: usually in one collective.

        They are split by whether a second shard is there, then by process group, then by dtype.
        """
        missing = [name for name in self._structure.ordered(names) if self.is_sharded(name)]
        self.live += self._structure.numel(missing)
        actions: list[Action] = []
        for second in (True, False):
            groups: dict[str, list[str]] = defaultdict(list)
            for name in missing:
                if (name in self._second_shard) is second:
                    groups[self._structure.partitions[name].group].append(name)
            for members in groups.values():
                group = SECONDARY_GROUP if second else ""
                for collective, dtype, part in self._collectives(members, second):
                    actions.append(Gather(part, module, phase, reason, group, collective, dtype))
        for name in missing:
            self._state[name] = State.IN_FLIGHT
        return actions

    def gather_alone(self, names: tuple[str, ...], module: str, phase: Phase, reason: Reason) -> list[Action]:
        """Gather, one collective for each and not counted as live, what is sharded; and wait."""
        missing = tuple(name for name in names if self.is_sharded(name))
        if not missing:
            return []
        for name in missing:
            self._state[name] = State.WHOLE
        return [*(Gather((name,), module, phase, reason) for name in missing), Wait(missing, module)]

    def wait(self, names: tuple[str, ...], module: str) -> list[Action]:
        flying = tuple(name for name in names if self._state[name] is State.IN_FLIGHT)
        for name in flying:
            self._state[name] = State.WHOLE
        return [Wait(flying, module)] if flying else []

    def free(self, names: tuple[str, ...], module: str) -> list[Action]:
        """Release those that are whole and that nobody uses."""
        freed = tuple(
            name for name in names if self._state[name] is State.WHOLE and not self._users.get(name)
        )
        for name in freed:
            self._state[name] = State.SHARDED
        self.live -= self._structure.numel(freed)
        if self._settings.zero_hpz_partition_size > 1:
            self._second_shard.update(freed)
        return [Release(freed, module)] if freed else []

    def drain(self) -> list[Action]:
        """Wait for all that is in flight and release what of it nobody uses."""
        flying = tuple(name for name, state in self._state.items() if state is State.IN_FLIGHT)
        return self.wait(flying, "") + self.free(flying, "")

    def shard_all(self) -> list[Action]:
        """Before the optimizer changes the shards, nothing stays gathered, used or not."""
        names = tuple(self._state)
        actions = self.wait(names, "")
        self._users.clear()
        return actions + self.free(names, "")

    def shards_changed(self) -> None:
        """The optimizer wrote the shards: second shards of what it trains are stale."""
        self._second_shard -= {name for name, part in self._structure.partitions.items() if part.trainable}

    def _collectives(self, names: list[str], second: bool) -> list[tuple[Collective, str, tuple[str, ...]]]:
        if self._settings.stage3_allgather_sequential or len(names) == 1:
            cast = self._autocast_dtypes
            return [(Collective.ALL_GATHER, cast.get(name, ""), (name,)) for name in names]
        if self._settings.stage3_use_all_reduce_for_fetch_params and not second:
            stored = {self._structure.partitions[name].dtype for name in names}
            if len(stored) > 1:
                raise UserError(
                    "stage3_use_all_reduce_for_fetch_params cannot fetch parameters of several dtypes "
                    f"together ({', '.join(sorted(stored))}): DeepSpeed stops here too, turn it off"
                )
            return [(Collective.ALL_REDUCE, "", tuple(names))]
        dtypes: dict[str, list[str]] = defaultdict(list)
        for name in names:
            dtypes[self._autocast_dtypes.get(name) or self._structure.partitions[name].dtype].append(name)
        return [
            (Collective.ALL_GATHER, dtype if self._autocast_dtypes else "", tuple(dtypes[dtype]))
            for dtype in sorted(dtypes)
        ]
