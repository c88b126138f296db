"""What every policy must keep to, whatever the model, the settings and the calls: random ones, driven."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from z3trace.engine.schedule.calls import (
    Call,
    CallFacts,
    Event,
    EventKind,
    backward_events,
    call_tree,
    forward_events,
)
from z3trace.engine.schedule.deepspeed import DeepSpeedSchedule
from z3trace.engine.schedule.interface import (
    Gather,
    MicroBatch,
    Model,
    Module,
    Partition,
    Phase,
    Reason,
    Reduce,
    Release,
    Schedule,
    Wait,
)
from z3trace.engine.schedule.layerwise import LayerwiseSchedule
from z3trace.engine.schedule.predict import OptimizerStep, Pass, drive, tell
from z3trace.engine.schedule.settings import LeafModules, ZeroSettings

SIZES = [0, 1, 20, 100, 400, 10**9]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A tree of up to three levels; some parameters frozen, tied, of another dtype or process group."""
    paths = [""]
    for name in "abc"[: draw(st.integers(1, 3))]:
        paths.append(name)
        for inner in range(draw(st.integers(0, 3))):
            paths.append(f"{name}.{inner}")
            paths.extend(f"{name}.{inner}.x{leaf}" for leaf in range(draw(st.integers(0, 2))))
    partitions: list[Partition] = []
    owned: dict[str, list[str]] = {}
    for path in paths:
        owned[path] = []
        for number in range(draw(st.integers(0, 2))):
            name = f"{path}.p{number}".removeprefix(".")
            numel = draw(st.integers(1, 60))
            dtype = draw(st.sampled_from(["float32", "float32", "bfloat16"]))
            group = draw(st.sampled_from(["", "", "experts"]))
            partitions.append(Partition(name, (name,), numel, dtype, draw(st.integers(0, 4)) > 0, group))
            owned[path].append(name)
    if partitions and draw(st.booleans()):
        tied = draw(st.sampled_from(partitions)).name
        path = draw(st.sampled_from(paths))
        if tied not in owned[path]:
            owned[path].append(tied)
    return Model(
        tuple(
            Module(
                path,
                f"test.{'Leafy' if path.endswith('1') else 'Layer'}",
                tuple(owned[path]),
                tuple(p for p in paths if p and p.rpartition(".")[0] == path),
            )
            for path in paths
        ),
        tuple(partitions),
    )


@st.composite
def stage3_settings(draw: st.DrawFn) -> ZeroSettings:
    return ZeroSettings(
        stage3_prefetch_bucket_size=draw(st.sampled_from(SIZES)),
        stage3_param_persistence_threshold=draw(st.sampled_from([0, 5, 30, 100])),
        stage3_model_persistence_threshold=draw(st.sampled_from([0, 50, 10**9])),
        stage3_max_live_parameters=draw(st.sampled_from(SIZES)),
        stage3_max_reuse_distance=draw(st.sampled_from(SIZES)),
        stage3_module_granularity_threshold=draw(st.sampled_from([0, 0, 20])),
        leaf_module=LeafModules(classes=draw(st.sampled_from([(), ("Leafy",)]))),
        reduce_bucket_size=draw(st.sampled_from([1, 40, 200, 10**9])),
        reduce_scatter=draw(st.booleans()),
        stage3_allgather_sequential=draw(st.integers(0, 4)) == 0,
        zero_hpz_partition_size=draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def facts_of(draw: st.DrawFn, model: Model, most_outputs: int) -> CallFacts:
    """An order in which children are skipped, repeated and exchanged; some calls are checkpointed."""
    modules = {module.path: module for module in model.modules}

    def order(path: str) -> list[str]:
        children = draw(st.permutations(modules[path].children)) if draw(st.integers(0, 3)) == 0 else None
        called = [child for child in children or modules[path].children if draw(st.integers(0, 5)) > 0]
        if called and draw(st.integers(0, 5)) == 0:
            called.append(draw(st.sampled_from(called)))
        return [path, *(inner for child in called for inner in order(child))]

    paths = sorted(path for path in modules if path)
    return CallFacts(
        order=tuple(order("")),
        grad_inputs={path: 0 for path in paths if draw(st.integers(0, 9)) == 0},
        grad_outputs={path: most_outputs for path in paths if draw(st.integers(0, 9)) == 0},
        checkpointed=frozenset(path for path in paths if path.count(".") == 0 and draw(st.booleans())),
        reentrant=draw(st.booleans()),
    )


@st.composite
def trainings(draw: st.DrawFn, model: Model, most_outputs: int) -> list[Pass | OptimizerStep]:
    """Static for most of the time; two variants of the calls take turns at random."""
    variants = [draw(facts_of(model, most_outputs)) for _ in range(draw(st.integers(1, 2)))]
    training: list[Pass | OptimizerStep] = []
    micro_batches = draw(st.integers(1, 2))
    for _ in range(draw(st.integers(2, 4))):
        if draw(st.integers(0, 3)) == 0:
            call = call_tree(model, draw(st.sampled_from(variants)))
            training.append(Pass(MicroBatch(grad_enabled=False), forward_events(call)))
        for index in range(micro_batches):
            facts = draw(st.sampled_from(variants))
            call: Call = call_tree(model, facts)
            training.append(
                Pass(
                    MicroBatch(True, index == micro_batches - 1, index),
                    forward_events(call),
                    backward_events(model, call, facts),
                )
            )
        training.append(OptimizerStep(skipped=draw(st.integers(0, 4)) == 0))
    return training


def deepspeed(model: Model, zero: ZeroSettings) -> Schedule:
    return DeepSpeedSchedule(model, zero, leaves_after=("a.0",))


def layerwise(model: Model, zero: ZeroSettings) -> Schedule:
    needs = {module.path: module.partitions for module in model.modules if module.partitions}
    return LayerwiseSchedule(model, needs, prefetch=zero.stage3_prefetch_bucket_size % 3)


POLICIES: dict[str, Callable[[Model, ZeroSettings], Schedule]] = {
    "deepspeed": deepspeed,
    "layerwise": layerwise,
}
# Layer-wise, the engine reports one pre_backward for each call, whatever its outputs.
MOST_OUTPUTS = {"deepspeed": 2, "layerwise": 1}


def cases(policy: str) -> st.SearchStrategy[tuple[Model, ZeroSettings, list[Pass | OptimizerStep]]]:
    return models().flatmap(
        lambda model: st.tuples(st.just(model), stage3_settings(), trainings(model, MOST_OUTPUTS[policy]))
    )


THOROUGH = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def encloses(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(f"{outer}.")


@dataclass
class Executor:
    """Carries actions out on paper, and fails where a real one would."""

    model: Model
    state: dict[str, str] = field(default_factory=dict)
    used_by: dict[str, list[str]] = field(default_factory=dict)  # module -> partitions it is using
    unreduced: set[str] = field(default_factory=set)

    def carry_out(self, actions: Sequence[object]) -> None:
        parts = {part.name: part for part in self.model.partitions}
        for action in actions:
            if isinstance(action, Gather):
                assert action.partitions
                assert len({parts[name].group for name in action.partitions}) == 1
                assert len({parts[name].dtype for name in action.partitions}) == 1
                for name in action.partitions:
                    assert self.state.get(name, "sharded") == "sharded", f"{name} is gathered again"
                    self.state[name] = "in flight"
            elif isinstance(action, Wait):
                for name in action.partitions:
                    assert self.state[name] == "in flight", f"{name} is not on its way"
                    self.state[name] = "whole"
            elif isinstance(action, Release):
                for name in action.partitions:
                    assert self.state[name] in ("whole", "in flight"), f"{name} is not gathered"
                    self.state[name] = "sharded"
                    for module, used in self.used_by.items():
                        assert name not in used, f"{name} is released under {module}"
            elif isinstance(action, Reduce):
                assert len({parts[name].group for name in action.partitions}) == 1
                for name in action.partitions:
                    assert parts[name].trainable
                    self.unreduced.discard(name)

    def needs(self, module: str, partitions: tuple[str, ...]) -> None:
        for name in partitions:
            assert self.state.get(name) == "whole", f"{module} runs without {name}"
        self.used_by[module] = list(partitions)

    def run(self, schedule: Schedule, part: Pass | OptimizerStep) -> None:
        """One pass or step; which module uses what follows from the events alone."""
        if isinstance(part, OptimizerStep):
            self.carry_out(list(schedule.step_begins()))
            assert set(self.state.values()) <= {"sharded"}, "the optimizer finds gathered parameters"
            self.carry_out(list(schedule.step_ends(skipped=part.skipped)))
            return
        owned = {module.path: module.partitions for module in self.model.modules}
        self.carry_out(list(schedule.forward_begins(part.micro_batch)))
        for event in part.forward:
            self._event(schedule, event, owned)
        self.carry_out(list(schedule.forward_ends()))
        assert not self.used_by
        if not part.micro_batch.grad_enabled:
            return
        self.unreduced = {e.partition for e in part.backward if e.kind is EventKind.GRADIENT_READY}
        for event in part.backward:
            self._event(schedule, event, owned)
        self.used_by.clear()
        self.carry_out(list(schedule.backward_ends()))
        assert not self.unreduced, "gradients are left over"

    def _event(self, schedule: Schedule, event: Event, owned: dict[str, tuple[str, ...]]) -> None:
        for module in list(self.used_by):
            if event.kind in (EventKind.POST_FORWARD, EventKind.POST_BACKWARD):
                ended = encloses(event.module, module)
            else:
                # Without a post_backward of its own, a module is done when an earlier one's backward begins.
                ended = event.kind is EventKind.PRE_BACKWARD and not encloses(module, event.module)
            if ended:
                del self.used_by[module]
        self.carry_out(list(tell(schedule, event)))
        if event.kind in (EventKind.PRE_FORWARD, EventKind.PRE_BACKWARD):
            self.needs(event.module, owned[event.module])


@pytest.mark.parametrize("policy", POLICIES)
@THOROUGH
@given(data=st.data())
def test_nothing_is_used_that_is_not_there_nor_released_while_used(policy, data):
    """The executor checks each action against what is there and in use; it must have had something to check."""
    model, zero, training = data.draw(cases(policy))
    schedule, executor = POLICIES[policy](model, zero), Executor(model)
    for part in training:
        executor.run(schedule, part)
    owned = {module.path: module.partitions for module in model.modules}
    events = [event for part in training if isinstance(part, Pass) for event in part.forward]
    used = {name for e in events if e.kind is EventKind.PRE_FORWARD for name in owned[e.module]}
    assert executor.state.keys() >= used


@pytest.mark.parametrize("policy", POLICIES)
@THOROUGH
@given(data=st.data())
def test_ranks_gather_the_same_whatever_gradients_they_have(policy, data):
    """Gathers follow from the calls: a rank on which some parameter got no gradient issues the same ones."""
    model, zero, training = data.draw(cases(policy))

    def without_gradients(part: Pass | OptimizerStep) -> Pass | OptimizerStep:
        if isinstance(part, OptimizerStep):
            return part
        kept = [event for event in part.backward if event.kind is not EventKind.GRADIENT_READY]
        return Pass(part.micro_batch, part.forward, kept)

    def gathers(parts: Sequence[Pass | OptimizerStep]) -> list[object]:
        answers = drive(POLICIES[policy](model, zero), parts)
        return [answer for answer in answers if isinstance(answer.action, Gather)]

    assert gathers(training) == gathers(training)
    assert gathers(training) == gathers([without_gradients(part) for part in training])


@THOROUGH
@given(case=cases("deepspeed"))
def test_deepspeeds_limits_are_exceeded_only_as_documented(case):
    """A prefetch needs room below max_live and overshoots by less than its largest parameter; only a single
    gradient exceeds a bucket; step() leaves the persistent parameters gathered and nothing else."""
    model, zero, training = case
    numel = {part.name: part.numel for part in model.partitions}
    schedule = DeepSpeedSchedule(model, zero)

    def size(action: Gather | Release | Reduce) -> int:
        return sum(numel[name] for name in action.partitions)

    for part in training:
        if isinstance(part, OptimizerStep):
            schedule.step_begins()
            left = [name for action in schedule.step_ends(skipped=part.skipped) for name in action.partitions]
            assert set(left) == (set() if part.skipped else set(schedule.structure.persistent))
            continue
        schedule.forward_begins(part.micro_batch)
        live = 0
        for event in (*part.forward, *part.backward):
            ahead: list[int] = []
            room = 0
            for action in tell(schedule, event):
                if isinstance(action, Gather) and action.reason is Reason.PREFETCH:
                    room = room if ahead else zero.stage3_max_live_parameters - live
                    ahead += [numel[name] for name in action.partitions]
                if isinstance(action, Reduce):
                    assert size(action) <= zero.reduce_bucket_size or len(action.partitions) == 1
                live += size(action) if isinstance(action, Gather) else 0
                live -= size(action) if isinstance(action, Release) else 0
            assert not ahead or sum(ahead) - max(ahead) < min(room, zero.prefetch_limit)
        if part.micro_batch.grad_enabled:
            schedule.backward_ends()


@THOROUGH
@given(case=cases("deepspeed"))
def test_deepspeed_prefetches_only_along_a_complete_order(case):
    model, zero, training = case
    schedule = DeepSpeedSchedule(model, zero)
    passes = 0
    for part in training:
        answers = list(drive(schedule, [part]))
        passes += isinstance(part, Pass)
        prefetched = [
            a for a in answers if isinstance(a.action, Gather) and a.action.reason is Reason.PREFETCH
        ]
        assert not prefetched or (passes > 1 and zero.prefetch_limit > 0)
        assert all(answer.phase is not Phase.OPTIMIZER for answer in prefetched)
