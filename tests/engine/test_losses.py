"""The engine trains as DistributedDataParallel does, whatever the world, the units and the accumulation."""

from itertools import product
from typing import Any

import pytest
from training import Training, compare
from worlds import run_world

TOLERANCE = {1: 1e-6, 2: 1e-6, 3: 1e-5, 4: 1e-5}


def against_ddp(cases: list[tuple[int, str]]) -> dict[str, dict[str, float]]:
    found = {}
    for accumulation, unit in cases:
        training = Training(accumulation=accumulation)
        reference = training.by_ddp()
        assert reference.losses[-1] < 0.8 * reference.losses[0]
        run, _ = training.by_engine(unit=unit)
        found[f"accumulation {accumulation}, unit {unit}"] = compare(run, reference)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_losses_gradients_and_weights_equal_ddp(world: int) -> None:
    cases = [(1, "block"), (4, "block")] + [(1, "module")] * (world < 4)
    for differences in run_world(against_ddp, world, cases):
        assert len(differences) == len(cases)
        for difference in differences.values():
            assert difference["loss"] <= TOLERANCE[world]
            assert difference["gradient"] <= 1e-6
            assert difference["parameter"] <= 20 * TOLERANCE[world]


def mixed_precision() -> list[dict[str, float]]:
    training = Training(bf16=True)
    exact = Training().by_ddp()
    found = []
    for unit in ("block", "module"):
        run, engine = training.by_engine(unit=unit)
        assert {p.shard.dtype for p in engine.partitions.values()} == {engine.dtype}
        found.append(
            {
                "fp32": compare(run, exact)["loss"],
                "replicas": compare(run, training.by_replicas())["loss"],
            }
        )
    return found


@pytest.mark.distributed
def test_bf16_stays_near_fp32_and_nearer_to_bf16_replicas() -> None:
    for rank in run_world(mixed_precision, 2):
        for difference in rank:
            assert difference["fp32"] <= 2e-2
            assert difference["replicas"] <= 2e-2


def settings() -> dict[tuple[Any, ...], float]:
    found = {}
    for optimizer, clipping, prefetch in product(("SGD", "AdamW"), (0.0, 0.5), (0, 1, 3)):
        training = Training(optimizer=optimizer, clipping=clipping, steps=5)
        run, engine = training.by_engine(prefetch=prefetch)
        found[optimizer, clipping, prefetch] = compare(run, training.by_replicas())["loss"]
        norm = engine.get_global_grad_norm()
        assert (norm is not None) == (clipping > 0)
    return found


@pytest.mark.distributed
def test_optimizers_clipping_and_prefetch_change_no_loss() -> None:
    for differences in run_world(settings, 2):
        assert len(differences) == 12
        assert max(differences.values()) <= 1e-6
