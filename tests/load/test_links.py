"""Lanes, nesting and links between events."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from z3trace.analyzers.inputs import open_run
from z3trace.analyzers.load import load
from z3trace.analyzers.load.nesting import enclosing
from z3trace.analyzers.trace import Trace

Loaded = Callable[..., Trace]


def span(
    name: str, ts: float, dur: float, pid: Any = 1, tid: Any = 1, cat: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def parents_by_name(trace: Trace) -> dict[str, str | None]:
    return {
        trace.name_of(row): trace.name_of(p) if p >= 0 else None
        for row, p in enumerate(trace.parents.tolist())
    }


def test_nesting_on_each_thread(loaded: Loaded) -> None:
    events = [
        span("inner", 2, 3),
        span("outer", 0, 10),
        span("other thread", 1, 5, tid=2),
        span("sibling", 6, 4),
        span("late", 11, 1),
        span("kernel", 2, 3, pid=0, tid=7, cat="kernel", stream=7),
        span("on stream", 0, 10, pid=0, tid=7, cat="gpu_user_annotation", stream=7),
        {"ph": "i", "name": "instant", "pid": 1, "tid": 1, "ts": 3, "s": "t"},
    ]
    trace = loaded(json.dumps(events).encode())
    assert parents_by_name(trace) == {
        "inner": "outer", "outer": None, "other thread": None, "sibling": "outer", "late": None,
        "kernel": None, "on stream": None, "instant": "inner",
    }  # fmt: skip


def test_spans_that_overlap_without_nesting(loaded: Loaded) -> None:
    """As gloo:send and gloo:recv do: neither encloses the other, and what both enclose belongs to the later."""
    events = [
        span("step", 0, 100),
        span("send", 10, 50),
        span("recv", 30, 60),
        span("op", 40, 5),
        span("after", 70, 5),
    ]
    trace = loaded(json.dumps(events).encode())
    assert parents_by_name(trace) == {
        "step": None,
        "send": "step",
        "recv": "step",
        "op": "recv",
        "after": "recv",
    }


def test_of_equal_spans_the_earlier_in_the_file_is_the_outer(loaded: Loaded) -> None:
    trace = loaded(json.dumps([span("first", 5, 5), span("second", 5, 5), span("third", 5, 5)]).encode())
    assert parents_by_name(trace) == {"first": None, "second": "first", "third": "second"}


SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 30), st.booleans()), max_size=40
)


@given(SPANS)
def test_nesting_equals_its_definition(spans: list[tuple[int, int, int, bool]]) -> None:
    lane, start, length, encloses = (
        (np.array(c) for c in zip(*spans, strict=True)) if spans else (np.empty(0, int),) * 4
    )
    got = enclosing(
        lane.astype(np.int32),
        start.astype(np.int64),
        (start + length).astype(np.int64),
        encloses.astype(bool),
    )
    for i in range(len(spans)):
        around = [
            j
            for j in range(len(spans))
            if j != i and encloses[j] and lane[j] == lane[i] and start[j] <= start[i]
            and start[j] + length[j] >= start[i] + length[i]
            and ((start[j], -length[j], j) < (start[i], -length[i], i))
        ]  # fmt: skip
        innermost = max(around, key=lambda j: (start[j], -length[j], j), default=-1)
        assert got[i] == innermost


@pytest.mark.parametrize("count", [10_000, 200_000])
def test_deep_nesting_is_no_problem(count: int) -> None:
    start = np.concatenate((np.arange(count), [2 * count]))
    end = np.concatenate((4 * count - np.arange(count), [4 * count]))
    parents = enclosing(np.zeros(count + 1, np.int32), start, end, np.ones(count + 1, bool))
    assert parents[:count].tolist() == list(range(-1, count - 1))
    assert parents[count] == 0  # what ends with the outermost span only


def test_lanes_and_their_names(loaded: Loaded) -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python3"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 1,
            "tid": 5,
            "ts": 0,
            "args": {"name": "thread 5 (pt_gloo_runloop)"},
        },
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 1,
            "tid": 5,
            "ts": 0,
            "args": {"name": "thread 5 (python3)"},
        },
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7 "}},
        span("op", 0, 1, tid=5),
        span("k", 0, 1, pid=0, tid=7, cat="kernel", stream=20, device=3),
        {"ph": "i", "name": "no place", "ts": 3},
    ]
    trace = loaded(json.dumps(events).encode())
    host, device = trace.lanes
    assert (host.process, host.thread, host.device, host.stream, host.is_device) == (1, 5, None, None, False)
    assert host.names == ("pt_gloo_runloop", "python3")
    assert host.process_name == "python3"
    assert (device.process, device.thread, device.device, device.stream) == (0, 7, 3, 20)
    assert (device.names, device.is_device, device.process_label) == (("stream 7",), True, "GPU 0")
    assert trace.lane.tolist() == [-1, -1, 0, 0, 1, 0, 1, -1]


def test_launches(loaded: Loaded) -> None:
    events = [
        span("k1", 10, 5, pid=0, tid=7, cat="kernel", correlation=1),
        span("cudaLaunchKernel", 1, 1, cat="cuda_runtime", correlation=1),
        span("cudaMemcpyAsync", 3, 1, cat="Runtime", correlation=2),
        span("Memcpy HtoD", 2, 2, pid=0, tid=7, cat="gpu_memcpy", correlation=2),
        span("from before the trace", 0, 1, pid=0, tid=7, cat="kernel", correlation=99),
        span("cudaLaunchKernel", 8, 1, cat="cuda_runtime", correlation=4),
        span("cudaGraphLaunch", 9, 1, cat="cuda_runtime", correlation=5),
        span("g1", 20, 1, pid=0, tid=7, cat="kernel", correlation=5),
        span("g2", 22, 1, pid=0, tid=7, cat="kernel", correlation=5),
        span("none", 30, 1, pid=0, tid=7, cat="kernel", correlation=0),
        span("cudaDeviceSynchronize", 30, 1, cat="cuda_runtime", correlation=0),
    ]
    trace = loaded(json.dumps(events).encode())
    assert trace.launches.tolist() == [1, -1, -1, 2, -1, -1, -1, 6, 6, -1, -1]
    assert trace.work_without_launch == 2
    assert trace.launches_without_work == 1
    assert trace.negative_launch_delays == 1


def test_backward_operators_know_their_forward(loaded: Loaded) -> None:
    events = [
        span("aten::linear", 0, 10, **{"Sequence number": 7, "Fwd thread id": 0}),
        span("aten::t", 1, 2, **{"Sequence number": 7, "Fwd thread id": 0}),
        span("aten::addmm", 4, 5, **{"Sequence number": 8, "Fwd thread id": 0}),
        span("AddmmBackward0", 50, 5, tid=2, **{"Sequence number": 8, "Fwd thread id": 1}),
        span("TBackward0", 60, 5, tid=2, **{"Sequence number": 7, "Fwd thread id": 1}),
        span("unknown", 70, 5, tid=2, **{"Sequence number": 99, "Fwd thread id": 1}),
    ]
    trace = loaded(json.dumps(events).encode())
    assert trace.forward_of.tolist() == [-1, -1, -1, 2, 1, -1]


def test_forward_and_backward_agree_with_the_profilers_own_flows(shared_traces: Path) -> None:
    trace = load(shared_traces / "gpu/a100_ddp_nccl_metadata/rank0.json.gz")
    ids = trace.ints("id")
    flows = trace.is_cat("fwdbwd")
    ends = np.flatnonzero(flows & trace.is_phase("f"))
    starts = {int(ids[row]): row for row in np.flatnonzero(flows & trace.is_phase("s"))}
    assert len(ends) > 100
    ops = np.flatnonzero(trace.forward_of >= 0)
    place = {(int(trace.lane[row]), int(trace.ts[row])): int(trace.forward_of[row]) for row in ops[::-1]}
    agreeing = 0
    for end in ends.tolist():
        start = starts[int(ids[end])]
        forward = place[int(trace.lane[end]), int(trace.ts[end])]
        agreeing += trace.ts[forward] == trace.ts[start] and trace.lane[forward] == trace.lane[start]
    assert agreeing == len(ends)


@pytest.mark.parametrize(
    "devices", [(0, 1), ("GPU of 0", "GPU of 1"), (0, 0)], ids=["numbers", "names", "the same"]
)
def test_merged_ranks_keep_their_correlation_ids_apart(loaded: Loaded, devices: tuple[Any, Any]) -> None:
    """Both ranks count from 1; the second runs a little later, on a device of its own or one of the same number."""
    events = []
    for rank in (0, 1):
        host, device = 100 + rank, devices[rank]
        for number in range(1, 20):
            at = number * 100 + rank * 37
            events.append(
                span(f"launch{rank}.{number}", at, 5, pid=host, cat="cuda_runtime", correlation=number)
            )
            events.append(
                span(f"k{rank}.{number}", at + 20, 50, pid=device, tid=7, cat="kernel", correlation=number)
            )
            events.append(
                span(f"f{rank}.{number}", at, 5, pid=host, **{"Sequence number": number, "Fwd thread id": 0})
            )
            events.append(
                span(
                    f"b{rank}.{number}",
                    at + 9,
                    5,
                    pid=host,
                    tid=2,
                    **{"Sequence number": number, "Fwd thread id": 1},
                )
            )
    trace = loaded(json.dumps(events).encode())
    for row, launch in enumerate(trace.launches.tolist()):
        name = trace.name_of(row)
        if name.startswith("k"):
            assert trace.name_of(launch) == f"launch{name[1:]}"
    for row, forward in enumerate(trace.forward_of.tolist()):
        name = trace.name_of(row)
        assert (trace.name_of(forward) if forward >= 0 else None) == (
            f"f{name[1:]}" if name[0] == "b" else None
        )
    assert trace.work_without_launch == trace.negative_launch_delays == 0


def test_every_kernel_of_the_shared_traces_has_a_launch_or_is_counted(shared_traces: Path) -> None:
    run = open_run([shared_traces / "gpu/a100_megatron_tp8"])
    assert run.ranks == tuple(range(8))
    for trace in run.traces:
        kernels = np.flatnonzero(trace.is_cat("kernel"))
        launch = trace.launches[kernels]
        assert len(kernels) > 500
        assert trace.work_without_launch == 0
        assert (trace.ints("correlation")[launch] == trace.ints("correlation")[kernels]).all()
        assert trace.is_cat("cuda_runtime", "cuda_driver")[launch].all()


def test_gloo_workers_of_a_real_trace(shared_traces: Path) -> None:
    trace = load(shared_traces / "deepspeed/default/rank0.json.gz")
    gloo = np.flatnonzero(trace.named(lambda name: name.startswith("gloo:")))
    lanes = {trace.lanes[lane] for lane in trace.lane[gloo].tolist()}
    assert len(gloo) > 50
    assert all("pt_gloo_runloop" in lane.names for lane in lanes)
    for row in gloo.tolist():
        parent = int(trace.parents[row])
        assert parent < 0 or (trace.ts[parent] <= trace.ts[row] and trace.end[parent] >= trace.end[row])
