"""The engine under DeepSpeed's schedule: it trains right, and issues what DeepSpeed issues."""

import json
from pathlib import Path
from typing import Any

import deepspeed_case
import pytest
from models import MODELS
from training import Training, compare
from worlds import run_world

# Its ranks differ in which modules get gradients, which real stage 3 does not survive either.
TRAINED = [name for name in MODELS if name not in ("RankDependent", "Experts")]
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing kept": {
        "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
    },
    "prefetch": {
        "stage3_param_persistence_threshold": 10, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 120,
        "stage3_max_live_parameters": 500, "reduce_bucket_size": 150,
    },
    "defaults": {},
    "leaf blocks": {
        "leaf_module": {"classes": ["Block", "StructuredBlock", "ViewBlock"]}, "stage3_max_reuse_distance": 300,
        "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0,
    },
}  # fmt: skip
COLLECTIVES: dict[str, dict[str, Any]] = {
    "sequential": {"stage3_allgather_sequential": True, **SETTINGS["nothing kept"]},
    "gathers by all-reduce": {"stage3_use_all_reduce_for_fetch_params": True, **SETTINGS["nothing kept"]},
    "gradients by all-reduce": {"reduce_scatter": False, "reduce_bucket_size": 200},
    "second shards": {"zero_hpz_partition_size": 2, **SETTINGS["nothing kept"]},
}


def train_under(names: list[str], settings: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    found = {}
    for name in names:
        plain = Training(name, steps=3, accumulation=2, optimizer="SGD")
        reference = plain.by_replicas()
        for label, zero in settings.items():
            training = Training(name, steps=3, accumulation=2, optimizer="SGD", zero=tuple(zero.items()))
            run, engine = training.by_engine(schedule="deepspeed")
            totals = {f"{p} {k}": v for (p, k), v in engine.counter.totals(2).items()}
            found[name, label] = (compare(run, reference), totals)
    return found


def check(found: dict[tuple[str, str], Any]) -> None:
    for case, (difference, _) in found.items():
        assert difference["loss"] <= 1e-5, case
        assert difference["gradient"] <= 1e-5, case
        assert difference["parameter"] <= 1e-4, case


@pytest.mark.distributed
@pytest.mark.parametrize("label", list(SETTINGS))
def test_unusual_models_equal_replicas(label: str) -> None:
    for found in run_world(train_under, 2, TRAINED, {label: SETTINGS[label]}, timeout=90):
        assert len(found) == len(TRAINED)
        check(found)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [3, 4])
def test_uneven_and_larger_worlds(world: int) -> None:
    settings = {"prefetch": SETTINGS["prefetch"]} if world == 3 else COLLECTIVES
    for found in run_world(train_under, world, ["Chain", "Tied"], settings, timeout=90):
        check(found)
        if world == 4:
            plain = found["Chain", "sequential"][1]
            assert plain["forward all_gather"]["count"] >= 2 * 33  # one for each parameter and micro-batch
            reduced = found["Chain", "gathers by all-reduce"][1]
            # Modules with one parameter (the blocks' gains, the embedding) are still gathered.
            assert reduced["forward all_gather"]["count"] == 2 * 5
            assert reduced["forward all_reduce"]["count"] == 2 * 14
            gradients = found["Chain", "gradients by all-reduce"][1]
            assert "backward reduce_scatter" in gradients or "backward all_reduce" in gradients


CASES = ["default", "gas4_r0_p1e4_pf8e5", "hf_auto_h256", "r0_p0_maxlive1e6", "r0_p0_pf0", "r0_p0_pf0_agb1e10",
         "r0_p0_pf0_ckpt", "r0_p0_pf0_leafafter", "r0_p0_pf0_leafbefore", "r0_p0_pf0_rb8e5", "r0_p0_pf0_zinit",
         "r0_p0_pf8e5", "r0_p1e5_pf0", "reuse2e6_p0_pf0", "t_nvtx"]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"), [(2, CASES[:5]), (2, CASES[5:10]), (2, CASES[10:]), (3, ["np3_r0_p0_pf0"])]
)
def test_recorded_runs_of_deepspeed_are_repeated(shared_traces: Path, world: int, cases: list[str]) -> None:
    """Gathers of step 5 one for one; counts and bytes of every phase by counter and by trace."""
    folders = [shared_traces / "deepspeed" / case for case in cases]
    for results in run_world(deepspeed_case.run_cases, world, folders, timeout=110):
        for folder, result in zip(folders, results, strict=True):
            truth = json.loads((folder / "truth.json").read_text())
            same_model(result, truth)
            expected = [
                (g["micro_batch"], g["phase"], g["issued_at_module"], sorted(g["parameters"]))
                for g in truth["gathers_of_step_5"]
            ]
            assert result["gathers"] == expected, folder.name
            counts_agree(result, truth["expected_per_step"]["5"], world)


def same_model(result: dict[str, Any], truth: dict[str, Any]) -> None:
    assert result["parameters"] == [(n, p["shape"]) for n, p in truth["parameters"].items()]
    called = [path for path in result["call_order"] if path in truth["module_call_order"]]
    assert called == [path for path in truth["module_call_order"] if path != "blocks"]
    assert result["persistent"] == truth["persistent_parameters"]


def counts_agree(result: dict[str, Any], expected: dict[str, Any], world: int) -> None:
    counted = {
        (phase, kind): (row["count"], row["output_bytes"] * (world if kind == "reduce_scatter" else 1))
        for phase, kinds in expected.items()
        for kind, row in kinds.items()
    }
    assert {key: (row["count"], row["bytes"]) for key, row in result["totals"].items()} == counted
    verbs = {"all_gather": "gather", "reduce_scatter": "reduce"}
    assert result["trace"] == {(p, verbs[k]): n for (p, k), (n, _) in counted.items() if k in verbs}
