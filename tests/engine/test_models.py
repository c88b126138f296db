"""Models with something unusual train like whole replicas do."""

import pytest
from models import MODELS
from training import Training, compare
from worlds import run_world


def train_all(names: list[str], unit: str) -> dict[str, dict[str, float]]:
    found = {}
    for name in names:
        training = Training(name, steps=3, accumulation=2, optimizer="SGD")
        reference = training.by_replicas()
        run, _ = training.by_engine(unit=unit)
        found[name] = compare(run, reference)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "unit"), [(2, "block"), (2, "module"), (3, "block")])
def test_unusual_models_equal_replicas(world: int, unit: str) -> None:
    names = list(MODELS)
    for differences in run_world(train_all, world, names, unit, timeout=100):
        assert list(differences) == names
        for name, difference in differences.items():
            assert difference["loss"] <= 1e-5, name
            assert difference["gradient"] <= 1e-5, name
            assert difference["parameter"] <= 1e-4, name
