"""The schedule beside real DeepSpeed, collective by collective from step 0, on settings drawn at random.

deepspeed_recorder.py runs DeepSpeed in two processes and writes down the events and the collectives. Here
the schedule is told the same events and must answer with the same collectives at the same places; for models
that always do the same, it must also predict them from the model and its settings alone.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from z3trace.engine.schedule.deepspeed import DeepSpeedSchedule
from z3trace.engine.schedule.interface import Actions, Collective, Gather, MicroBatch, Reduce
from z3trace.engine.schedule.model_file import DTYPE_BYTES, Description, parse_description
from z3trace.engine.schedule.predict import predict

CASES = {
    "deepspeed_models": 60,  # four of each family
    "transformers_models": 18,  # three of each family
}
ALL = [(family, number) for family, count in CASES.items() for number in range(count)]
SECONDS = 900
WORLD = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(SECONDS + 60),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (the extra `test`)"
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    """What rank 0 saw in each case, after checking that rank 1 saw the same."""

    @cache
    def recorded(family: str) -> list[dict]:
        folder = tmp_path_factory.mktemp(family)
        record(family, folder)
        ranks = [
            [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(WORLD)
        ]
        for first, second in zip(*ranks, strict=True):
            assert first == second
        return ranks[0]

    return recorded


def record(family: str, folder: Path) -> None:
    if family == "transformers_models" and not all(map(importlib.util.find_spec, ("transformers", "peft"))):
        pytest.skip("transformers and peft are not installed")
    script = Path(__file__).with_name("deepspeed_recorder.py")
    outputs = [(folder / f"rank{rank}.txt").open("w+") for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, family, folder, str(rank), str(WORLD), "0", str(CASES[family])],
            env={
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "PYTHONWARNINGS": "ignore",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [process.wait(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        outputs[0].seek(0)
        pytest.fail(f"DeepSpeed ended with {codes}:\n{outputs[0].read()[-4000:]}")


def describe(run: dict) -> Description:
    description, target = run["description"], run["case"]["leaves_after"]
    leaves = [path for path, name in description["classes"].items() if name.endswith(f".{target}")]
    return parse_description({**description, "leaves_after": leaves, "calls": known_calls(run)})


def known_calls(run: dict) -> dict:
    """What a user could tell of the models that do not simply call each module once."""
    family, modules = run["case"]["family"], run["description"]["modules"]
    blocks = [path for path in modules if path.startswith("blocks.") and path.count(".") == 1]
    adapters = [path for path in modules if path.endswith(".qkv")]
    if family == "Unused":
        return {"order": [path for path in modules if path not in ("blocks", "spare", "frozen")]}
    if family == "Shared":
        block = [path for path in modules if path.startswith("blocks.0")]
        return {"order": ["", "embed", *block * run["case"]["depth"], "norm", "head"]}
    if family == "Keywords":
        return {"grad_inputs": dict.fromkeys(blocks, 0)}
    if family == "Pairs":
        return {"grad_inputs": dict.fromkeys(blocks, 2), "grad_outputs": dict.fromkeys(blocks, 2)}
    if family == "ReadingLora":
        return {"reads": {path: [f"{path}.lora_A.default.weight"] for path in adapters}}
    if family == "LooseBias":
        return {"returns": {f"{path}.mlp.fc2": [f"{path}.mlp.fc2.bias"] for path in blocks}}
    if family in ("Checkpointed", "Reentrant"):
        return {"checkpointed": blocks, "reentrant": family == "Reentrant"}
    if family in ("checkpointed_llama", "reentrant_llama"):
        layers = [path for path in modules if path.startswith("model.layers.") and path.count(".") == 2]
        return {"checkpointed_bodies": layers, "reentrant": family == "reentrant_llama"}
    if family == "CheckpointedLora":
        return {"checkpointed": blocks[1:]}
    return {}


def tell(schedule: DeepSpeedSchedule, event: list) -> Actions:
    kind, *what = event
    match kind:
        case "begin":
            return schedule.forward_begins(MicroBatch(grad_enabled=what[0]))
        case "pre_forward":
            return schedule.pre_forward(what[0], recompute=what[1])
        case "post_forward":
            return schedule.post_forward(what[0], recompute=what[1])
        case "read":
            return schedule.parameter_read(*what)
        case "returned":
            return schedule.parameter_returned(*what)
        case "pre_backward":
            return schedule.pre_backward(*what)
        case "gradient":
            return schedule.gradient_ready(*what)
        case "leaf_backward":
            return schedule.post_backward(*what)
        case "post_backward":
            # Of a leaf with gradients DeepSpeed has two hooks in a row; the schedule hears of the first.
            return [] if what[0] in schedule.structure.gradient_leaves else schedule.post_backward(*what)
        case "backward_ends":
            return schedule.backward_ends()
        case "step_begins":
            return schedule.step_begins()
        case "step_ends":
            return schedule.step_ends()
    raise AssertionError(event)


def is_collective(entry: list) -> bool:
    return entry[0] in ("gather", "reduce")


def by_group(entries: list) -> list:
    """Collectives of one place, ordered by process group: DeepSpeed takes groups in the order of addresses."""
    return sorted(entries, key=lambda entry: entry[4])


class Answers:
    """A schedule's actions in the form in which the recorder writes collectives."""

    def __init__(self, description: Description) -> None:
        self.parts = {part.name: part for part in description.model.partitions}

    def of(self, actions: Actions) -> list[list]:
        return [self._entry(action) for action in actions if isinstance(action, (Gather, Reduce))]

    def _entry(self, action: Gather | Reduce) -> list:
        parts = [self.parts[name] for name in action.partitions]
        dtype = action.dtype or parts[0].dtype
        padded = [-(-part.numel // WORLD) * WORLD for part in parts]
        if isinstance(action, Gather):
            group = action.group or parts[0].group
            return ["gather", action.collective.value, sum(padded), dtype, group, list(action.partitions)]
        whole = action.collective is Collective.ALL_REDUCE
        numel = sum(part.numel for part in parts) if whole else sum(padded)
        return ["reduce", action.collective.value, numel, dtype, parts[0].group, list(action.partitions)]


@pytest.mark.parametrize(("family", "number"), ALL)
def test_same_events_give_the_same_collectives(runs, family, number):
    run = runs(family)[number]
    assert run["error"] is None
    description = describe(run)
    schedule = DeepSpeedSchedule(
        description.model, description.settings, autocast_dtypes=description.autocast_dtypes,
        leaves_after=description.leaves_after,
    )  # fmt: skip
    answers = Answers(description)
    reduced, really_reduced = [], []
    log = [entry for entry in run["log"] if entry[0] != "norm"]
    for place, event in enumerate(log):
        if is_collective(event):
            continue
        following = log[place + 1 :]
        real = list(iter_while(is_collective, following))
        answer = answers.of(tell(schedule, event))
        gathers = [entry for entry in answer if entry[0] == "gather"]
        real_gathers = [entry for entry in real if entry[0] == "gather"]
        assert by_group(gathers) == by_group(real_gathers), (place, event)
        reduced += [entry for entry in answer if entry[0] == "reduce"]
        really_reduced += [entry for entry in real if entry[0] == "reduce"]
        if event[0] == "backward_ends":
            assert reduced == really_reduced, (place, event)
    assert reduced == really_reduced
    assert reduced


def iter_while(condition, items):
    for item in items:
        if not condition(item):
            return
        yield item


def real_predictions(run: dict) -> list[tuple]:
    """The log's collectives with the step, phase and module they belong to."""
    step, phase, module, found = -1, "optimizer", "", []
    for entry in run["log"]:
        if is_collective(entry):
            verb, kind, numel, dtype, group, partitions = entry
            where = module if verb == "gather" else ""
            found.append((step, phase, where, kind, numel * DTYPE_BYTES[dtype], group, tuple(partitions)))
            continue
        kind, *what = entry
        if kind == "norm":
            found.append((step, "optimizer", "", "all_reduce", 8, what[0], ()))
        elif kind == "step_begins":
            phase, module = "optimizer", ""
        elif kind == "begin":
            step += phase == "optimizer"
            phase, module = "forward", ""
        elif kind == "backward_ends":
            phase, module = "backward", ""
        elif kind in ("pre_forward", "post_forward"):
            phase, module = ("backward" if what[1] else "forward"), what[0]
        elif kind in ("read", "returned"):
            module = what[0]
        elif kind in ("pre_backward", "post_backward", "leaf_backward", "gradient"):
            phase, module = "backward", what[0]
    return found


def gathers_and_rest(entries: list[tuple]) -> tuple[list[tuple], list[tuple]]:
    """Gathers by place and group, and the reductions and norms: the two interleave as autograd likes."""
    gathers = [entry for entry in entries if entry[3] == "all_gather" or entry[1] == "forward" or entry[2]]
    rest = [entry for entry in entries if entry not in gathers]
    places = groupby(gathers, key=lambda entry: entry[:3])
    return [entry for _, place in places for entry in sorted(place, key=lambda entry: entry[5])], sorted(
        rest, key=lambda entry: (entry[0], entry[1])
    )


@pytest.mark.parametrize(("family", "number"), ALL)
def test_a_static_model_is_predicted_from_its_description(runs, family, number):
    run = runs(family)[number]
    if run["case"]["family"] in ("Moe", "Dynamic"):
        pytest.skip("what this model calls depends on its data")
    predicted = [
        (one.step, one.phase.value, one.module, one.kind.value, one.bytes, one.group, one.partitions)
        for one in predict(describe(run), run["case"]["steps"], evaluate_before=run["case"]["evaluations"])
    ]
    gathers, rest = gathers_and_rest(predicted)
    real_gathers, real_rest = gathers_and_rest(real_predictions(run))
    assert gathers == real_gathers
    assert rest == real_rest


def test_the_cases_cover_what_the_schedule_can_do(runs):
    cases = runs("deepspeed_models")
    events = {entry[0] for run in cases for entry in run["log"]}
    assert {"read", "returned", "leaf_backward", "post_backward", "norm"} <= events
    collectives = {(entry[1], entry[4]) for run in cases for entry in run["log"] if entry[0] == "gather"}
    assert {("all_gather", ""), ("all_gather", "secondary"), ("all_gather", "experts")} <= collectives
    assert ("all_reduce", "") in collectives
    reductions = {entry[1] for run in cases for entry in run["log"] if entry[0] == "reduce"}
    assert reductions == {"reduce_scatter", "all_reduce"}
    assert any(entry[0] == "pre_forward" and entry[2] for run in cases for entry in run["log"])
    assert sum(bool(run["case"]["evaluations"]) for run in cases) >= 10
    assert {run["case"]["zero"].get("stage3_module_granularity_threshold", 0) > 0 for run in cases} == {
        True,
        False,
    }
