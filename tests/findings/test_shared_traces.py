"""Findings on real and simulated traces whose trouble is known."""

import json
from functools import cache
from pathlib import Path

import pytest

from z3trace.analyzers import analyze, open_run

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
SYNTHETIC = sorted(p.name for p in (SHARED / "synthetic").iterdir()) if SHARED.is_dir() else ["absent"]
FRAGMENTED = ("r0_p0_pf0", "np3_r0_p0_pf0", "hf_auto_h256", "r0_p0_pf0_agb1e10", "r0_p0_pf0_rb8e5")
ZERO_ADVICE = ("deepspeed", "fsdp", "leaf", "shard", "stage3", "prefetch", "zero", "reshard")


@cache
def report_of(folder, window="device"):
    return analyze(open_run([folder]), window=window)


@pytest.fixture
def report(shared_traces):
    return lambda name, window="device": report_of(shared_traces / name, window)


def findings(report):
    return {row["id"]: row for row in report["findings"]}


def loud(report):
    return [row["id"] for row in report["findings"] if row["severity"] != "info"]


@pytest.mark.parametrize("window", ["host", "device"])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_diagnosis_is_the_first_finding(report, shared_traces, name, window):
    truth = json.loads((shared_traces / "synthetic" / name / "truth.json").read_text())["diagnosis"]
    found = report(f"synthetic/{name}", window)
    assert (loud(found) or ["none"])[0] == truth["code"]
    if "after_fix" in truth:
        saving = truth["step_ns"] - truth["after_fix"]["step_ns"]
        assert abs(findings(found)[truth["code"]]["cost_ns_per_step"] - saving) <= 0.3 * saving


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_waits_transfers_and_clocks(report, shared_traces, name):
    truth = json.loads((shared_traces / "synthetic" / name / "truth.json").read_text())
    found = report(f"synthetic/{name}", "host")
    steps = found.trace["steps_used"]
    # The old format is rounded to whole microseconds, which adds up over a step's collectives.
    tolerance = 12_000 if "old_format" in name else 500
    for row in found["ranks"]:
        seen = [
            truth["ranks"][str(row["rank"])]["steps"][str(step)]["collectives_issued_seen_from_emitted_ranks"]
            for step in steps
        ]
        assert row["wait_ns"] == pytest.approx(
            sum(s["wait_for_peers_ns"] for s in seen) / len(steps), abs=tolerance
        )
        assert row["transfer_ns"] == pytest.approx(
            sum(s["transfer_ns"] for s in seen) / len(steps), abs=tolerance
        )
        skew = float(truth["clock_skew_us"].get(str(row["rank"]), 0)) * 1000
        assert row["clock_skew_ns"] == pytest.approx(skew, abs=20_000)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_links_are_fitted(report, shared_traces, name):
    network = json.loads((shared_traces / "synthetic" / name / "truth.json").read_text())["network"]
    links = [row for row in report(f"synthetic/{name}", "host")["links"] if row["bus_gb_per_s"] is not None]
    assert links
    for link in links:
        assert link["bus_gb_per_s"] == pytest.approx(network["bus_gb_per_s"], rel=0.12)


@pytest.mark.parametrize("name", FRAGMENTED)
def test_deepspeed_module_by_module_is_fragmented(report, name):
    row = findings(report(f"deepspeed/{name}"))["fragmented_all_gathers"]
    assert max(row["evidence"]["gathers_per_layer"].values()) == (4 if name == "hf_auto_h256" else 6)
    assert any("leaf_module" in setting for setting in row["settings"])


def test_auto_values_are_fragmented_by_their_bucket(report):
    row = findings(report("deepspeed/hf_auto_h256"))["fragmented_all_gathers"]
    assert "58982" in row["title"]
    assert row["settings"][0].startswith("stage3_prefetch_bucket_size")


def test_deepspeed_defaults_serialise_prefetch_and_gather_after_the_step(report):
    found = loud(report("deepspeed/default"))
    assert found == ["post_step_persistent_gathers", "serialised_prefetch"]
    assert (
        findings(report("deepspeed/default"))["post_step_persistent_gathers"]["evidence"]["gathers_per_step"]
        == 54
    )


def test_checkpointing_gathers_again(report):
    rows = findings(report("deepspeed/r0_p0_pf0_ckpt"))
    assert loud(report("deepspeed/r0_p0_pf0_ckpt"))[0] == "checkpoint_regathers"
    assert rows["checkpoint_regathers"]["evidence"]["recompute_gathers_per_step"] == 30
    assert "checkpoint_regathers" not in findings(report("deepspeed/r0_p0_pf0"))


def test_micro_batches_gather_again(report):
    rows = findings(report("deepspeed/gas4_r0_p1e4_pf8e5"))
    assert rows["accumulation_regathers"]["evidence"]["micro_batches"] == 4
    assert loud(report("deepspeed/gas4_r0_p1e4_pf8e5"))[0] == "accumulation_regathers"


def test_dead_knob_is_named_with_its_value(report):
    row = findings(report("deepspeed/r0_p0_pf0_agb1e10"))["dead_knob"]
    assert row["evidence"]["allgather_bucket_size"]["value"] == 1e10
    assert row["severity"] == "info"
    assert "dead_knob" not in findings(report("deepspeed/r0_p0_pf0"))


def test_units_of_one_layer_are_no_trouble(report):
    assert "fragmented_all_gathers" in loud(report("fsdp/fsdp2_linear_w2"))
    assert loud(report("fsdp/fsdp2_w2")) == []
    assert loud(report("fsdp/fsdp2_rafF_w2")) == []
    assert "fragmented_all_gathers" not in findings(report("deepspeed/r0_p0_pf0_leafbefore"))


def test_data_parallel_is_not_sharded(report):
    assert "not_sharded" in findings(report("fsdp/ddp_w2"))
    assert all("not_sharded" not in findings(report(f"fsdp/{n}")) for n in ("fsdp1_w2", "fsdp2_w2"))


def test_megatron_stragglers_and_what_their_hosts_did(report):
    row = findings(report("gpu/a100_megatron_tp8"))["straggler"]
    assert row["evidence"]["ranks"] == [0, 6]
    for by_rank, last in zip(row["evidence"]["by_rank"], (32, 28), strict=True):
        assert by_rank["last_arrivals"] == last
        assert next(iter(by_rank["more_than_others_ns"])) == "host_dispatch"


@pytest.mark.parametrize("name", ["v100_dlrm_8rank", "h800_deepep", "a100_megatron_tp8"])
def test_no_sharding_advice_without_sharding(report, name):
    text = json.dumps([row["settings"] for row in report(f"gpu/{name}")["findings"]]).lower()
    assert not [word for word in ZERO_ADVICE if word in text]
    assert (
        not {"not_sharded", "no_prefetch", "fragmented_all_gathers"} & findings(report(f"gpu/{name}")).keys()
    )


@pytest.mark.parametrize(
    ("name", "most", "part"),
    [
        ("fsdp/fsdp2_rafF_w2", 20_006_912, "kept_bytes"),  # nothing is freed: all parameters
        ("deepspeed/default", 10_501_120, "prefetched_bytes"),
        ("deepspeed/r0_p0_pf0", 526_336, "in_use_bytes"),  # module by module: the largest of them
        ("deepspeed/r0_p0_pf0_leafbefore", 1_579_520, "in_use_bytes"),  # layer by layer
    ],
)
def test_most_that_gathered_parameters_hold(report, name, most, part):
    found = report(name)
    rows = [row for row in found["memory"] if row["step"] in found.trace["steps_used"]]
    assert {row["peak_gathered_bytes"] for row in rows} == {most}
    for row in rows:
        parts = {
            key: row[key] for key in ("prefetched_bytes", "in_use_bytes", "kept_bytes", "persistent_bytes")
        }
        assert sum(parts.values()) == most
        assert max(parts, key=lambda key: parts[key]) == part
