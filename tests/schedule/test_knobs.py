"""What each knob does to the collectives: against numbers of real DeepSpeed runs, and knob by knob."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from z3trace.engine.schedule.model_file import parse_description
from z3trace.engine.schedule.predict import Prediction, predict
from z3trace.engine.schedule.settings import KNOBS, Effect

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def knobs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("knobs", REPOSITORY / "benchmarks" / "knobs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# All-gathers (forward, backward, step) and reductions of one step, counted in runs of DeepSpeed 0.19.8.
REAL = {
    "defaults": (1, 0, 54, 1),
    "reuse 0, persistence 0, prefetch 0": (38, 38, 0, 1),
    "the same on 3 ranks (padding)": (38, 38, 0, 1),
    "the same, blocks checkpointed (recompute gathers again)": (38, 68, 0, 1),
    "leaf_module classes = [Block]": (8, 8, 0, 1),
    "Block made a leaf after initialize": (8, 8, 0, 1),
    "stage3_module_granularity_threshold = 9e4": (8, 8, 0, 1),
    "leaf Block, prefetch 8e5": (8, 0, 0, 1),
    "leaf after initialize, prefetch 8e5": (6, 0, 0, 1),
    "leaf Block, reuse 2e6": (8, 3, 0, 1),
    "stage3_param_persistence_threshold = 0": (38, 38, 0, 1),
    "stage3_param_persistence_threshold = 1e4": (26, 26, 48, 1),
    "stage3_param_persistence_threshold = 1e5": (20, 20, 54, 1),
    "stage3_param_persistence_threshold = 1e6": (0, 0, 74, 1),
    "stage3_max_reuse_distance = 0": (38, 38, 0, 1),
    "stage3_max_reuse_distance = 8e5": (38, 36, 0, 1),
    "stage3_max_reuse_distance = 2e6": (38, 32, 0, 1),
    "stage3_prefetch_bucket_size = 0": (38, 38, 0, 1),
    "stage3_prefetch_bucket_size = 8e5": (6, 0, 0, 1),
    "stage3_prefetch_bucket_size = 1e10": (1, 0, 0, 1),
    "stage3_max_live_parameters = 1e6": (18, 16, 0, 1),
    "reduce_bucket_size = 65,536": (38, 38, 0, 50),
    "reduce_bucket_size = 8e5": (38, 38, 0, 7),
    "4 micro-batches, persistence 1e4, prefetch 8e5": (24, 0, 48, 4),
    "auto for a hidden size of 256": (26, 0, 48, 50),
    "stage3_use_all_reduce_for_fetch_params = true": (2, 2, 0, 1),
    "allgather_bucket_size = 1e10": (38, 38, 0, 1),
}


def test_the_table_repeats_the_numbers_of_real_runs(knobs):
    rows = {row.name: row for block in knobs.BLOCKS_OF_ROWS for row in block.rows}
    measured = {name: knobs.measure(rows[name]) for name in REAL}
    counts = {name: (n.forward, n.backward, n.step, n.reductions) for name, n in measured.items()}
    assert counts == REAL
    assert (measured["defaults"].forward_mb, measured["defaults"].step_mb) == (9.67, 0.83)
    assert measured["leaf Block, prefetch 8e5"].forward_mb == 15.75
    assert measured["leaf after initialize, prefetch 8e5"].forward_mb == 11.01
    assert measured["stage3_max_live_parameters = 1e6"].backward_mb == 8.41


def test_the_page_is_what_the_command_prints(knobs):
    page = (REPOSITORY / "docs" / "knobs.md").read_text()
    assert page == "\n".join(knobs.page()) + "\n", "run: python benchmarks/knobs.py > docs/knobs.md"


BASE = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 300_000}
# For each knob a value that must show; `with` are other settings that it needs to.
SHOWN = {
    "stage3_prefetch_bucket_size": (1_000_000, {}),
    "stage3_param_persistence_threshold": (0, {}),
    "stage3_model_persistence_threshold": (20_000, {}),
    "stage3_max_live_parameters": (500_000, {}),
    "stage3_max_reuse_distance": (10**9, {"stage3_prefetch_bucket_size": 0}),
    "stage3_module_granularity_threshold": (90_000, {"stage3_prefetch_bucket_size": 0}),
    "leaf_module": ({"classes": ["Block"]}, {}),
    "reduce_bucket_size": (100_000, {}),
    "reduce_scatter": (False, {}),
    "stage3_allgather_sequential": (True, {}),
    "stage3_use_all_reduce_for_fetch_params": (True, {}),
    "zero_hpz_partition_size": (2, {}),
}
# Values away from the default for the knobs that must not show.
HIDDEN = {
    "sub_group_size": 1000,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "allgather_bucket_size": 1,
    "compute_grad_norm": True,
}


def collectives(knobs: ModuleType, settings: dict) -> list[Prediction]:
    description = parse_description({**knobs.transformer(), "zero_optimization": settings})
    return [one for one in predict(description, 3) if one.reason != "gradient_norm"]


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.effect is Effect.SCHEDULE])
def test_a_knob_of_the_schedule_shows_in_the_collectives(knobs, name):
    value, needed = SHOWN[name]
    base = {**BASE, **needed}
    assert collectives(knobs, {**base, name: value}) != collectives(knobs, base)


@pytest.mark.parametrize(
    "name", [name for name, knob in KNOBS.items() if knob.effect in (Effect.EXECUTION, Effect.DEAD)]
)
def test_other_knobs_leave_the_collectives_alone(knobs, name):
    value = HIDDEN.get(name, not KNOBS[name].default)
    assert collectives(knobs, {**BASE, name: value}) == collectives(knobs, BASE)


def test_sub_groups_each_reduce_a_norm(knobs):
    def norms(size: int) -> int:
        settings = {**BASE, "sub_group_size": size}
        description = parse_description({**knobs.transformer(), "zero_optimization": settings})
        return sum(one.reason == "gradient_norm" for one in predict(description, 1))

    assert norms(10**9) == 1
    assert norms(2_625_280) == 1  # all of a rank's shards
    assert norms(1) == 74
