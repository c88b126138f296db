"""Ten steps of AdamW under both schedules on the kinds of models people train, against whole replicas."""

from typing import Any

import pytest
from training import Training, compare
from worlds import run_world

# Plain, low-rank adapters on a frozen base, tied weights, separate experts, a changing order, checkpointing.
KINDS = ("Chain", "Frozen", "Tied", "Experts", "Dynamic", "Checkpointed", "CheckpointedReentrant")
# Nothing is kept between uses, little is fetched ahead, buckets are small, and experts are one leaf.
ZERO = (
    ("stage3_param_persistence_threshold", 10),
    ("stage3_max_reuse_distance", 100),
    ("stage3_prefetch_bucket_size", 150),
    ("reduce_bucket_size", 200),
    ("leaf_module", {"classes": ["Mixture"]}),
)


def train_all(schedule: str, accumulation: int) -> dict[str, Any]:
    found = {}
    for name in KINDS:
        training = Training(name, steps=10, accumulation=accumulation, zero=ZERO)
        reference = training.by_replicas()
        found[name] = compare(training.by_engine(schedule=schedule)[0], reference)
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["layerwise", "deepspeed"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_losses_equal_those_of_replicas(world: int, accumulation: int, schedule: str) -> None:
    for found in run_world(train_all, world, schedule, accumulation, timeout=100):
        for name, difference in found.items():
            assert difference["loss"] <= 1e-5, (name, difference)
            assert difference["gradient"] <= 1e-5, (name, difference)
