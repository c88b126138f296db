"""Trainings with the libraries that users have, recorded as they are.

The report's gathers are compared with what the script counted by itself (scripts/counting.py), and the names
of each gather's parameters with its size.
"""

import importlib.util
import json
import math
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from z3trace.analyzers.inputs import open_run
from z3trace.analyzers.report import analyze

Command = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]
SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
WINDOW = ("--skip", "3", "--warmup", "1", "--steps", "2")
STEPS = 7
RECORDED = (4, 5)
RANKS = 2
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (the extra `test`)"
)

ZERO: dict[str, Any] = {
    "stage": 3, "stage3_prefetch_bucket_size": 1000, "stage3_param_persistence_threshold": 40,
}  # fmt: skip
DEEPSPEED: dict[str, dict[str, Any]] = {
    "prefetch and persistence": {"zero_optimization": ZERO},
    "no prefetch, nothing persistent": {
        "zero_optimization": {
            "stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0,
        }
    },
    "leaf blocks": {"zero_optimization": {**ZERO, "leaf_module": {"classes": ["Block"]}}},
    "leaves set after initialize, accumulation": {
        "zero_optimization": ZERO, "leaf_after": "Mlp", "gradient_accumulation_steps": 4,
    },
    "checkpointing": {"zero_optimization": ZERO, "checkpointing": True},
    "one parameter a gather, tied": {
        "zero_optimization": {**ZERO, "stage3_allgather_sequential": True}, "tied": True,
    },
}  # fmt: skip


class Recorded:
    """A finished run: its report, its run.json, and what the script counted."""

    def __init__(self, folder: Path) -> None:
        self.report = analyze(open_run([folder / "run"]))
        self.run = json.loads((folder / "run" / "run.json").read_text())
        self.counts = {int(k): v for k, v in json.loads((folder / "counts.json").read_text()).items()}

    def counted(self, kind: str) -> dict[int, dict[str, int]]:
        """Step -> phase -> calls, as the script saw them."""
        return {
            step: {
                key.split()[0]: n for key, n in sorted(self.counts[step].items()) if key.endswith(f" {kind}")
            }
            for step in RECORDED
        }

    def reported(self, kind: str, rank: int) -> dict[int, dict[str, int]]:
        """The same of the report."""
        found: dict[int, Counter[str]] = {step: Counter() for step in RECORDED}
        for row in self.report["collectives"]:
            if row["rank"] == rank and row["kind"] == kind and row["step"] in found:
                found[row["step"]][row["phase"]] += row["count"]
        return {step: dict(sorted(counts.items())) for step, counts in found.items()}

    @property
    def gathers(self) -> list[dict[str, Any]]:
        return [row for row in self.report["gathers"] if row["step"] in RECORDED]


@pytest.fixture
def record(
    z3trace: Command, tmp_path: Path, environment: dict[str, str]
) -> Callable[[str, dict[str, Any]], Recorded]:
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}

    def run(library: str, settings: dict[str, Any]) -> Recorded:
        done = z3trace(
            "record", "--nproc-per-node", str(RANKS), *WINDOW, "-o", "run",
            SCRIPT, library, str(STEPS), json.dumps(settings), timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert "as known" not in done.stderr
        return Recorded(tmp_path)

    return run


def check_gathers(recorded: Recorded, bytes_of: Callable[[list[str]], int]) -> None:
    """The counts of each phase, on every rank; a unit and parameters of the right size for every gather."""
    for rank in range(RANKS):
        for kind in ("all_gather", "reduce_scatter"):
            assert recorded.reported(kind, rank) == recorded.counted(kind)
    assert len(recorded.gathers) == RANKS * sum(
        count for phases in recorded.counted("all_gather").values() for count in phases.values()
    )
    for gather in recorded.gathers:
        assert gather["unit"] is not None
        assert gather["parameters"], gather
        assert gather["bytes"] == bytes_of(gather["parameters"]), gather
        assert gather["reason"] in ("demand", "prefetch", "recompute", "post_step")


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("settings", DEEPSPEED.values(), ids=DEEPSPEED)
def test_deepspeed(record: Callable[..., Recorded], settings: dict[str, Any]) -> None:
    recorded = record("deepspeed", settings)
    assert recorded.report.trace["framework"] == recorded.run["framework"] == "deepspeed"
    parameters = recorded.run["parameters"]

    def padded(names: list[str]) -> int:
        assert len(set(names)) == len(names)
        return sum(math.ceil(parameters[name]["numel"] / RANKS) * RANKS * 2 for name in names)

    check_gathers(recorded, padded)
    used = recorded.run["zero_optimization"]
    given = settings["zero_optimization"]
    # As DeepSpeed resolves it: one parameter a gather means one ahead.
    ahead = 1 if "stage3_allgather_sequential" in given else given["stage3_prefetch_bucket_size"]
    assert used["stage3_prefetch_bucket_size"] == ahead
    persistent = {name for name, told in parameters.items() if told["persistent"]}
    threshold = used["stage3_param_persistence_threshold"]
    assert persistent == {name for name, told in parameters.items() if told["numel"] < threshold}
    post_step = {n for g in recorded.gathers if g["reason"] == "post_step" for n in g["parameters"]}
    assert post_step == persistent
    assert any(g["reason"] == "prefetch" for g in recorded.gathers) == (
        used["stage3_prefetch_bucket_size"] > 0
    )
    for gather in recorded.gathers:
        # Demanded by the module in whose hook it is; ahead of it, a prefetch.
        own = gather["issued_in"] is not None and gather["issued_in"] == gather["used_in"]
        assert own == (gather["reason"] in ("demand", "recompute")) or gather["reason"] == "post_step", gather
    leaves = {"Block": 3, "Mlp": 3}.get(settings.get("leaf_after", ""), 0)
    assert len(recorded.run["leaves_after"]) == leaves
    assert len(recorded.run["leaves"]) == 3 * ("leaf_module" in settings["zero_optimization"])
    assert recorded.run["gradient_accumulation_steps"] == settings.get("gradient_accumulation_steps", 1)
    assert recorded.run["calls"]["order"][:3] == ["", "embed", "blocks.0"]
    if settings.get("checkpointing"):
        assert recorded.run["calls"]["checkpointed"] == ["blocks.2", "blocks.1", "blocks.0"]
    if settings.get("tied"):
        assert parameters["embed.weight"]["owners"] == ["embed", "head"]


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("library", "settings", "needs"),
    [("accelerate", {}, "accelerate"), ("trainer", {"lora": True}, "peft")],
)
def test_hugging_face_with_deepspeed(
    record: Callable[..., Recorded], library: str, settings: dict[str, Any], needs: str
) -> None:
    if not all(map(importlib.util.find_spec, (needs, "accelerate"))):
        pytest.skip(f"{needs} is not installed (the extra `test`)")
    recorded = record(library, settings)
    assert recorded.report.trace["framework"] == recorded.run["framework"] == "deepspeed"
    # Where phases begin inside the library is not the script's to say: the sums must be the same.
    for rank in range(RANKS):
        for kind in ("all_gather", "reduce_scatter"):
            reported, counted = recorded.reported(kind, rank), recorded.counted(kind)
            assert [sum(reported[step].values()) for step in RECORDED] == [
                sum(counted[step].values()) for step in RECORDED
            ]
    parameters = recorded.run["parameters"]
    width = {"float32": 4, "bfloat16": 2}
    for gather in recorded.gathers:
        assert gather["unit"] is not None
        assert gather["bytes"] == sum(
            padded_to(RANKS, parameters[name]["numel"]) * width[parameters[name]["dtype"]]
            for name in gather["parameters"]
        )
    assert recorded.run["accelerate"]["distributed_type"] == "DEEPSPEED"
    assert recorded.run["gradient_accumulation_steps"] == 2
    if library == "trainer":
        assert recorded.run["trainer"]["gradient_accumulation_steps"] == 2
        # `auto` as the Trainer resolves it for a hidden size of 32.
        assert recorded.run["zero_optimization"]["stage3_param_persistence_threshold"] == 10 * 32
    if settings.get("lora"):
        trained = {name for name, told in parameters.items() if told["trainable"]}
        assert trained == {name for name in parameters if ".lora_" in name}


@pytest.mark.parametrize("settings", [{}, {"use_orig_params": True, "forward_prefetch": True}])
def test_fsdp1(record: Callable[..., Recorded], settings: dict[str, Any]) -> None:
    recorded = record("fsdp1", settings)
    assert recorded.report.trace["framework"] == recorded.run["framework"] == "fsdp1"
    parameters = recorded.run["parameters"]
    check_gathers(recorded, lambda names: padded_to(RANKS, sum(parameters[n]["numel"] for n in names)) * 4)
    assert {g["unit"] for g in recorded.gathers} == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert parameters["blocks.1.mlp.up.weight"]["shape"] == [48, 16]
    assert recorded.run["classes"]["blocks.1"].endswith(".Block")
    assert {unit["forward_prefetch"] for unit in recorded.run["units"]} == {"forward_prefetch" in settings}


def test_fsdp2(record: Callable[..., Recorded]) -> None:
    recorded = record("fsdp2", {})
    assert recorded.report.trace["framework"] == recorded.run["framework"] == "fsdp2"
    parameters = recorded.run["parameters"]

    def padded(names: list[str]) -> int:
        shapes = (parameters[name]["shape"] for name in names)  # shards are of the first dimension
        return sum(padded_to(RANKS, shape[0]) * math.prod(shape[1:]) * 4 for shape in shapes)

    check_gathers(recorded, padded)
    units = {unit["name"]: unit for unit in recorded.run["units"]}
    assert set(units) == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert units["blocks.0"]["reshard_after_forward"] is True
    assert units[""]["reshard_after_forward"] is False


def test_ddp(record: Callable[..., Recorded]) -> None:
    recorded = record("ddp", {})
    assert recorded.report.trace["framework"] == recorded.run["framework"] == "ddp"
    assert recorded.gathers == []
    total = sum(told["numel"] for told in recorded.run["parameters"].values()) * 4
    assert sum(recorded.run["ddp"]["bucket_bytes"]) == total
    assert "blocks.0.mlp.up.weight" in recorded.run["parameters"]
    assert recorded.run["profiled_steps"] == list(RECORDED)


def test_a_training_without_any_library(record: Callable[..., Recorded]) -> None:
    """The optimizer's steps count, not the micro-batches."""
    recorded = record("plain", {})
    assert recorded.run["framework"] == "unknown"
    assert recorded.run["profiled_steps"] == list(RECORDED)
    states = [step["state"] for step in recorded.run["ranks"][0]["steps"]]
    assert states == ["settling", *["unprofiled"] * 2, "settling", "profiled", "profiled", "settling"]
    assert all(step["duration_ns"] > 0 for step in recorded.run["ranks"][0]["steps"])


def padded_to(multiple: int, count: int) -> int:
    return math.ceil(count / multiple) * multiple
