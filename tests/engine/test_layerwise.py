"""Properties that the layer-wise schedule has for whatever a model does."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from z3trace.engine.schedule.interface import (
    Action,
    Gather,
    MicroBatch,
    Model,
    Module,
    Partition,
    Phase,
    Reason,
    Reduce,
    Release,
    Wait,
)
from z3trace.engine.schedule.layerwise import LayerwiseSchedule

UNITS = tuple("abcdef")
DEPTH = 2  # of calls inside calls


@dataclass(frozen=True)
class Call:
    module: str
    inner: tuple["Call", ...] = ()


@dataclass(frozen=True)
class Pass:
    """One micro-batch. `silent` numbers the calls (in order of their end) whose gradient does not arrive."""

    calls: tuple[Call, ...]
    grad: bool = True
    silent: frozenset[int] = frozenset()


def make_schedule(prefetch: int, frozen: frozenset[str] = frozenset()) -> LayerwiseSchedule:
    partitions = tuple(Partition(u, (f"{u}.weight",), 10, trainable=u not in frozen) for u in ("", *UNITS))
    modules = (Module("", "Model", ("",), UNITS), *(Module(u, "Block", (u,)) for u in UNITS))
    return LayerwiseSchedule(Model(modules, partitions), {"": ("",), **{u: (u,) for u in UNITS}}, prefetch)


@dataclass
class Machine:
    """Carries out actions as the engine would, and complains."""

    schedule: LayerwiseSchedule
    prefetch: int
    trainable: frozenset[str]
    states: dict[str, str] = field(default_factory=dict)
    log: list[Action] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)

    def run(self, actions: "object") -> None:
        for action in actions:  # type: ignore[attr-defined]
            (name,) = action.partitions
            state = self.states.get(name, "sharded")
            if isinstance(action, Gather):
                assert state == "sharded", f"{name} is gathered while {state}"
                self.states[name] = "gathering"
            elif isinstance(action, Wait):
                assert state == "gathering", f"waits for {name}, which is {state}"
                self.states[name] = "gathered"
            elif isinstance(action, Release):
                assert state != "sharded", f"{name} is released twice"
                assert name not in self.in_use, f"{name} is released while in use"
                self.states[name] = "sharded"
            else:
                assert name in self.trainable
            self.log.append(action)
        live = {n for n, state in self.states.items() if state != "sharded" and n}
        assert len(live) <= DEPTH + self.prefetch

    def forward(self, call: Call, ended: list[Call]) -> None:
        self.in_use.append(call.module)
        self.numbers[id(call)] = sum(module == call.module for module in self.begun)
        self.begun.append(call.module)
        self.run(self.schedule.pre_forward(call.module))
        assert self.states[call.module] == "gathered"
        for inner in call.inner:
            self.forward(inner, ended)
            assert self.states[call.module] == "gathered"
        self.in_use.pop()
        self.run(self.schedule.post_forward(call.module))
        ended.append(call)

    def backward(self, call: Call, ended: list[Call], silent: frozenset[int]) -> None:
        place = next(i for i, other in enumerate(ended) if other is call)
        heard = place not in silent
        if heard:
            self.run(self.schedule.pre_backward(call.module, call=self.numbers[id(call)]))
            self.in_use.append(call.module)
            assert self.states[call.module] == "gathered"
        for inner in reversed(call.inner):
            self.backward(inner, ended, silent)
            assert not heard or self.states[call.module] == "gathered"
        if heard:
            self.in_use.remove(call.module)

    def micro_batch(self, work: Pass) -> None:
        root = Call("", work.calls)
        ended: list[Call] = []
        self.begun.clear()
        self.run(self.schedule.forward_begins(MicroBatch(work.grad)))
        self.forward(root, ended)
        self.run(self.schedule.forward_ends())
        if work.grad:
            self.backward(root, ended, work.silent)
            self.run(self.schedule.backward_ends())

    def step(self) -> None:
        self.run(self.schedule.step_begins())
        assert set(self.states.values()) <= {"sharded"}
        self.run(self.schedule.step_ends())


def _fresh(call: Call) -> Call:
    """Equal calls are different calls: `Machine.backward` tells them apart by identity."""
    return Call(call.module, tuple(_fresh(inner) for inner in call.inner))


leaf_calls = st.sampled_from(UNITS).map(Call)
nested_calls = st.builds(
    lambda outer, inner: Call(outer, tuple(c for c in inner if c.module != outer)),
    st.sampled_from(UNITS),
    st.lists(leaf_calls, max_size=3),
)
forwards = st.lists(nested_calls, max_size=7).map(lambda calls: tuple(_fresh(c) for c in calls))
passes = st.builds(Pass, forwards, st.booleans(), st.frozensets(st.integers(0, 12), max_size=4))
steps = st.lists(st.lists(passes, min_size=1, max_size=3), min_size=1, max_size=4)
some_frozen = st.frozensets(st.sampled_from(UNITS), max_size=3)


def carry_out(training: list[list[Pass]], prefetch: int, frozen: frozenset[str] = frozenset()) -> Machine:
    machine = Machine(make_schedule(prefetch, frozen), prefetch, frozenset({"", *UNITS}) - frozen)
    for step in training:
        for work in step:
            machine.micro_batch(work)
        machine.step()
    return machine


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(0, 3), some_frozen)
def test_nothing_is_used_before_it_is_there_nor_released_in_use(
    training: list[list[Pass]], prefetch: int, frozen: frozenset[str]
) -> None:
    """The machine checks each action against what is there and in use; it must have had something to check."""
    machine = carry_out(training, prefetch, frozen)
    gathered = {action.partitions[0] for action in machine.log if isinstance(action, Gather)}
    called = {call.module for step in training for work in step for call in work.calls}
    assert gathered >= called | {""}
    assert set(machine.states.values()) == {"sharded"}


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(0, 3), some_frozen)
def test_every_trainable_partition_is_reduced_once_in_each_backward(
    training: list[list[Pass]], prefetch: int, frozen: frozenset[str]
) -> None:
    machine = carry_out(training, prefetch, frozen)
    backwards = sum(work.grad for step in training for work in step)
    reduced = Counter(a.partitions[0] for a in machine.log if isinstance(a, Reduce))
    assert reduced == {name: backwards for name in machine.trainable if backwards}


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(0, 3), st.data())
def test_collectives_do_not_depend_on_which_gradients_arrive(
    training: list[list[Pass]], prefetch: int, data: st.DataObject
) -> None:
    """Ranks that run the same forwards issue the same collectives in the same order."""

    def collectives(some: list[list[Pass]]) -> list[tuple[str, str]]:
        log = carry_out(some, prefetch).log
        return [(type(a).__name__, a.partitions[0]) for a in log if isinstance(a, Gather | Reduce)]

    silent = st.frozensets(st.integers(0, 20), max_size=10)
    other = [[Pass(w.calls, w.grad, data.draw(silent)) for w in step] for step in training]
    assert collectives(training) == collectives(other)


def chain(prefetch: int = 1, passes_per_step: int = 1, count: int = 3, grad: bool = True) -> list[Action]:
    """The actions of the last step of a chain of all units."""
    machine = Machine(make_schedule(prefetch), prefetch, frozenset({"", *UNITS}))
    for _ in range(count):
        machine.log.clear()
        for _ in range(passes_per_step):
            machine.micro_batch(Pass(tuple(map(Call, UNITS)), grad))
        machine.step()
    return machine.log


def test_a_chain_gathers_each_unit_once_a_pass_and_not_what_is_still_there() -> None:
    gathers = [(a.partitions[0], a.module, a.phase, a.reason) for a in chain() if isinstance(a, Gather)]
    forward = [("", "", Reason.DEMAND), ("a", "", Reason.PREFETCH), ("b", "", Reason.PREFETCH)]
    forward += [(u, m, Reason.PREFETCH) for m, u in zip("bcde", "cdef", strict=True)]
    backward = [("e", "", Reason.PREFETCH)]
    backward += [(u, m, Reason.PREFETCH) for m, u in zip("edcb", "dcba", strict=True)]
    assert gathers == [
        *((u, m, Phase.FORWARD, r) for u, m, r in forward),
        *((u, m, Phase.BACKWARD, r) for u, m, r in backward),
    ]


def test_gradients_leave_in_the_order_of_backward_and_the_root_last() -> None:
    reduced = [a.partitions[0] for a in chain() if isinstance(a, Reduce)]
    assert reduced == [*reversed(UNITS), ""]


def test_the_next_micro_batch_finds_the_first_unit_and_the_root() -> None:
    gathers = [a.partitions[0] for a in chain(passes_per_step=2) if isinstance(a, Gather)]
    assert gathers == ["", *"abcdef", *"edcba", *"bcdef", *"edcba"]


def test_without_prefetch_everything_is_fetched_on_demand() -> None:
    gathers = [a for a in chain(prefetch=0) if isinstance(a, Gather)]
    assert {a.reason for a in gathers} == {Reason.DEMAND}
    assert [a.partitions[0] for a in gathers] == ["", *"abcdef", *"edcba"]


def test_evaluation_leaves_only_the_root_behind() -> None:
    machine = Machine(make_schedule(1), 1, frozenset({"", *UNITS}))
    machine.micro_batch(Pass(tuple(map(Call, UNITS)), grad=False))
    assert {n for n, state in machine.states.items() if state != "sharded"} == {""}
    assert not any(isinstance(a, Reduce) for a in machine.log)


def test_the_order_is_learnt_from_the_first_forward() -> None:
    machine = Machine(make_schedule(1), 1, frozenset({"", *UNITS}))
    work = Pass(tuple(map(Call, "fbdace")))
    machine.micro_batch(work)
    machine.step()
    machine.log.clear()
    machine.micro_batch(work)
    demanded = [a.partitions[0] for a in machine.log if isinstance(a, Gather) and a.reason is Reason.DEMAND]
    assert demanded == [""]
