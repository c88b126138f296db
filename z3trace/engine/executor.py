"""Carries out what a schedule decides: labelled, counted, and in the order given."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from z3trace.engine.coalesced import CoalescedGather
from z3trace.engine.collectives import Communicator, Handle, all_gather
from z3trace.engine.counter import CollectiveCounter, Progress
from z3trace.engine.ranges import labelled
from z3trace.engine.reduce import GradientReducer
from z3trace.engine.schedule.interface import (
    SECONDARY_GROUP,
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
    """One gather is one collective: of one partition straight from its shards into its slot, of several
    through a common buffer. `second_comm` is the smaller group that keeps second shards (hpZ), or `comm`.
    """

    def __init__(
        self,
        partitions: Mapping[str, ShardedPartition],
        slots: SlotPool,
        reducer: GradientReducer,
        comm: Communicator,
        second_comm: Communicator,
        counter: CollectiveCounter,
        progress: Progress,
    ) -> None:
        self._partitions = partitions
        self._slots = slots
        self._reducer = reducer
        self._comm = comm
        self._second_comm = second_comm
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
        partitions = [self._partitions[name] for name in action.partitions]
        second = action.group == SECONDARY_GROUP
        comm = self._second_comm if second else self._comm
        outputs = [partition.begin_gather(self._slots.take(partition)) for partition in partitions]
        sources = [_second_shard(p) if second else p.shard for p in partitions]
        size = sum(output.numel() * output.element_size() for output in outputs)
        unit, reason = _units(partitions), action.reason.value
        with labelled(
            "gather",
            unit=unit,
            module=action.module,
            phase=action.phase.value,
            reason=reason,
            bytes=size,
            params=sum(len(partition.members) for partition in partitions),
            group=comm.name,
            world=comm.size,
            seq=comm.next_sequence(),
        ):
            handle: Handle
            by_all_reduce = action.collective is Collective.ALL_REDUCE
            if len(partitions) == 1 and not by_all_reduce:
                handle = all_gather(outputs[0], sources[0], comm)
            else:
                handle = CoalescedGather(partitions, sources, comm, by_all_reduce=by_all_reduce)
        for partition in partitions:
            partition.handle = handle
        self._counter.add(
            action.collective.value, size, phase=action.phase, unit=unit, module=action.module, reason=reason
        )

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
                if self._second_comm is not self._comm and partition.second_shard is None:
                    partition.second_shard = partition.cut_again(self._second_comm)
                partition.release()

    def _reduce(self, action: Reduce) -> None:
        partitions = [self._partitions[name] for name in action.partitions]
        whole = action.collective is Collective.ALL_REDUCE
        elements = sum(p.numel if whole else p.padded_numel for p in partitions)
        size = elements * partitions[0].shard.element_size()
        unit = _units(partitions)
        with labelled(
            "reduce",
            unit=unit,
            module=action.module,
            phase=Phase.BACKWARD.value,
            bytes=size,
            params=sum(len(partition.members) for partition in partitions),
            group=self._comm.name,
            world=self._comm.size,
            seq=self._comm.next_sequence(),
        ):
            self._reducer.reduce(partitions, action.collective)
        self._counter.add(
            action.collective.value,
            size,
            phase=Phase.BACKWARD,
            unit=unit,
            module=action.module,
            reason="gradient",
        )

    def shards_changed(self) -> None:
        """The optimizer wrote the shards of what it trains: second shards of that are stale."""
        for partition in self._partitions.values():
            if partition.plan.trainable:
                partition.second_shard = None

    def cut_second_shards(self) -> None:
        """Before training: everything has a second shard from the start."""
        for partition in self._partitions.values():
            buffer = partition.begin_gather(self._slots.take(partition))
            all_gather(buffer, partition.shard, self._comm).wait()
            partition.second_shard = partition.cut_again(self._second_comm)
            partition.release()

    def places(self, names: Iterable[str]) -> list[Place]:
        """Where these partitions are now."""
        return [(p, p.slot) for p in map(self._partitions.__getitem__, names) if p.slot is not None]

    def settle(self, places: Iterable[Place]) -> None:
        """Have the partitions be where they were."""
        for partition, slot in places:
            if partition.slot is not slot:
                self._slots.settle(partition, slot)


def _units(partitions: Sequence[ShardedPartition]) -> str:
    """The modules whose parameters these are; several are joined by "+"."""
    if len(partitions) == 1:
        return partitions[0].plan.unit
    return "+".join(dict.fromkeys(partition.plan.unit for partition in partitions))


def _second_shard(partition: ShardedPartition) -> Tensor:
    if partition.second_shard is None:
        raise RuntimeError(f"{partition.plan.name} has no second shard to gather")
    return partition.second_shard
