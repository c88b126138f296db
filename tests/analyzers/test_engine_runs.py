"""Recorded trainings of the engine: what the trace shows, the engine counted, and the schedule says is the same."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from z3trace.analyzers import analyze, open_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_transformer.py"
LAYERS = 6


@pytest.fixture(scope="module", params=[(2, "block"), (2, "module"), (3, "block"), (3, "module")], ids=str)
def run(request, tmp_path_factory):
    """A run directory of the example on some ranks with some unit."""
    world, unit = request.param
    folder = tmp_path_factory.mktemp("runs") / f"{unit}{world}"
    command = [
        sys.executable, "-m", "z3trace", "record", "--nproc-per-node", str(world), "--skip", "3", "--warmup", "1",
        "--steps", "3", "-o", str(folder), str(EXAMPLE), "--unit", unit, "--steps", "8", "--dim", "40",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=110,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert result.returncode == 0, result.stderr
    return folder, world, unit


def test_trace_and_counter_agree_exactly(run):
    folder, world, unit = run
    report = analyze(open_run([folder]))
    assert report.trace["framework"] == "z3trace"
    assert report.trace["ranks"] == list(range(world))
    for analysis in report.ranks:
        traced, counted = Counter(), Counter()
        sizes_traced, sizes_counted = Counter(), Counter()
        for row in analysis.collective_rows():
            key = (row["step"], row["phase"], row["kind"])
            traced[key] += row["count"]
            sizes_traced[key] += row["bytes"]
        for row in analysis.trace.metadata["z3trace"]["collectives"]:
            key = (row["step"], row["phase"], row["kind"])
            counted[key] += row["count"]
            sizes_counted[key] += row["bytes"]
        assert traced == counted
        assert sizes_traced == sizes_counted
        steps = {s.number for s in analysis.steps.steps}
        units = LAYERS + 1 if unit == "block" else 6 * LAYERS + 3
        assert all(traced[s, "forward", "all_gather"] == units for s in steps)
        assert all(traced[s, "backward", "reduce_scatter"] == units for s in steps)


def test_each_gather_is_the_one_the_engine_counted(run):
    folder, _, _ = run
    for analysis in analyze(open_run([folder])).ranks:
        owners = analysis.attribution.owners
        traced = [
            (analysis.step_number(k), analysis.placement.phase[k], owners[k].unit, owners[k].issued_in,
             owners[k].reason, int(analysis.collectives.bytes[k]))
            for k in range(len(analysis.collectives))
            if analysis.collectives.kind[k] == "all_gather"
        ]  # fmt: skip
        counted = [
            (row["step"], row["phase"], row["unit"], row["module"], row["reason"], row["bytes"])
            for row in analysis.trace.metadata["z3trace"]["collectives"]
            if row["kind"] == "all_gather"
        ]
        assert traced == counted


def test_parts_of_each_step_add_up(run):
    for row in analyze(open_run([run[0]]))["steps"]:
        parts = ("compute_ns", "exposed_comm_ns", "exposed_memory_ns", "idle_ns")
        assert sum(row[p] for p in parts) == row["duration_ns"]
        assert row["overlapped_ns"] + row["exposed_comm_ns"] == row["comm_ns"]
        assert row["comm_ns"] > 0


def test_layers_are_found_without_labels(run, tmp_path):
    """The same trace stripped of everything of ours gives the same gathers for each layer."""
    folder, _, _ = run
    for path in sorted(folder.glob("rank*.json.gz")):
        with gzip.open(path, "rt") as file:
            document = json.load(file)
        document.pop("z3trace")
        document["traceEvents"] = [
            e for e in document["traceEvents"] if not str(e.get("name", "")).startswith("z3::")
        ]
        (tmp_path / path.name.removesuffix(".gz")).write_text(json.dumps(document))
    labelled = analyze(open_run([folder])).ranks
    stripped = analyze(open_run([tmp_path])).ranks
    for with_labels, without in zip(labelled, stripped, strict=True):
        assert without.attribution.framework == "unknown"
        assert any("repetition" in note for note in without.attribution.notes)

        def gathers(analysis):
            return Counter(
                (analysis.step_number(k), analysis.placement.phase[k], analysis.layer_of(k))
                for k in range(len(analysis.collectives))
                if analysis.collectives.kind[k] == "all_gather"
            )

        expected = Counter(
            {
                (step, phase, f"repeat {layer.partition('.')[2]}" if layer != "root" else "none"): n
                for (step, phase, layer), n in gathers(with_labels).items()
            }
        )
        assert gathers(without) == expected
