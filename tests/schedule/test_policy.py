"""DeepSpeed's rules one by one, each on the smallest model that shows it."""

import pytest

from z3trace.engine.schedule.deepspeed import DeepSpeedSchedule
from z3trace.engine.schedule.interface import (
    SECONDARY_GROUP,
    Collective,
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
from z3trace.engine.schedule.recorder import ScheduleError
from z3trace.engine.schedule.settings import ZeroSettings
from z3trace.errors import UserError

BARE = {
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
}


def line(*parts: Partition) -> Model:
    """A root with one child module for each partition."""
    modules = [Module(part.name.upper(), "Layer", (part.name,)) for part in parts]
    root = Module("", "Net", (), tuple(module.path for module in modules))
    return Model((root, *modules), parts)


def part(name: str, numel: int = 10, **more) -> Partition:
    return Partition(name, (name,), numel, **more)


def schedule(model: Model, **settings) -> DeepSpeedSchedule:
    return DeepSpeedSchedule(model, ZeroSettings(**{**BARE, **settings}))


def forward(policy: DeepSpeedSchedule, *modules: str) -> list:
    actions = [*policy.forward_begins(MicroBatch()), *policy.pre_forward("")]
    for module in modules:
        actions += [*policy.pre_forward(module), *policy.post_forward(module)]
    return [*actions, *policy.post_forward("")]


def train(policy: DeepSpeedSchedule, *modules: str) -> list:
    """One micro-batch of modules called in a row."""
    actions = [*forward(policy, *modules), *policy.pre_backward("")]
    for module in reversed(modules):
        actions += policy.pre_backward(module)
        actions += policy.gradient_ready(module.lower())
        actions += policy.post_backward(module)
    return [*actions, *policy.backward_ends()]


def gathered(actions) -> list[tuple[str, ...]]:
    return [action.partitions for action in actions if isinstance(action, Gather)]


def test_a_fetch_is_a_gather_and_a_wait_and_ends_in_a_release():
    policy = schedule(line(part("a")))
    policy.forward_begins(MicroBatch())
    assert policy.pre_forward("A") == [Gather(("a",), "A", Phase.FORWARD, Reason.DEMAND), Wait(("a",), "A")]
    assert policy.post_forward("A") == [Release(("a",), "A")]


def test_the_order_is_recorded_used_and_lost():
    policy = schedule(line(part("a"), part("b")), stage3_prefetch_bucket_size=100)
    modes = []
    for modules in ("AB", "AB", "BA", "AB", "AB"):
        train(policy, *modules)
        modes.append(policy.mode)
    assert modes == ["record", "complete", "invalid", "record", "complete"]


def test_a_shorter_pass_keeps_the_order():
    policy = schedule(line(part("a"), part("b")))
    train(policy, "A", "B")
    forward(policy, "A", "B")
    assert policy.mode == "complete"
    train(policy, "A", "B")
    assert policy.mode == "complete"


def test_losing_the_order_waits_for_what_is_in_flight_and_releases_it():
    policy = schedule(line(part("a"), part("b"), part("c")), stage3_prefetch_bucket_size=100)
    train(policy, "A", "B", "C")
    policy.forward_begins(MicroBatch())
    assert gathered(policy.pre_forward("")) == [("a", "b", "c")]
    assert policy.pre_forward("B") == [
        Wait(("a", "b", "c"), ""),
        Release(("a", "b", "c"), ""),
        Gather(("b",), "B", Phase.FORWARD, Reason.DEMAND),
        Wait(("b",), "B"),
    ]


def test_prefetching_overshoots_by_a_parameter_and_runs_ahead_into_backward():
    policy = schedule(line(*(part(name) for name in "abcdef")), stage3_prefetch_bucket_size=15)
    train(policy, *"ABCDEF")
    gathers = [action for action in train(policy, *"ABCDEF") if isinstance(action, Gather)]
    # At C all of forward is on its way, c to f are seen to be needed later, and a and b are gathered again.
    assert [(gather.module, gather.partitions) for gather in gathers] == [
        ("", ("a", "b")),
        ("A", ("c", "d")),
        ("B", ("e", "f")),
        ("C", ("a", "b")),
    ]
    assert {(gather.phase, gather.reason) for gather in gathers} == {(Phase.FORWARD, Reason.PREFETCH)}


def test_live_parameters_limit_prefetching_only():
    policy = schedule(
        line(part("a"), part("b"), part("c")), stage3_prefetch_bucket_size=100, stage3_max_live_parameters=15
    )
    train(policy, "A", "B", "C")
    gathers = [action for action in forward(policy, "A", "B", "C") if isinstance(action, Gather)]
    # At A 20 elements are live; at B and C, a module later, 10: there is room for one more parameter.
    assert [(gather.module, gather.partitions) for gather in gathers] == [
        ("", ("a", "b")),
        ("B", ("c",)),
        ("C", ("b",)),
    ]
    policy = schedule(line(part("a")), stage3_prefetch_bucket_size=100, stage3_max_live_parameters=0)
    train(policy, "A")
    gathers = [action for action in train(policy, "A") if isinstance(action, Gather)]
    assert [gather.reason for gather in gathers] == [Reason.DEMAND, Reason.DEMAND]


def test_a_decision_to_keep_is_never_taken_again():
    """b is kept at the end of the first complete forward; with the order lost, kept it stays."""
    policy = schedule(line(part("a"), part("b")), stage3_max_reuse_distance=5)
    train(policy, "A", "B")
    assert gathered(train(policy, "A", "B")) == [("a",), ("b",), ("a",)]
    train(policy, "B", "A")
    train(policy, "B", "A")
    # Recorded anew as B, A. The memo for (B, step 3) is of the old order, in which B was the last of forward.
    assert gathered(train(policy, "B", "A")) == [("b",), ("a",), ("b",)]


def test_persistent_parameters_are_released_while_recording_and_gathered_after_the_step():
    policy = schedule(line(part("a", 5), part("b", 50)), stage3_param_persistence_threshold=10)
    assert gathered(train(policy, "A", "B")) == [("a",), ("b",), ("b",), ("a",)]
    policy.step_begins()
    assert policy.step_ends() == [
        Gather(("a",), "", Phase.OPTIMIZER, Reason.POST_STEP),
        Wait(("a",), ""),
    ]
    assert gathered(train(policy, "A", "B")) == [("b",), ("b",)]
    assert policy.step_begins() == [Release(("a",), "")]


def test_a_skipped_step_gathers_nothing():
    policy = schedule(line(part("a", 5)), stage3_param_persistence_threshold=10)
    train(policy, "A")
    policy.step_begins()
    assert policy.step_ends(skipped=True) == []


def test_one_fetch_is_one_collective_for_each_dtype_and_group():
    model = Model(
        (Module("", "Net", ("a", "b", "c", "d")),),
        (part("a"), part("b", dtype="bfloat16"), part("c"), part("d", group="experts")),
    )
    policy = schedule(model)
    policy.forward_begins(MicroBatch())
    assert gathered(policy.pre_forward("")) == [("b",), ("a", "c"), ("d",)]


def test_autocast_decides_the_dtype_of_a_fetch_and_of_its_bucket():
    model = Model((Module("", "Net", ("a", "b")),), (part("a"), part("b")))
    autocast = {"a": "bfloat16", "b": "float32"}
    policy = DeepSpeedSchedule(model, ZeroSettings(**BARE), autocast_dtypes=autocast)
    policy.forward_begins(MicroBatch())
    gathers = [action for action in policy.pre_forward("") if isinstance(action, Gather)]
    assert [(gather.partitions, gather.dtype) for gather in gathers] == [
        (("a",), "bfloat16"),
        (("b",), "float32"),
    ]
    policy.gradient_ready("b")
    policy.gradient_ready("a")
    reductions = [action for action in policy.backward_ends() if isinstance(action, Reduce)]
    assert [(one.partitions, one.dtype) for one in reductions] == [(("a",), "bfloat16"), (("b",), "float32")]


def test_fetching_by_all_reduce_takes_one_dtype():
    model = Model((Module("", "Net", ("a", "b")),), (part("a"), part("b")))
    policy = schedule(model, stage3_use_all_reduce_for_fetch_params=True)
    policy.forward_begins(MicroBatch())
    assert policy.pre_forward("")[0].collective is Collective.ALL_REDUCE
    mixed = Model(model.modules, (part("a"), part("b", dtype="bfloat16")))
    policy = schedule(mixed, stage3_use_all_reduce_for_fetch_params=True)
    policy.forward_begins(MicroBatch())
    with pytest.raises(UserError, match="several dtypes together"):
        policy.pre_forward("")


def test_second_shards_serve_until_the_step_and_for_frozen_parameters_beyond():
    model = line(part("a"), part("b", trainable=False))
    policy = schedule(model, zero_hpz_partition_size=2)

    def groups() -> list[tuple[str, str]]:
        actions = train(policy, "A", "B")
        return [(one.partitions[0], one.group) for one in actions if isinstance(one, Gather)]

    assert {group for _, group in groups()} == {SECONDARY_GROUP}  # made when the model was sharded
    policy.step_begins()
    policy.step_ends()
    first = groups()
    assert first == [("a", ""), ("b", SECONDARY_GROUP), ("b", SECONDARY_GROUP), ("a", SECONDARY_GROUP)]


def test_a_parameter_read_elsewhere_belongs_to_its_reader_from_then_on():
    policy = schedule(line(part("a"), part("b")))
    policy.forward_begins(MicroBatch())
    policy.pre_forward("A")
    assert policy.parameter_read("A", "b") == [
        Gather(("b",), "A", Phase.FORWARD, Reason.DEMAND),
        Wait(("b",), "A"),
    ]
    assert policy.parameter_read("A", "b") == []
    assert policy.post_forward("A") == [Release(("a", "b"), "A")]
    assert gathered(policy.pre_forward("A")) == [("a", "b")]


def test_a_returned_parameter_stays_until_the_step():
    policy = schedule(line(part("a")))
    policy.forward_begins(MicroBatch())
    policy.pre_forward("")
    policy.pre_forward("A")
    assert policy.parameter_returned("A", "a") == []
    assert policy.post_forward("A") == []
    assert policy.post_forward("") == []
    assert policy.step_begins() == [Release(("a",), "")]


def test_frozen_parameters_that_a_recompute_fetched_stay_for_the_backward_around_it():
    policy = schedule(line(part("a"), part("b", trainable=False)))
    train(policy, "A", "B")
    forward(policy, "A", "B")
    policy.pre_backward("")
    policy.pre_backward("A")
    assert policy.pre_forward("B", recompute=True)[0].reason is Reason.RECOMPUTE
    assert policy.post_forward("B", recompute=True) == []
    assert policy.post_backward("A") == [Release(("a", "b"), "A")]


def test_leaves_reduce_their_gradients_at_once_and_those_without_one_as_zeros():
    model = Model(
        (
            Module("", "Net", (), ("moe",)),
            Module("moe", "Moe", (), ("moe.0", "moe.1")),
            Module("moe.0", "Expert", ("x",)),
            Module("moe.1", "Expert", ("y",)),
        ),
        (part("x"), part("y")),
    )
    policy = DeepSpeedSchedule(model, ZeroSettings(**BARE, reduce_bucket_size=1), leaves=("moe",))
    policy.forward_begins(MicroBatch())
    assert gathered(policy.pre_forward("moe")) == [("x", "y")]
    assert policy.pre_forward("moe.0") == []
    policy.pre_backward("moe")
    assert policy.gradient_ready("x") == []
    reductions = [one for one in policy.post_backward("moe") if isinstance(one, Reduce)]
    assert reductions == [Reduce(("x",))]
    assert [one for one in policy.backward_ends() if isinstance(one, Reduce)] == [Reduce(("y",))]


def test_buckets_count_elements_and_keep_process_groups_apart():
    parts = [part("a", 4), part("b", 4), part("c", 20), part("d", 2), part("e", 2, group="experts")]
    policy = schedule(line(*parts), reduce_bucket_size=10)
    answers = {name: policy.gradient_ready(name) for name in "badce"}
    assert answers["b"] == answers["a"] == answers["d"] == []
    assert answers["c"] == [Reduce(("a", "b", "d"))]  # in the order in which they were sharded
    assert answers["e"] == [Reduce(("c",))]
    assert policy.backward_ends() == [Reduce(("e",))]


def test_without_reduce_scatter_buckets_that_fit_are_all_reduced():
    policy = schedule(line(part("a", 20), part("b", 4)), reduce_bucket_size=10, reduce_scatter=False)
    policy.gradient_ready("a")
    assert policy.gradient_ready("b") == [Reduce(("a",))]  # does not fit the contiguous buffer
    assert policy.backward_ends() == [Reduce(("b",), collective=Collective.ALL_REDUCE)]


def test_calls_that_fit_no_order_stop_as_in_deepspeed():
    """A parameter that becomes external after the order was recorded is not in the queue."""
    policy = schedule(line(part("a"), part("b"), part("c")))
    train(policy, "A", "B", "C")
    policy.forward_begins(MicroBatch())
    policy.pre_forward("")
    policy.pre_forward("A")
    policy.parameter_read("A", "c")
    policy.post_forward("A")
    policy.pre_forward("B")
    policy.pre_forward("C")
    policy.post_forward("C")
    policy.post_forward("B")
    policy.post_forward("")
    for module in ("", "C", "B"):
        policy.pre_backward(module)
    with pytest.raises(ScheduleError, match="tracing error at fetch 7"):
        policy.pre_backward("A")
