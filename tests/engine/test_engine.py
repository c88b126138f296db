"""The engine as others see it: descriptions, counters, observers, collectives, imports."""

import json
import subprocess
import sys
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from worlds import run_world

import z3trace.engine as z3
from z3trace.engine.collectives import Communicator, all_gather, received_mean, reduce_scatter
from z3trace.engine.counter import KEPT_STEPS, CollectiveCounter, Progress
from z3trace.engine.schedule.interface import Phase
from z3trace.engine.world import world_group
from z3trace.errors import UserError


def test_labels_and_schedule_need_no_torch() -> None:
    code = (
        "import sys, z3trace.engine as z3, z3trace.engine.labels, z3trace.engine.schedule.layerwise\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "z3.ZeroConfig\n"
        "try:\n    z3.nothing\nexcept AttributeError as error:\n    assert 'nothing' in str(error)\n"
        "else:\n    raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.usefixtures("alone")
class TestAlone:
    def test_describe_is_json_and_complete(self) -> None:
        model = models.build("Frozen")
        engine = z3.initialize(
            model, torch.optim.SGD, {"z3trace": {"unit": "block"}, "bf16": {"enabled": True}}
        )
        engine(models.batch(0, 0, 1))
        described = engine.describe()
        assert json.loads(json.dumps(described)) == described
        assert (described["framework"], described["schedule"], described["world_size"]) == (
            "z3trace",
            "layerwise",
            1,
        )
        assert (described["rank"], described["device"], described["dtype"]) == (0, "cpu", "bfloat16")
        assert [m["path"] for m in described["modules"]] == [path for path, _ in model.named_modules()]
        order = described["call_order"]
        assert order[:4] == ["", "embedding", "layers.0", "layers.0.norm"] and len(order) == len(set(order))
        assert "adapters" not in order
        parameters = described["parameters"]
        assert parameters["layers.1.up.a.weight"] == {
            "shape": [2, 7], "numel": 14, "dtype": "bfloat16", "trainable": True, "persistent": False,
        }  # fmt: skip
        assert not parameters["layers.0.gain"]["trainable"]
        unit = next(u for u in described["units"] if u["name"] == "layers.1")
        assert (
            unit["numel"] == 2 * 7 + 15 * 2 and unit["padded_numel"] == unit["shard_numel"] == unit["numel"]
        )

    def test_observers_hear_of_engines_and_steps(self) -> None:
        heard: list[tuple[Any, ...]] = []

        class Observer:
            def engine_created(self, engine: z3.Engine) -> None:
                heard.append(("created", engine))

            def step_started(self, engine: z3.Engine, step: int) -> None:
                heard.append(("started", engine, step))

            def step_finished(self, engine: z3.Engine, step: int) -> None:
                heard.append(("finished", engine, step, engine.global_steps))

        observer = Observer()
        z3.add_observer(observer)
        try:
            engine = z3.initialize(models.build("Chain"), torch.optim.SGD, {"gradient_accumulation_steps": 2})
            with torch.no_grad():
                engine(models.batch(9, 0, 1))
            for index in range(4):
                engine.backward(engine(models.batch(index, 0, 1)))
                engine.step()
        finally:
            z3.remove_observer(observer)
        z3.initialize(models.build("Chain"), torch.optim.SGD)
        assert heard == [
            ("created", engine), ("started", engine, 0), ("finished", engine, 0, 1),
            ("started", engine, 1), ("finished", engine, 1, 2),
        ]  # fmt: skip

    def test_dead_settings_are_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        config = {"zero_optimization": {"allgather_bucket_size": 1e8}}
        engine = z3.initialize(models.build("Chain"), torch.optim.SGD, config)
        assert engine.dead_settings == ("zero_optimization.allgather_bucket_size",)
        assert "zero_optimization.allgather_bucket_size" in caplog.text

    def test_models_that_cannot_be_sharded_are_refused(self) -> None:
        for change, message in (
            (lambda m: m.double(), "float64: set bf16.enabled, or call model.float"),
            (lambda m: m.bfloat16(), "bfloat16: set bf16.enabled"),
            (lambda m: m.to("meta"), "no values"),
            (lambda m: m.register_parameter("c", torch.nn.Parameter(torch.ones(1) * 1j)), "complex"),
        ):
            model = models.build("Chain")
            change(model)
            with pytest.raises(UserError, match=message):
                z3.initialize(model, torch.optim.SGD)


def test_counter_keeps_the_latest_steps() -> None:
    progress = Progress()
    counter = CollectiveCounter(progress)
    for step in range(3 * KEPT_STEPS):
        progress.step = step
        progress.phase = Phase.FORWARD
        counter.add("all_gather", 8, phase=progress.phase, unit="a", module="m", reason="demand")
        counter.add("all_gather", 8, phase=progress.phase, unit="a", module="m", reason="demand")
        progress.phase = Phase.BACKWARD
        counter.add("reduce_scatter", 16, phase=progress.phase, unit="a", module="m", reason="")
    rows = counter.rows()
    assert KEPT_STEPS <= len({row["step"] for row in rows}) <= 2 * KEPT_STEPS + 1
    last = 3 * KEPT_STEPS - 1
    assert [r for r in rows if r["step"] == last] == [
        {"step": last, "micro_batch": 0, "phase": "forward", "kind": "all_gather", "unit": "a", "module": "m",
         "reason": "demand", "count": 2, "bytes": 16},
        {"step": last, "micro_batch": 0, "phase": "backward", "kind": "reduce_scatter", "unit": "a", "module": "m",
         "reason": "", "count": 1, "bytes": 16},
    ]  # fmt: skip
    assert counter.totals(last) == {
        ("forward", "all_gather"): {"count": 2, "bytes": 16},
        ("backward", "reduce_scatter"): {"count": 1, "bytes": 16},
    }
    assert counter.totals()["backward", "reduce_scatter"]["count"] == len({row["step"] for row in rows})


def collectives() -> list[bool]:
    comm = Communicator(world_group())
    shard = torch.arange(5.0) + 10 * comm.rank
    whole = torch.empty(5 * comm.size)
    all_gather(whole, shard, comm).wait()
    right = [torch.equal(whole, torch.cat([torch.arange(5.0) + 10 * r for r in range(comm.size)]))]
    for dtype in (torch.float32, torch.bfloat16):
        full = torch.arange(5.0 * comm.size).to(dtype) * (comm.rank + 1)
        received = torch.empty_like(full)
        reduce_scatter(received, full, comm).wait()
        total = sum(term.float() * weight for term, weight in received_mean(received, comm))
        mean = torch.arange(5.0 * comm.size).view(comm.size, 5)[comm.rank] * (comm.size + 1) / 2
        right.append(torch.allclose(total, mean, rtol=1e-6 if dtype is torch.float32 else 1e-2))
    return right


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 3])
def test_collectives_give_every_rank_its_part(world: int) -> None:
    assert run_world(collectives, world) == [[True] * 3] * world


def follows_rank_zero() -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = models.Buffers()
    engine = z3.initialize(model, torch.optim.SGD)
    with z3.gathered(engine):
        values = [*model.parameters(), *model.buffers()]
        return [float(value.detach().double().sum()) for value in values]


@pytest.mark.distributed
def test_weights_and_buffers_are_those_of_rank_zero() -> None:
    first, second = run_world(follows_rank_zero, 2)
    torch.manual_seed(0)
    own = models.Buffers()
    assert first == second
    assert first == pytest.approx(
        [float(v.detach().double().sum()) for v in (*own.parameters(), *own.buffers())]
    )
