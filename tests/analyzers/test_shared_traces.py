"""The analyses on real and synthetic traces whose right answers are known."""

import json
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from z3trace.analyzers import analyze, open_run
from z3trace.analyzers.anatomy import whole_trace
from z3trace.analyzers.load import load
from z3trace.analyzers.pipeline import analyze_trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def cases(kind):
    folder = SHARED / kind
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else ["absent"]


@cache
def report_of(folder, window="device"):
    return analyze(open_run([folder]), window=window)


@pytest.fixture
def case(request, shared_traces):
    kind, name = request.param
    folder = shared_traces / kind / name
    truth = folder / "truth.json"
    return folder, json.loads(truth.read_text()) if truth.exists() else None


def each(kind):
    return pytest.mark.parametrize("case", [(kind, name) for name in cases(kind)], indirect=True,
                                   ids=cases(kind))  # fmt: skip


def counted(report):
    found = defaultdict(lambda: (0, 0))
    for row in report["collectives"]:
        found[row["rank"], row["step"], row["phase"], row["kind"]] = (row["count"], row["bytes"])
    return found


def expected(truth):
    for step, phases in truth["expected_per_step"].items():
        for phase, kinds in phases.items():
            for kind, value in kinds.items():
                yield int(step), "other" if phase == "between" else phase, kind, value


@each("deepspeed")
def test_deepspeed_counts_and_bytes(case):
    folder, truth = case
    report = report_of(folder)
    found, seen = counted(report), set()
    assert report.trace["ranks"] == list(range(truth["world_size"]))
    assert report.trace["framework"] == "deepspeed"
    for step, phase, kind, value in expected(truth):
        # The truth gives a reduce-scatter's output, a shard; the report its input, the whole tensor.
        factor = truth["world_size"] if kind == "reduce_scatter" else 1
        for rank in report.trace["ranks"]:
            key = (rank, step, phase, kind)
            seen.add(key)
            assert found[key] == (value["count"], value["output_bytes"] * factor), key
    assert seen == set(found), "collectives that are not in the truth"


@each("deepspeed")
def test_deepspeed_gathers_one_by_one(case):
    folder, truth = case
    report = report_of(folder)
    wanted = [
        (g["micro_batch"], g["phase"], g["issued_at_module"], sorted(g["parameters"]))
        for g in truth["gathers_of_step_5"]
    ]
    for rank in report.trace["ranks"]:
        rows = [
            r
            for r in report["gathers"].where(rank=rank, step=5)
            if r["issued_phase"] in ("forward", "backward")
        ]
        rows.sort(key=lambda r: r["start_ns"])
        named = [(r["micro_batch"], r["issued_phase"], r["issued_in"], sorted(r["parameters"])) for r in rows]
        assert named == wanted


@each("deepspeed")
def test_deepspeed_hooks_place_gathers_without_the_right_settings(case):
    """With settings that predict something else, the hooks in the trace still tell the issuing module."""
    folder, truth = case
    description = json.loads((folder / "model.json").read_text())
    description["zero_optimization"] = {
        "stage": 3, "stage3_prefetch_bucket_size": 123, "stage3_max_reuse_distance": 777,
        "stage3_max_live_parameters": 1,
    }  # fmt: skip
    analysis = analyze_trace(load(folder / "rank0.json.gz"), 0, description=description)
    members = [
        k
        for k in range(len(analysis.collectives))
        if analysis.step_number(k) == 5
        and analysis.collectives.kind[k] == "all_gather"
        and analysis.placement.phase[k] in ("forward", "backward")
    ]
    owners = [analysis.attribution.owners[k] for k in members]
    wanted = truth["gathers_of_step_5"]
    assert [owner.issued_in for owner in owners] == [g["issued_at_module"] for g in wanted]
    for owner, gather in zip(owners, wanted, strict=True):
        if owner.unit is not None:
            # A leaf owns what is inside it.
            assert all(f"{name}.".startswith(f"{owner.unit}.") for name in gather["parameters"])
    settings = truth["zero_optimization"]
    if settings.get("stage3_prefetch_bucket_size") == 0 and not folder.name.endswith("leafafter"):
        assert all(owner.unit is not None for owner in owners)
    recomputed = [owner.reason for owner in owners].count("recompute")
    assert recomputed == (30 if folder.name == "r0_p0_pf0_ckpt" else 0)


@each("fsdp")
def test_fsdp_counts_and_layers(case):
    folder, truth = case
    report = report_of(folder)
    names = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}
    found = counted(report)
    steps = {(r["rank"], r["step"]) for r in report["steps"]}
    assert len(steps) == truth["world"] * truth["steps"]
    for key, calls in truth["per_step_calls_python"].items():
        phase, call = key.split("/")
        for rank, step in steps:
            count, moved = found[rank, step, phase, names[call]]
            assert count == calls
            factor = truth["world"] if call == "all_gather_single" else 1
            assert moved == truth["per_step_input_bytes"][key] * factor
    rows = [r for r in report["layers"] if r["kind"] == "all_gather"]
    if truth["name"].startswith("fsdp2"):
        assert report.trace["framework"] == "fsdp2"
        each_layer = 6 if truth["name"] == "fsdp2_linear" else 1
        forward = {(r["rank"], r["step"], r["layer"]): r["count"] for r in rows if r["phase"] == "forward"}
        layers = [*(f"layers.{n}" for n in range(6)), "root"]
        assert set(forward) == {(*s, layer) for s in steps for layer in layers}
        assert all(n == (1 if layer == "root" else each_layer) for (_, _, layer), n in forward.items())
        assert all(g["unit"] is not None and g["issued_in"] is not None for g in report["gathers"])
    elif truth["name"] == "fsdp1":
        assert report.trace["framework"] == "fsdp1"
        assert {r["layer"] for r in rows} == {*(f"unit {n}" for n in range(1, 7)), "root"}
        forward = [g for g in report["gathers"] if g["issued_phase"] == "forward"]
        assert [g["unit"] for g in forward] == [f"unit {n}" for n in range(7)] * len(steps)
        assert all((g["reason"], g["issued_in"]) == ("demand", g["unit"]) for g in forward)
        # Backward: each unit's hook prefetches the one whose backward comes next; the root is kept.
        backward = [(g["issued_in"], g["unit"], g["reason"]) for g in report["gathers"]
                    if g["issued_phase"] == "backward"]  # fmt: skip
        hooks = [0, 6, 5, 4, 3, 2, 1]
        assert backward == [
            (f"unit {issuer}", f"unit {unit}", "prefetch") for issuer, unit in pairwise(hooks)
        ] * len(steps)
        for rank, step in steps:
            per_phase = [counted(report)[rank, step, p, "all_gather"] for p in ("forward", "backward")]
            assert [count for count, _ in per_phase] == [7, 6]
    else:
        assert report.trace["framework"] == "ddp"
        assert all(found[r, s, "backward", "all_reduce"] == (2, 20_006_912) for r, s in steps)


@each("synthetic")
def test_synthetic_times_and_counts(case):
    folder, truth = case
    report = report_of(folder, "host")
    tolerance = 3000 if "old_format" in folder.name else 0
    columns = {
        "duration_ns": "window_ns", "compute_ns": "compute_ns", "comm_ns": "comm_ns", "memory_ns": "memory_ns",
        "overlapped_ns": "overlapped_ns", "exposed_comm_ns": "exposed_comm_ns",
        "exposed_memory_ns": "exposed_memory_ns", "idle_ns": "idle_ns",
    }  # fmt: skip
    rows = {(r["rank"], r["step"]): r for r in report["steps"]}
    for rank, values in truth["ranks"].items():
        for step, wanted in values["steps"].items():
            row = rows.pop((int(rank), int(step)))
            for ours, theirs in columns.items():
                assert abs(row[ours] - wanted[theirs]) <= tolerance, (rank, step, ours)
    assert not rows
    whole = {r["rank"]: r for r in report["whole_trace"]}
    for rank, values in truth["ranks"].items():
        assert abs(whole[int(rank)]["idle_ns"] - values["whole_trace"]["idle_ns"]) <= tolerance
    found = counted(report)
    world = truth["settings"]["world_size"]
    for step, phase, kind, value in expected(truth):
        for rank in truth["emitted_ranks"]:
            count, moved = found[rank, step, phase, kind]
            assert count == value["count"], (rank, step, phase, kind)
            assert moved == value["output_bytes"] * (world if kind == "reduce_scatter" else 1)


@each("synthetic")
def test_synthetic_groups(case):
    folder, truth = case
    for rank in report_of(folder, "host").ranks:
        found = defaultdict(lambda: [0, 0])
        for k in range(len(rank.collectives)):
            step = rank.step_number(k)
            entry = found[step, rank.collectives.group[k], rank.collectives.kind[k]]
            entry[0] += 1
            entry[1] += int(rank.collectives.bytes[k])
        named = any(g is not None for g in rank.collectives.group)
        for step, groups in truth["per_group"].items():
            for group, kinds in groups.items():
                for kind, value in kinds.items():
                    if named:
                        factor = value["group_size"] if kind == "reduce_scatter" else 1
                        assert found[int(step), group, kind] == [
                            value["count"],
                            value["output_bytes"] * factor,
                        ]
        assert named or "old_format" in folder.name, "only the old format does not name groups"


STATES = {"gather_issue": "host_collective_issue", "optimizer": "host_optimizer", "dataloader": "host_dataloader",
          "dispatch": "host_dispatch", "hook": "host_hooks"}  # fmt: skip


@each("synthetic")
@pytest.mark.parametrize(("split", "key", "share"), [("host_state", "idle_by_host_state_ns", 0.05),
                                                     ("cause", "idle_by_cause_ns", 0.10)])  # fmt: skip
def test_synthetic_idle(case, split, key, share):
    folder, truth = case
    found = defaultdict(int)
    for row in report_of(folder, "host")["idle"].where(split=split):
        found[row["rank"], row["step"], row["name"]] += row["idle_ns"]
    for rank, values in truth["ranks"].items():
        for step, wanted in values["steps"].items():
            names = {STATES.get(name, name): ns for name, ns in wanted[key].items()}
            mine = {n for r, s, n in found if (r, s) == (int(rank), int(step))}
            for name in names.keys() | mine:
                difference = abs(found[int(rank), int(step), name] - names.get(name, 0))
                assert difference <= share * wanted["idle_ns"], (rank, step, name)


def described(truth):
    """A model.json for a synthetic case: its truth gives the parameters of one layer for all."""
    given = truth["model"]["parameter_numel"]
    layers = truth["model"]["layer_names"]
    inner = {n.removeprefix(layers[0]): k for n, k in given.items() if n.startswith(layers[0] + ".")}
    numel, done = {}, False
    for name, elements in given.items():
        if not name.startswith(layers[0] + "."):
            numel[name] = elements
        elif not done:
            numel |= {layer + suffix: k for layer in layers for suffix, k in inner.items()}
            done = True
    modules = {"": None}
    for name in numel:
        parts = name.split(".")[:-1]
        if parts[-1] == "fc2":
            modules[".".join([*parts[:-1], "act"])] = None
        modules |= {".".join(parts[:k]): None for k in range(1, len(parts) + 1)}
    return {
        "modules": sorted(modules, key=list(modules).index),
        "parameters": {n: {"shape": [k], "numel": k} for n, k in numel.items()},
        "classes": dict.fromkeys(layers, "TransformerLayer"),
        "zero_optimization": truth["settings"].get("zero_optimization", {}),
        "world_size": truth["settings"]["world_size"],
    }


@each("synthetic")
def test_synthetic_gathers_and_layers(case):
    folder, truth = case
    description = described(truth) if truth["framework"] in ("deepspeed", "fsdp1") else None
    analysis = analyze_trace(load(folder / "rank0.json.gz"), 0, window="host", description=description)
    wanted = next(iter(truth["gathers"].values())) if isinstance(truth["gathers"], dict) else truth["gathers"]
    for step in (s.number for s in analysis.steps.steps):
        members = [
            k for k in range(len(analysis.collectives))
            if analysis.step_number(k) == step and analysis.collectives.kind[k] == "all_gather"
        ]  # fmt: skip
        assert len(members) == len(wanted)
        for k, (phase, micro_batch, reason, module, owner, elements, parameters) in zip(
            members, wanted, strict=True
        ):
            mine = analysis.attribution.owners[k]
            assert analysis.placement.phase[k] == phase
            assert analysis.placement.micro_batch[k] == micro_batch
            assert analysis.layer_of(k) == owner
            assert analysis.collectives.bytes[k] == 2 * elements
            if phase != "optimizer":
                assert (mine.issued_in or "root") == module
            if mine.parameters is not None:
                assert len(mine.parameters) == parameters
                assert mine.reason == reason.replace("post_step_persistent", "post_step")
        found = {
            (row["phase"], row["layer"]): (row["count"], row["bytes"])
            for row in analysis.layer_rows()
            if row["step"] == step and row["kind"] == "all_gather"
        }
        assert found == {
            (phase, layer): (kinds["all_gather"]["count"], kinds["all_gather"]["output_bytes"])
            for phase, layers in truth["per_layer"][str(step)].items()
            for layer, kinds in layers.items()
            if "all_gather" in kinds
        }


@each("gpu")
def test_totals_agree_with_other_tools(case):
    folder, _ = case
    reference = json.loads((folder / "reference.json").read_text())["peers_numbers_whole_trace"]
    report = report_of(folder)
    rows = {row["file"]: row for row in report["whole_trace"]}
    compared = 0
    for name, peers in reference.items():
        theirs = peers.get("tracelens_ms") if isinstance(peers, dict) else None
        if not theirs:
            continue
        row = rows[name]
        nanoseconds = "baseTimeNanoseconds" in load(folder / name).metadata
        tolerance = 1_000 if nanoseconds else max(2_000, theirs["total_time"] * 1e6 * 1e-4)
        assert abs(row["comm_ns"] - theirs["total_comm_time"] * 1e6) <= tolerance
        assert abs(row["duration_ns"] - theirs["total_time"] * 1e6) <= tolerance
        if folder.name == "mi300_rccl_generic_ddp":
            # TraceLens leaves out this trace's memsets, which lack flow arrows; they keep the device busy.
            assert row["idle_ns"] < theirs["idle_time"] * 1e6
        else:
            assert abs(row["idle_ns"] - theirs["idle_time"] * 1e6) <= tolerance
        compared += 1
    assert compared or folder.name in {"cpu_only_rank34", "no_distributed_info", "v100_dlrm_8rank",
                                       "old_category_names_2of128"}  # fmt: skip


def test_overlap_agrees_with_hta_where_it_reads_the_names(shared_traces):
    """HTA's percentages, rounded to two digits, on the ranks of one job with whole microseconds."""
    folder = shared_traces / "gpu" / "v100_dlrm_8rank"
    reference = json.loads((folder / "reference.json").read_text())["peers_numbers_whole_trace"][
        "hta_all_ranks"
    ]
    # HTA counts here what was launched before the recording began.
    ours = {r.rank: whole_trace(r.activity) for r in report_of(folder).ranks}
    for theirs in reference["overlap"]:
        fraction = ours[theirs["rank"]].overlap_fraction
        assert 100 * fraction == pytest.approx(theirs["comp_comm_overlap_pctg"], abs=0.006)
    for theirs in reference["temporal"]:
        parts = ours[theirs["rank"]]
        assert parts.duration == theirs["kernel_time(us)"] * 1000
        assert parts.idle == theirs["idle_time(us)"] * 1000


def test_a_cpu_trace_without_operators_says_so(shared_traces):
    report = report_of(shared_traces / "gpu" / "cpu_only_rank34")
    assert report.trace["device"] == "cpu"
    assert report.trace["ranks"] == [34]
    assert set(report["collectives"].column("kind")) == {"all_reduce"}
    assert sum(report["collectives"].column("count")) == 10
    assert any("no c10d operator" in note for note in report.notes)


def test_expert_parallel_kernels_are_communication_when_named(shared_traces):
    import re

    run = open_run([shared_traces / "gpu" / "h800_deepep"])
    plain = analyze(run)
    named = analyze(run, communication_pattern=re.compile(r"dpsk::ep"))
    assert plain["whole_trace"].column("comm_ns") == [0]
    assert named["whole_trace"].column("comm_ns")[0] > 0
    assert any("--comm-kernels" in note for note in plain.notes)
    assert not any("--comm-kernels" in note for note in named.notes)
