"""Every collective is seen alike by the trace, by the engine's counter and by the schedule alone."""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from training import Training
from worlds import run_world

import z3trace.engine as z3
from z3trace.engine import layout
from z3trace.engine.labels import parse_label
from z3trace.engine.schedule.interface import Actions, Gather, MicroBatch, Reduce, Schedule
from z3trace.engine.schedule.layerwise import LayerwiseSchedule

ACCUMULATION = 2
LAYERS = 4


@dataclass(frozen=True)
class Call:
    module: str
    inner: tuple["Call", ...] = field(default=())


def calls(unit: str) -> tuple[Call, ...]:
    """What the forward of `Chain` calls, as far as a schedule of these units hears of it."""
    if unit == "block":
        return tuple(Call(f"layers.{i}") for i in range(LAYERS))
    inner = ("norm", "up", "down")
    blocks = (Call(f"layers.{i}", tuple(Call(f"layers.{i}.{name}") for name in inner)) for i in range(LAYERS))
    return (Call("embedding"), *blocks, Call("norm"), Call("head"))


def drive(schedule: Schedule, inner: tuple[Call, ...], steps: int) -> list[Actions]:
    """The schedule's answers to trainings steps of a model that calls these modules; one list per step."""
    answers: list[list[Any]] = []

    def forward(call: Call) -> None:
        answers[-1] += schedule.pre_forward(call.module)
        for child in call.inner:
            forward(child)
        answers[-1] += schedule.post_forward(call.module)

    def backward(call: Call) -> None:
        answers[-1] += schedule.pre_backward(call.module)
        for child in reversed(call.inner):
            backward(child)
        answers[-1] += schedule.post_backward(call.module)

    for _ in range(steps):
        answers.append([])
        for index in range(ACCUMULATION):
            answers[-1] += schedule.forward_begins(MicroBatch(True, index == ACCUMULATION - 1, index))
            forward(Call("", inner))
            answers[-1] += schedule.forward_ends()
            backward(Call("", inner))
            answers[-1] += schedule.backward_ends()
        answers[-1] += schedule.step_begins()
        answers[-1] += schedule.step_ends()
    return answers


def by_schedule(unit: str, world: int, step: int) -> list[tuple[Any, ...]]:
    """(kind, unit, issuing module, reason, bytes) of each collective of the step, from the model alone."""
    model = models.build("Chain")
    planned = layout.plan_units(model, unit, (), {})
    seen = layout.describe_model(model, planned.partitions, torch.float32)
    schedule = LayerwiseSchedule(seen, planned.needs)
    size = {p.name: -(-p.numel // world) * world * 4 for p in seen.partitions}
    found: list[tuple[Any, ...]] = []
    for action in drive(schedule, calls(unit), step + 1)[step]:
        if isinstance(action, Gather):
            (name,) = action.partitions
            found.append(("all_gather", name, action.module, action.reason.value, size[name]))
        elif isinstance(action, Reduce):
            (name,) = action.partitions
            found.append(("reduce_scatter", name, action.module, "", size[name]))
    return found


OPERATIONS = {
    "gather": ("all_gather", "c10d::_allgather_base_"),
    "reduce": ("reduce_scatter", "c10d::alltoall_base_"),
}


def by_trace(path: Path) -> list[tuple[Any, ...]]:
    """The same from the labels; each must hold exactly one collective, of as many bytes as it says."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    issued = sorted((e for e in events if e["name"].startswith("c10d::")), key=lambda e: e["ts"])
    found, labelled = [], 0
    for event in sorted(events, key=lambda e: e["ts"]):
        label = parse_label(event["name"])
        if label is None or label.verb not in OPERATIONS:
            continue
        kind, operation = OPERATIONS[label.verb]
        inside = [
            e
            for e in issued
            if e["tid"] == event["tid"]
            and event["ts"] <= e["ts"]
            and e["ts"] + e["dur"] <= event["ts"] + event["dur"]
        ]
        assert [e["name"] for e in inside] == [operation]
        assert 4 * inside[0]["args"]["Input Dims"][0][0] == label.integer("bytes")
        assert label.integer("world") == dist.get_world_size()
        assert event["cat"] == "user_annotation"
        found.append((
            kind, label.text("unit"), label.text("module"), label.text("reason") or "", label.integer("bytes"),
        ))  # fmt: skip
        labelled += 1
    assert [e["name"] for e in issued if e["name"] not in ("c10d::allreduce_",)] and labelled == sum(
        e["name"] != "c10d::allreduce_" for e in issued
    )
    return found


def three_views(unit: str) -> dict[str, Any]:
    training = Training(accumulation=ACCUMULATION)
    engine = z3.initialize(models.build("Chain"), training.make_optimizer, training.config(unit=unit))
    measured = 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for step in range(measured + 1):
            batches = training.batches(step)
            if step < measured:
                _step(engine, batches)
                continue
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
                _step(engine, batches)
            profiler.export_chrome_trace(str(path))
        traced = by_trace(path)
    rows = [row for row in engine.counter.rows() if row["step"] == measured]
    return {"trace": traced, "rows": rows, "totals": engine.counter.totals(measured)}


def _step(engine: Any, batches: list[torch.Tensor]) -> None:
    for tokens in batches:
        engine.backward(engine(tokens))
        engine.step()


def aggregate(collectives: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[int]]:
    table: dict[tuple[Any, ...], list[int]] = {}
    for *key, size in collectives:
        row = table.setdefault(tuple(key), [0, 0])
        row[0] += 1
        row[1] += size
    return table


@pytest.mark.distributed
@pytest.mark.parametrize("unit", ["block", "module"])
@pytest.mark.parametrize("world", [2, 3])
def test_trace_counter_and_schedule_agree(world: int, unit: str) -> None:
    expected = by_schedule(unit, world, step=2)
    for seen in run_world(three_views, world, unit):
        assert seen["trace"] == expected
        counted: dict[tuple[Any, ...], list[int]] = {}
        for row in seen["rows"]:
            if row["kind"] != "all_reduce":
                at = counted.setdefault(
                    (row["kind"], row["unit"], row["module"], row["reason"].replace("gradient", "")), [0, 0]
                )
                at[0] += row["count"]
                at[1] += row["bytes"]
        assert counted == aggregate(expected)
        assert seen["totals"]["optimizer", "all_reduce"] == {"count": 1, "bytes": 8}


@pytest.mark.parametrize(
    ("unit", "forward", "backward", "reductions"),
    [("block", 5 + 3, 3 + 3, 2 * 5), ("module", 19 + 18, 18 + 18, 2 * 19)],
)
def test_steady_state_counts(unit: str, forward: int, backward: int, reductions: int) -> None:
    """Two micro-batches of 4 layers: the root's unit once a step, the others once a pass, and neither the
    last of forward nor the last of backward a second time."""
    actions = by_schedule(unit, 2, step=3)
    gathers = [a for a in actions if a[0] == "all_gather"]
    assert len(gathers) == forward + backward
    assert len(actions) - len(gathers) == reductions
