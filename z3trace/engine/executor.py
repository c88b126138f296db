"""Carries out what a schedule decides: labelled, counted, and in the order given."""

from collections.abc import Iterable, Mapping

from z3trace.engine.collectives import Communicator, all_gather
from z3trace.engine.counter import CollectiveCounter, Progress
from z3trace.engine.ranges import labelled
from z3trace.engine.reduce import GradientReducer
from z3trace.engine.schedule.interface import (
    Action,
    Actions,
    Collective,
    Gather,
    Phase,
    Reduce,
    Release,
    Wait,
)
from z3trace.engine.storage import ShardedPartition, Slot, SlotPool, State

Place = tuple[ShardedPartition, Slot]


class Executor:
    """One gather is one collective, straight from the shards into the partition's slot."""

    def __init__(
        self,
        partitions: Mapping[str, ShardedPartition],
        slots: SlotPool,
        reducer: GradientReducer,
        comm: Communicator,
        counter: CollectiveCounter,
        progress: Progress,
    ) -> None:
        self._partitions = partitions
        self._slots = slots
        self._reducer = reducer
        self._comm = comm
        self._counter = counter
        self._progress = progress

    def run(self, actions: Actions) -> None:
        for action in actions:
            self._run(action)

    def _run(self, action: Action) -> None:
        match action:
            case Gather():
                self._gather(action)
            case Wait():
                self._wait(action)
            case Release():
                self._release(action)
            case Reduce():
                self._reduce(action)

    def _gather(self, action: Gather) -> None:
        partition = self._partitions[action.partitions[0]]
        output = partition.begin_gather(self._slots.take(partition))
        size = output.numel() * output.element_size()
        unit, reason = partition.plan.unit, action.reason.value
        with labelled(
            "gather",
            unit=unit,
            module=action.module,
            phase=action.phase.value,
            reason=reason,
            bytes=size,
            params=len(partition.members),
            group=self._comm.name,
            world=self._comm.size,
            seq=self._comm.next_sequence(),
        ):
            partition.handle = all_gather(output, partition.shard, self._comm)
        self._counter.add(Collective.ALL_GATHER.value, size, unit=unit, module=action.module, reason=reason)

    def _wait(self, action: Wait) -> None:
        for name in action.partitions:
            partition = self._partitions[name]
            if partition.state is State.GATHERING:
                with labelled(
                    "wait", unit=partition.plan.unit, module=action.module, phase=self._progress.phase.value
                ):
                    partition.end_gather()

    def _release(self, action: Release) -> None:
        for name in action.partitions:
            partition = self._partitions[name]
            if partition.state is State.SHARDED:
                continue
            partition.end_gather()  # fetched ahead in vain, its buffer may still be written to
            with labelled(
                "release", unit=partition.plan.unit, module=action.module, phase=self._progress.phase.value
            ):
                partition.release()

    def _reduce(self, action: Reduce) -> None:
        partition = self._partitions[action.partitions[0]]
        size = partition.padded_numel * partition.shard.element_size()
        with labelled(
            "reduce",
            unit=partition.plan.unit,
            module=action.module,
            phase=Phase.BACKWARD.value,
            bytes=size,
            params=len(partition.members),
            group=self._comm.name,
            world=self._comm.size,
            seq=self._comm.next_sequence(),
        ):
            self._reducer.reduce(partition)
        self._counter.add(
            Collective.REDUCE_SCATTER.value, size, unit=partition.plan.unit, module=action.module
        )

    def places(self, names: Iterable[str]) -> list[Place]:
        """Where these partitions are now."""
        return [(p, p.slot) for p in map(self._partitions.__getitem__, names) if p.slot is not None]

    def settle(self, places: Iterable[Place]) -> None:
        """Have the partitions be where they were."""
        for partition, slot in places:
            if partition.slot is not slot:
                self._slots.settle(partition, slot)

    def drain(self) -> None:
        """After an error: wait for what is under way and give up everything that is gathered."""
        for partition in self._partitions.values():
            if partition.state is not State.SHARDED:
                partition.end_gather()
                partition.release()
