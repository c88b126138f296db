"""Each finding in a training that has its trouble, not in one that nearly has it, and its cost by simulation."""

import json
from dataclasses import dataclass, field

import pytest

from z3trace.analyzers import analyze, open_run
from z3trace.analyzers.findings import REGISTRY, find
from z3trace.analyzers.ranks import join_ranks
from z3trace.reporting.findings import known_findings

US, COMPUTE = 1_000, 7


@dataclass(frozen=True)
class Case:
    """A plan with a fault, one that nearly has it, and where it is known the plan that the setting leads to.

    `late`: the plan of a second rank that is last everywhere. `top`: whether it is the first finding.
    `within`: by how much of the simulated saving the cost may be wrong.
    """

    plan: dict
    near: dict
    fixed: dict | None = None
    late: dict | None = None
    near_late: dict | None = None
    within: float = 0.3
    top: bool = True
    beside: dict = field(default_factory=dict)
    near_beside: dict = field(default_factory=dict)


DS = {"framework": "deepspeed"}
SLOW_HOOKS = {"hook": 300 * US, "layer_elements": 2_000_000}
BUSY_LINK = {"gb_per_s": 35.0, "layer_elements": 14_000_000, "compute": 500 * US}
CASES = {
    "fragmented_all_gathers": Case({"parts": 6, **SLOW_HOOKS}, {"parts": 1, **SLOW_HOOKS}, fixed=SLOW_HOOKS),
    "tiny_parameters": Case({"tiny_parts": 12, "hook": 200 * US}, {"tiny_parts": 1, "hook": 200 * US},
                            fixed={"hook": 200 * US}),
    "expert_gathers": Case({"parts": 8, "expert_parts": True, **SLOW_HOOKS}, {"parts": 8, **SLOW_HOOKS}, top=False,
                           fixed=SLOW_HOOKS),
    "fragmented_reduce_scatters": Case({"reduces": 20, "compute": 150 * US, "alpha": 60 * US},
                                       {"reduces": 2, "compute": 150 * US, "alpha": 60 * US}, top=False),
    "no_prefetch": Case({"ahead": 0}, {"ahead": 2}, fixed={}),
    "no_backward_prefetch": Case(
        {"framework": "fsdp1", "backward_prefetch": False, "one_communicator": True},
        {"framework": "fsdp1", "one_communicator": True}, fixed={"framework": "fsdp1", "one_communicator": True},
    ),
    "comm_on_compute_stream": Case({"comm_stream": COMPUTE}, {}, fixed={}),
    "serialised_communicator": Case({"one_communicator": True, **BUSY_LINK}, BUSY_LINK, fixed=BUSY_LINK),
    "serialised_prefetch": Case({**DS, "layers": 1, "layer_elements": 60_000_000, "root_elements": 1000,
                                 "compute": 9_000 * US},
                                {**DS, "layers": 6, "layer_elements": 10_000_000, "root_elements": 1000}),
    "single_unit": Case({"layers": 1, "layer_elements": 60_000_000, "root_elements": 1000, "compute": 9_000 * US},
                        {"layers": 6, "layer_elements": 10_000_000, "root_elements": 1000}),
    "post_step_persistent_gathers": Case({**DS, "post_step": (2048,) * 60}, {**DS, "post_step": (2048,)}, fixed=DS),
    "backward_regathers": Case(
        {"gb_per_s": 35.0, "compute": 120 * US, "one_communicator": True},
        {"gb_per_s": 35.0, "compute": 120 * US, "one_communicator": True, "regather": False},
        fixed={"gb_per_s": 35.0, "compute": 120 * US, "one_communicator": True, "regather": False}, top=False,
        within=2.0,
    ),
    "last_unit_regather": Case(
        {"layers": 3, "layer_elements": 40_000_000, "compute": 3_000 * US, "last_freed": True},
        {"layers": 3, "layer_elements": 40_000_000, "compute": 3_000 * US},
        fixed={"layers": 3, "layer_elements": 40_000_000, "compute": 3_000 * US},
    ),
    "accumulation_regathers": Case({"micro_batches": 4, "gb_per_s": 35.0, "compute": 250 * US},
                                   {"micro_batches": 1, "gb_per_s": 35.0, "compute": 250 * US}),
    "checkpoint_regathers": Case({"recompute": True, "gb_per_s": 60.0}, {"gb_per_s": 60.0}),
    "generation_regathers": Case({"generate": 8, "gb_per_s": 60.0, "compute": 60 * US},
                                 {"micro_batches": 1, "gb_per_s": 60.0, "compute": 60 * US}),
    "trace_invalidated": Case({**DS, "invalid": True, "post_step": (2048, 4096, 6144)},
                              {**DS, "post_step": (2048, 4096, 6144)},
                              fixed={**DS, "post_step": (2048, 4096, 6144)}),
    "host_bound": Case({"hook": 900 * US, "compute": 100 * US}, {"hook": 20 * US, "compute": 400 * US},
                       fixed={"hook": 450 * US, "compute": 100 * US}),
    "host_sync": Case({"sync_layers": True}, {}, fixed={}),
    "allocator_stalls": Case({"malloc": 900 * US}, {}, fixed={}),
    "data_wait": Case({"dataloader": 3_000 * US, "steps": 8}, {"dataloader": 100 * US},
                      fixed={"dataloader": 100 * US, "steps": 8}),
    "offload_bound": Case({**DS, "cpu_optimizer": 4_000 * US}, DS, top=False,
                          beside={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
    "straggler": Case({}, {}, late={"slow": 1.4}),
    "straggler_dataloader": Case({}, {"dataloader": 4_000 * US}, late={"dataloader": 4_000 * US}),
    "mismatched_collectives": Case({}, {}, late={"missing_gather": True}, top=True, near_late={}),
    "slow_link": Case({"gb_per_s": 9.0}, {"gb_per_s": 50.0}, fixed={"gb_per_s": 120.0}),
    "slow_inter_node_link": Case({"gb_per_s": 9.0, "world": 32}, {"gb_per_s": 50.0, "world": 32},
                                 fixed={"gb_per_s": 50.0, "world": 32}),
    "unaligned_payload": Case({"odd_elements": True, "odd_slowdown": 5.0},
                              {"odd_elements": True, "odd_slowdown": 1.0},
                              fixed={"odd_elements": True, "odd_slowdown": 1.0}),
    "copy_overhead": Case({"copies": 12}, {"copies": 1}, fixed={"copies": 1}),
    "gathered_memory": Case({"regather": False}, {}, top=False),
    "dead_knob": Case(DS, DS, top=False,
                      beside={"zero_optimization": {"stage": 3, "allgather_bucket_size": 10_000_000_000}},
                      near_beside={"zero_optimization": {"stage": 3, "allgather_bucket_size": 500_000_000}}),
    "single_device_connection": Case({"ahead": 0}, {"ahead": 0}, top=False,
                                     beside={"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
                                     near_beside={"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "16"}}),
    "incomplete_trace": Case({"steps": 1}, {"world": 2, "layer_elements": 2_000_000, "gb_per_s": 80.0}, top=False),
    "profiler_overhead": Case({}, {}, top=False, beside={"ranks": [{"rank": 0, "steps": [
        {"step": 0, "state": "unprofiled", "duration_ns": 20_000_000},
        {"step": 1, "state": "profiled", "duration_ns": 28_000_000}]}]},
        near_beside={"ranks": [{"rank": 0, "steps": [
            {"step": 0, "state": "unprofiled", "duration_ns": 27_000_000},
            {"step": 1, "state": "profiled", "duration_ns": 28_000_000}]}]}),
}  # fmt: skip


def report_of(sim, folder, plan, late=None, beside=None):
    sim.write_run(folder, sim.Plan(**plan), sim.Plan(**plan | late) if late is not None else None)
    if beside:
        (folder / "run.json").write_text(json.dumps(beside))
    return analyze(open_run([folder]))


def ids(report):
    return [row["id"] for row in report["findings"]]


def loud_ids(report):
    return [row["id"] for row in report["findings"] if row["severity"] != "info"]


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param, CASES[request.param]


def test_planted_trouble_is_found_with_its_cost(sim, case, tmp_path):
    name, case = case
    report = report_of(sim, tmp_path / "run", case.plan, case.late, case.beside)
    rows = [row for row in report["findings"] if row["id"] == name]
    assert len(rows) == 1, ids(report)
    assert rows[0]["title"] and rows[0]["settings"]
    if case.top:
        assert loud_ids(report)[0] == name
    if case.fixed is not None:
        saving = sim.duration(sim.Plan(**case.plan)) - sim.duration(sim.Plan(**case.fixed))
        assert saving > 0
        assert abs(rows[0]["cost_ns_per_step"] - saving) <= case.within * saving


def test_near_miss_is_not_reported(sim, case, tmp_path):
    name, case = case
    report = report_of(sim, tmp_path / "run", case.near, case.near_late, case.near_beside)
    assert name not in loud_ids(report)
    row = next((row for row in report["findings"] if row["id"] == name), None)
    # Information may remain where nearly nothing is lost; what has no cost must be gone.
    assert row is None or row["cost_ns_per_step"]


def test_each_finding_is_missed_when_its_function_is_gone(sim, case, tmp_path):
    name, case = case
    report = report_of(sim, tmp_path / "run", case.plan, case.late, case.beside)
    joined = join_ranks(report.ranks)

    def found(registry):
        about = report.trace
        return {
            row["id"]
            for row in find(joined, framework=about["framework"], device=about["device"],
                            world_size=about["world_size"], description=case.beside, registry=registry)
        }  # fmt: skip

    assert name in found(REGISTRY)
    without = [k for k in range(len(REGISTRY)) if name not in found(REGISTRY[:k] + REGISTRY[k + 1 :])]
    assert len(without) == 1


@pytest.mark.parametrize(
    "plan", [{}, {"framework": "deepspeed"}, {"framework": "fsdp1"}, {"world": 32}], ids=str
)
def test_healthy_training_is_silent(sim, plan, tmp_path):
    report = report_of(sim, tmp_path / "run", plan)
    assert loud_ids(report) == []


def test_every_finding_has_a_case_and_a_page():
    others = {"not_sharded"}  # tested on a trace of DistributedDataParallel
    assert set(known_findings()) == set(CASES) | others
    # Two ids come from one function that tells DeepSpeed's setting from FSDP's wrapping.
    assert len(REGISTRY) == len(known_findings()) - 1
