"""The schedule against real DeepSpeed runs: every gather of a steady step from the model and settings alone."""

import json
from collections import Counter
from pathlib import Path

import pytest

from z3trace.engine.schedule.interface import Collective, Phase
from z3trace.engine.schedule.model_file import Description, parse_description
from z3trace.engine.schedule.predict import Prediction, predict

CASES = [
    "default",
    "gas4_r0_p1e4_pf8e5",
    "hf_auto_h256",
    "np3_r0_p0_pf0",
    "r0_p0_maxlive1e6",
    "r0_p0_pf0",
    "r0_p0_pf0_agb1e10",
    "r0_p0_pf0_ckpt",
    "r0_p0_pf0_leafafter",
    "r0_p0_pf0_leafbefore",
    "r0_p0_pf0_rb8e5",
    "r0_p0_pf0_zinit",
    "r0_p0_pf8e5",
    "r0_p1e5_pf0",
    "reuse2e6_p0_pf0",
    "t_nvtx",
]
BLOCKS = [f"blocks.{number}" for number in range(6)]


def describe(folder: Path, truth: dict) -> Description:
    """The user's model.json, with what the recording script's own options did to the blocks."""
    model = json.loads((folder / "model.json").read_text())
    options = " ".join(truth["recorded_with"])
    return parse_description(
        {
            **model,
            "dtype": truth["dtype"],
            "gradient_accumulation_steps": truth["gradient_accumulation_steps"],
            "leaves_after": BLOCKS if "--leaf after" in options else [],
            "calls": {"checkpointed": BLOCKS} if "--ckpt 1" in options else {},
        }
    )


def predicted_step(folder: Path, truth: dict, step: int) -> list[Prediction]:
    return [one for one in predict(describe(folder, truth), step + 1) if one.step == step]


def test_no_case_is_left_out(shared_traces):
    assert sorted(folder.name for folder in (shared_traces / "deepspeed").iterdir()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_gathers_of_a_steady_step_match_one_for_one(shared_traces, case):
    folder = shared_traces / "deepspeed" / case
    truth = json.loads((folder / "truth.json").read_text())
    predicted = [
        (one.micro_batch, one.phase.value, one.module, frozenset(one.partitions), one.numel)
        for one in predicted_step(folder, truth, 5)
        if one.kind is Collective.ALL_GATHER and one.phase is not Phase.OPTIMIZER
    ]
    real = [
        (
            gather["micro_batch"],
            gather["phase"],
            gather["issued_at_module"],
            frozenset(gather["parameters"]),
            gather["numel"],
        )
        for gather in truth["gathers_of_step_5"]
    ]
    assert predicted == real


@pytest.mark.parametrize("case", CASES)
def test_counts_and_bytes_of_every_phase_and_kind_match(shared_traces, case):
    folder = shared_traces / "deepspeed" / case
    truth = json.loads((folder / "truth.json").read_text())
    for step, phases in truth["expected_per_step"].items():
        expected = {
            (phase, kind): (numbers["count"], numbers["output_bytes"])
            for phase, kinds in phases.items()
            for kind, numbers in kinds.items()
        }
        counts, sizes = Counter(), Counter()
        for one in predicted_step(folder, truth, int(step)):
            key = (one.phase.value, one.kind.value)
            counts[key] += 1
            # The truth counts what comes out: of a reduce-scatter, one rank's shard.
            sizes[key] += one.bytes // (one.group_size if one.kind is Collective.REDUCE_SCATTER else 1)
        assert {key: (counts[key], sizes[key]) for key in counts} == expected


@pytest.mark.parametrize("case", CASES)
def test_persistent_parameters_match(shared_traces, case):
    folder = shared_traces / "deepspeed" / case
    truth = json.loads((folder / "truth.json").read_text())
    post_step = [
        one.partitions
        for one in predicted_step(folder, truth, 2)
        if one.kind is Collective.ALL_GATHER and one.phase is Phase.OPTIMIZER
    ]
    assert post_step == [(name,) for name in truth["persistent_parameters"]]
