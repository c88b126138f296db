"""The stages on small traces whose right answers can be worked out by hand. Times in ns."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.activity import find_activity
from z3trace.analyzers.anatomy import dissect, whole_trace
from z3trace.analyzers.host import find_threads
from z3trace.analyzers.idle import host_timeline, split_idle, totals
from z3trace.analyzers.phases import NAMES, find_phases
from z3trace.analyzers.pipeline import analyze_trace
from z3trace.analyzers.steps import find_steps

US = 1000
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ENGINE = "autograd::engine::evaluate_function: MmBackward0"


def stages(trace, window="device"):
    threads = find_threads(trace)
    activity = find_activity(trace, threads)
    return threads, activity, find_steps(trace, threads, activity, window)


def test_windows_on_a_device_start_with_the_first_activity_launched_in_the_mark(writer):
    writer.mark(3, 0, 100 * US)
    writer.mark(4, 100 * US, 200 * US)
    writer.kernel("gemm", 10 * US, 30 * US, 60 * US)
    writer.kernel("gemm", 90 * US, 140 * US, 150 * US)  # launched in step 3, runs during step 4's mark
    writer.kernel("gemm", 110 * US, 160 * US, 170 * US)
    writer.kernel("gemm", 180 * US, 260 * US, 290 * US)  # runs after the marks
    trace = writer.load()
    _, _, steps = stages(trace)
    assert [(s.number, s.start, s.end, s.used) for s in steps.steps] == [
        (3, 30 * US, 160 * US, False),
        (4, 160 * US, 290 * US, True),
    ]
    _, _, steps = stages(trace, "host")
    assert [(s.start, s.end) for s in steps.steps] == [(0, 100 * US), (100 * US, 200 * US)]


def test_without_marks_steps_end_with_the_optimizer(writer):
    for k in range(3):
        writer.host("aten::mm", k * 100 * US, k * 100 * US + 50 * US)
        writer.host(
            "Optimizer.step#SGD.step", k * 100 * US + 60 * US, k * 100 * US + 80 * US, cat="user_annotation"
        )
    trace = writer.load()
    _, _, steps = stages(trace)
    assert [(s.number, s.start, s.end) for s in steps.steps] == [
        (0, 80 * US, 180 * US),
        (1, 180 * US, 280 * US),
    ]
    assert "no ProfilerStep marks" in steps.notes[0]


def test_anatomy_counts_unions_and_owns_every_nanosecond_once(writer):
    writer.mark(0, 0, 100 * US)
    writer.kernel("gemm", 0, 10 * US, 40 * US)
    writer.kernel("gelu", 1 * US, 30 * US, 50 * US, stream=8)  # overlaps the other compute stream
    writer.kernel(NCCL, 2 * US, 45 * US, 70 * US, stream=20)
    writer.kernel("Memcpy DtoH", 3 * US, 65 * US, 80 * US, stream=9, cat="gpu_memcpy")
    writer.kernel("Memset", 4 * US, 90 * US, 91 * US, stream=9, cat="gpu_memset")
    _, activity, _ = stages(writer.load())
    parts = dissect(activity, 0, 100 * US)
    assert (parts.compute, parts.comm, parts.memory) == (40 * US, 25 * US, 16 * US)
    assert (parts.overlapped, parts.exposed_comm, parts.exposed_memory) == (5 * US, 20 * US, 11 * US)
    assert parts.idle == 29 * US
    assert parts.overlap_fraction == pytest.approx(0.2)


def test_kernels_launched_before_the_recording_count_in_steps_only(writer):
    writer._correlation = 10
    writer.kernel("gemm", None, 0, 40 * US)
    writer._correlation = 20
    writer.kernel("gemm", 50 * US, 60 * US, 70 * US)
    _, activity, _ = stages(writer.load())
    trace = writer.load()
    assert len(activity.launched_before) == 1
    assert iv.total(activity.compute) == 50 * US
    assert whole_trace(activity.recorded(trace)).duration == 10 * US
    assert "launched before the recording" in activity.hints[0]


def test_cpu_compute_leaves_out_waits_and_communication(writer):
    writer.mark(0, 0, 100 * US)
    writer.host("MyNodeBackward", 0, 60 * US)  # wraps: only the operators inside compute
    writer.host("aten::mm", 10 * US, 30 * US)
    writer.host("c10d::_reduce_scatter_base_", 30 * US, 50 * US)
    writer.host("aten::clone", 32 * US, 34 * US)  # inside the collective's call
    writer.gloo("gloo:all_reduce", 25 * US, 48 * US)
    writer.host("aten::copy_", 40 * US, 45 * US, tid=102)  # gloo's own copy
    writer.host("graph_0_cpp_fused_add_0", 80 * US, 90 * US)
    trace = writer.load()
    threads, activity, _ = stages(trace)
    assert [trace.lanes[w].thread for w in threads.workers] == [102]
    assert activity.compute.tolist() == [[10 * US, 30 * US], [80 * US, 90 * US]]
    parts = dissect(activity, 0, 100 * US)
    assert (parts.comm, parts.overlapped, parts.exposed_comm, parts.idle) == (
        23 * US,
        5 * US,
        18 * US,
        52 * US,
    )


def _micro_batch(writer, start, sequence, backward_tid):
    writer.host("aten::mm", start, start + 10 * US, **{"Sequence number": sequence, "Fwd thread id": 0})
    writer.host(ENGINE, start + 20 * US, start + 30 * US, tid=backward_tid,
                **{"Sequence number": sequence, "Fwd thread id": 1})  # fmt: skip


@pytest.mark.parametrize("backward_tid", [100, 101], ids=["on the main thread", "on an autograd thread"])
def test_phases_and_micro_batches(writer, backward_tid):
    writer.mark(0, 0, 200 * US)
    _micro_batch(writer, 10 * US, 5, backward_tid)
    _micro_batch(writer, 60 * US, 9, backward_tid)
    writer.host("c10d::_reduce_scatter_base_", 42 * US, 44 * US)  # ends the first backward
    writer.host("c10d::_allgather_base_", 55 * US, 57 * US)  # opens the second forward
    writer.host("c10d::_reduce_scatter_base_", 92 * US, 94 * US)
    writer.host("c10d::allreduce_", 95 * US, 96 * US)  # norm of the gradients
    writer.host("Optimizer.step#AdamW.step", 100 * US, 120 * US, cat="user_annotation")
    writer.host("c10d::_allgather_base_", 130 * US, 140 * US)
    trace = writer.load()
    phases = find_phases(trace, find_threads(trace), stages(trace)[2])
    codes, micro = phases.at(np.array([5, 35, 50, 65, 85, 110, 250]) * US)
    assert [NAMES[c] for c in codes] == [
        "forward", "backward", "forward", "forward", "backward", "optimizer", "other",
    ]  # fmt: skip
    assert micro.tolist()[:5] == [0, 0, 1, 1, 1]
    analysis = analyze_trace(trace, 0)
    assert list(zip(analysis.collectives.kind, analysis.placement.phase, strict=True)) == [
        ("reduce_scatter", "backward"),
        ("all_gather", "forward"),
        ("reduce_scatter", "backward"),
        ("all_reduce", "optimizer"),
        ("all_gather", "optimizer"),
    ]
    assert analysis.placement.micro_batch.tolist() == [0, 1, 1, 0, 0]


def test_recomputation_inside_backward_is_backward(writer):
    writer.mark(0, 0, 100 * US)
    _micro_batch(writer, 0, 5, 100)
    # Activation checkpointing runs the forward again inside a node; its operators have backward nodes, too.
    writer.host("autograd::engine::evaluate_function: CheckpointFunctionBackward", 40 * US, 80 * US)
    writer.host("aten::mm", 45 * US, 50 * US, **{"Sequence number": 8, "Fwd thread id": 0})
    writer.host("c10d::_allgather_base_", 51 * US, 53 * US)
    writer.host(ENGINE, 60 * US, 70 * US, **{"Sequence number": 8, "Fwd thread id": 1})
    analysis = analyze_trace(writer.load(), 0)
    assert analysis.placement.phase == ("backward",)


def test_joining_operators_and_gloo_spans_by_order(writer):
    writer.mark(0, 0, 1000 * US)
    shapes = {"Input Dims": [[80], [40], [], []], "Input type": ["c10::BFloat16", "c10::BFloat16", "", ""]}
    span = {"Input Dims": [[40]], "Input type": ["c10::BFloat16"]}
    writer.gloo("gloo:all_gather", 0, 20 * US, **span)  # issued before the recording
    writer.host("c10d::_allgather_base_", 10 * US, 12 * US, **shapes)
    writer.host("c10d::_allgather_base_", 15 * US, 17 * US, **shapes)
    writer.gloo("gloo:all_gather", 21 * US, 30 * US, **span)
    writer.gloo("gloo:all_gather", 31 * US, 44 * US, **span)
    writer.host("c10d::_reduce_scatter_base_", 50 * US, 60 * US,
                **{"Input Dims": [[40], [80], [], []], "Input type": ["float", "float", "", ""]})  # fmt: skip
    writer.gloo("gloo:all_reduce", 52 * US, 59 * US, **{"Input Dims": [[80]], "Input type": ["float"]})
    writer.host("c10d::_allgather_base_", 900 * US, 902 * US, **shapes)  # ends after the recording
    found = analyze_trace(writer.load(), 0).collectives
    rows = [
        (k, int(s) // US, int(b))
        for k, s, b in zip(found.kind, found.start, found.bytes, strict=True)
        if s > 0
    ]
    assert rows == [("all_gather", 21, 160), ("all_gather", 31, 160), ("reduce_scatter", 52, 320)]
    assert [m.partition(":")[0] for m in found.missing] == ["no c10d operator", "", "", "", "no gloo span"]
    assert found.world.tolist()[1:4] == [2, 2, 2]
    assert found.bytes[-1] == 160


def test_functional_collectives_are_counted_once(writer):
    writer.host("_c10d_functional::all_reduce", 0, 20 * US)
    writer.host("c10d::allreduce_", 5 * US, 10 * US)
    writer.host("_c10d_functional::all_gather_into_tensor", 30 * US, 40 * US)
    assert analyze_trace(writer.load(), 0).collectives.kind == ("all_reduce", "all_gather")


def test_kernels_find_their_collective(writer):
    parameters = {"Collective name": "_allgather_base", "In msg nelems": 10, "Out msg nelems": 40, "dtype": "Half",
                  "Group size": 4, "Process Group Name": "7"}  # fmt: skip
    writer.host("c10d::_allgather_base_", 0, 20 * US)
    writer.host("record_param_comms", 2 * US, 18 * US, **parameters, **{"External id": 55})
    writer.kernel(NCCL, 5 * US, 30 * US, 50 * US, stream=20)
    writer.host("record_param_comms", 60 * US, 70 * US, **{**parameters, "Collective name": "wait"})
    writer.kernel("ncclDevKernel_Generic(x)", None, 80 * US, 90 * US, stream=20,
                  **{**parameters, "Collective name": "_reduce_scatter_base", "In msg nelems": 40})  # fmt: skip
    writer.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", None, 95 * US, 99 * US, stream=20)
    found = analyze_trace(writer.load(), 0).collectives
    assert found.kind == ("all_gather", "reduce_scatter", "all_reduce")
    assert found.bytes.tolist()[:2] == [80, 80]
    assert found.bytes[2] < 0
    assert found.world.tolist()[:2] == [4, 4]
    assert found.group[:2] == ("7", "7")
    assert found.start.tolist() == [30 * US, 80 * US, 95 * US]
    assert [bool(m) for m in found.missing] == [False, True, True]


def test_causes_of_idle_time(writer):
    """A gap behind a synchronize is the synchronize's, up to the time the host was blocked there."""
    writer.mark(0, 0, 400 * US)
    writer.kernel("a", 0, 5 * US, 50 * US)
    writer.host("cudaStreamSynchronize", 10 * US, 40 * US, cat="cuda_runtime")  # blocked for 30 us
    writer.host("aten::x", 60 * US, 120 * US)
    writer.kernel("b", 115 * US, 120 * US, 150 * US)  # late: 70 us gap, 30 of them the synchronize's
    writer.kernel("c", 116 * US, 170 * US, 200 * US, stream=9)  # in time, waited on the device
    writer.host("cudaMalloc", 205 * US, 245 * US, cat="cuda_runtime")
    writer.kernel("d", 246 * US, 251 * US, 300 * US)
    trace = writer.load()
    threads, activity, _ = stages(trace)
    splits = split_idle(trace, activity, host_timeline(trace, threads), 0, 400 * US)
    causes = {total.name: total.ns for total in totals(trace, splits.cause, 0, 400 * US)}
    assert causes["sync_stream"] == 30 * US
    assert causes["device_gap"] == 20 * US
    assert causes["end_of_trace"] == 100 * US
    # The malloc: 40 us while in it, and what of the rest of that gap its 40 us of blocking explain.
    assert causes["allocator"] == 46 * US
    idle = iv.total(iv.complement(activity.busy, 0, 400 * US))
    assert sum(causes.values()) == idle
    states = {total.name: total.ns for total in totals(trace, splits.host_state, 0, 400 * US)}
    assert sum(states.values()) == idle
    assert states["allocator"] == 40 * US
    assert "sync_stream" not in states, "the device was busy while the host was blocked"


def test_a_slow_launch_is_the_host_s_not_the_device_s(writer):
    """Launches differ in how long they take; only one that came before the gap was in time."""
    writer.mark(0, 0, 100 * US)
    writer.host("aten::x", 0, 90 * US)
    writer.kernel("a", 1 * US, 3 * US, 10 * US)  # the fastest launch: 2 us
    writer.kernel("b", 15 * US, 27 * US, 40 * US)  # took 12 us, but came when the device was idle already
    writer.kernel("c", 30 * US, 60 * US, 100 * US)  # was there while b ran
    trace = writer.load()
    threads, activity, _ = stages(trace)
    splits = split_idle(trace, activity, host_timeline(trace, threads), 0, 100 * US)
    causes = {total.name: total.ns for total in totals(trace, splits.cause, 0, 100 * US)}
    assert causes == {"host_dispatch": (3 + 17) * US, "device_gap": 20 * US}


events = st.lists(
    st.tuples(
        st.sampled_from(["compute", "comm", "copy", "host", "sync", "node", "gloo"]),
        st.integers(0, 90),
        st.integers(0, 40),
        st.integers(0, 3),
    ),
    max_size=25,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(events, st.sampled_from(["device", "host"]))
def test_parts_of_any_step_add_up(new_writer, drawn, window):
    """Whatever a trace holds, each step's parts and each split of its idle time add up exactly."""
    writer = new_writer("random.json")
    writer.mark(1, 0, 45 * US)
    writer.mark(2, 50 * US, 100 * US)
    for kind, start, length, lane in drawn:
        low, high = start * US, (start + length) * US
        match kind:
            case "compute":
                writer.kernel("gemm", None if lane == 3 else max(0, low - 10 * US), low, high, stream=lane)
            case "comm":
                writer.kernel(NCCL, max(0, low - 5 * US), low, high, stream=20 + lane)
            case "copy":
                writer.kernel("Memcpy", low, low, high, stream=9, cat="gpu_memcpy")
            case "host":
                writer.host("aten::add", low, high, tid=100 + lane)
            case "sync":
                writer.host("cudaStreamSynchronize", low, high, cat="cuda_runtime")
            case "node":
                writer.host(ENGINE, low, high, tid=101)
            case _:
                writer.gloo("gloo:all_gather", low, high)
    analysis = analyze_trace(writer.load(), 0, window=window)
    steps = {row["step"]: row for row in analysis.step_rows()}
    for row in steps.values():
        parts = ("compute_ns", "exposed_comm_ns", "exposed_memory_ns", "idle_ns")
        assert sum(row[p] for p in parts) == row["duration_ns"]
        assert row["overlapped_ns"] + row["exposed_comm_ns"] == row["comm_ns"]
    for split in ("host_state", "cause"):
        for number, row in steps.items():
            idle = [r["idle_ns"] for r in analysis.idle_rows() if (r["step"], r["split"]) == (number, split)]
            assert sum(idle) == row["idle_ns"]
    assert all(
        e < 0 or e <= max(0, s) for e, s in zip(analysis.exposed_ns, analysis.collectives.end, strict=True)
    )
