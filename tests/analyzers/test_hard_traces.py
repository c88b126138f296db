"""Shapes of traces that are easily misread, written event by event with answers worked out by hand."""

import pytest

from z3trace.analyzers.attribution.calls import CallTree, Hook, numbered, without_inner
from z3trace.analyzers.errors import TraceError
from z3trace.analyzers.pipeline import analyze_trace
from z3trace.analyzers.trace import NULL
from z3trace.engine.schedule.calls import Call

US = 1000
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
NODE = "autograd::engine::evaluate_function: MmBackward0"
FLAT = {"Input Dims": [[80], [40], [], []], "Input type": ["c10::BFloat16", "c10::BFloat16", "", ""]}


def arguments(name, sent, received, group="0", world=2, dtype="BFloat16"):
    return {"Collective name": name, "In msg nelems": sent, "Out msg nelems": received, "dtype": dtype,
            "Group size": world, "Process Group Name": group}  # fmt: skip


def summary(analysis):
    found = analysis.collectives
    times = [(None, None) if s == NULL else (s // US, e // US)
             for s, e in zip(found.start.tolist(), found.end.tolist(), strict=True)]  # fmt: skip
    sizes = [None if b == NULL else b for b in found.bytes.tolist()]
    return list(zip(found.kind, sizes, times, strict=True))


def test_a_coalesced_gather_runs_when_its_group_ends(writer):
    """The kernel is launched outside the operator, without arguments, and is no second gather."""
    writer.host("c10d::allgather_into_tensor_coalesced_", 0, 20 * US)
    writer.host(
        "record_param_comms", 2 * US, 18 * US, **arguments("allgather_into_tensor_coalesced", 100, 200)
    )
    writer.kernel(GATHER, 30 * US, 50 * US, 70 * US, stream=20)
    assert summary(analyze_trace(writer.load(), 0)) == [("all_gather", 400, (50, 70))]


def test_one_kernel_runs_the_collectives_of_a_group(writer):
    """Two gathers and a reduce-scatter in one group: one kernel for each kind; the next group has its own."""
    for start in (0, 10 * US):
        writer.host("c10d::_allgather_base_", start, start + 5 * US, **FLAT)
    writer.host("c10d::_reduce_scatter_base_", 20 * US, 25 * US,
                **{"Input Dims": [[40], [80]], "Input type": ["float", "float"]})  # fmt: skip
    writer.kernel(GATHER, 30 * US, 50 * US, 70 * US, stream=20)
    writer.kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 32 * US, 70 * US, 90 * US, stream=20)
    writer.host("c10d::send", 100 * US, 101 * US)
    writer.host("c10d::recv_", 102 * US, 103 * US)
    writer.kernel(SEND_RECV, 105 * US, 110 * US, 120 * US, stream=21)
    writer.kernel(GATHER, 130 * US, 140 * US, 150 * US, stream=20)  # nothing waits for it
    analysis = analyze_trace(writer.load(), 0)
    assert summary(analysis) == [
        ("all_gather", 160, (50, 70)), ("all_gather", 160, (50, 70)), ("reduce_scatter", 320, (70, 90)),
        ("send_recv", None, (110, 120)), ("send_recv", None, (110, 120)), ("all_gather", None, (140, 150)),
    ]  # fmt: skip
    assert analysis.exposed_ns.tolist() == [20 * US, 0, 20 * US, 10 * US, 0, 10 * US], "each ns has one owner"


def test_marks_of_waiting_and_grouping_are_no_collectives(writer):
    writer.host("record_param_comms", 0, 5 * US, **arguments("wait", 0, 0))
    writer.host("record_param_comms", 10 * US, 15 * US, **arguments("start_coalescing", 0, 0))
    writer.host("record_param_comms", 20 * US, 25 * US, **arguments("end_coalescing", 0, 0))
    writer.kernel("gemm", 30 * US, 40 * US, 50 * US)
    assert summary(analyze_trace(writer.load(), 0)) == []


def test_kernels_of_a_cuda_graph_are_each_a_collective(writer):
    """One launch, many kernels: what was captured before has no part in it."""
    writer.host("c10d::_allgather_base_", 0, 5 * US, **FLAT)  # while capturing: no kernel
    writer.host("cudaGraphLaunch", 10 * US, 12 * US, cat="cuda_runtime", correlation=99)
    for start in (20 * US, 40 * US):
        writer._add(GATHER, start, start + 10 * US, "kernel", 0, 20,
                    {"device": 0, "stream": 20, "correlation": 99})  # fmt: skip
        writer._add(
            "gemm", start, start + 15 * US, "kernel", 0, 7, {"device": 0, "stream": 7, "correlation": 99}
        )
    analysis = analyze_trace(writer.load(), 0)
    assert summary(analysis) == [
        ("all_gather", 160, (None, None)), ("all_gather", None, (20, 30)), ("all_gather", None, (40, 50)),
    ]  # fmt: skip
    assert [bool(reason) for reason in analysis.collectives.missing] == [True, True, True]
    (whole,) = analysis.whole_trace_rows()
    assert (whole["compute_ns"], whole["comm_ns"], whole["exposed_comm_ns"]) == (30 * US, 20 * US, 0)


def test_copy_engines_move_a_gather(writer):
    """Copies between devices inside a collective are communication; other copies are memory traffic."""
    writer.host("c10d::_allgather_base_", 0, 20 * US, **FLAT)
    for k in range(2):
        writer.kernel("Memcpy PtoP (Device -> Device)", (5 + k) * US, (30 + 10 * k) * US, (40 + 10 * k) * US,
                      stream=21, cat="gpu_memcpy", call="cudaMemcpyAsync")  # fmt: skip
    writer.kernel("Memcpy DtoD (Device -> Device)", 8 * US, 50 * US, 55 * US, cat="gpu_memcpy")
    writer.kernel("Memcpy PtoP (Device -> Device)", 60 * US, 70 * US, 80 * US, cat="gpu_memcpy")
    analysis = analyze_trace(writer.load(), 0)
    assert summary(analysis) == [("all_gather", 160, (30, 50))]
    (whole,) = analysis.whole_trace_rows()
    assert (whole["comm_ns"], whole["memory_ns"]) == (20 * US, 15 * US)


def test_symmetric_memory(writer):
    writer.host("symm_mem::multimem_all_gather_out", 0, 10 * US)
    writer.kernel("multimem_all_gather_kernel<16>(x)", 5 * US, 20 * US, 30 * US, stream=20)
    writer.host("symm_mem::fused_matmul_reduce_scatter", 40 * US, 60 * US)
    writer.kernel("gemm", 45 * US, 50 * US, 70 * US)
    writer.host("c10d::_allgather_base_", 80 * US, 90 * US, **FLAT)
    writer.kernel("ncclSymkDevKernel_AllGather_ST(ncclSymkDevArgs)", 85 * US, 100 * US, 110 * US, stream=20)
    assert summary(analyze_trace(writer.load(), 0)) == [
        ("all_gather", None, (20, 30)), ("reduce_scatter", None, (None, None)), ("all_gather", 160, (100, 110)),
    ]  # fmt: skip


def test_deepcompile_gathers_without_metadata(writer):
    writer.host("dc::allgather_param", 0, 10 * US)
    writer.kernel(GATHER, 5 * US, 20 * US, 30 * US, stream=20)
    writer.host("dc::wait_allgather", 12 * US, 14 * US)
    writer.host("dc::prefetch_params_fused", 40 * US, 60 * US)
    for start in (70 * US, 80 * US):  # one group, a kernel for each parameter
        writer.kernel(GATHER, start - 25 * US, start, start + 10 * US, stream=20)
    writer.host("dc::release_param", 62 * US, 63 * US)
    writer.host("dc::reduce_grad", 100 * US, 110 * US)
    writer.kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 105 * US, 120 * US, 130 * US, stream=20)
    analysis = analyze_trace(writer.load(), 0)
    assert summary(analysis) == [
        ("all_gather", None, (20, 30)), ("all_gather", None, (70, 90)), ("reduce_scatter", None, (120, 130)),
    ]  # fmt: skip
    assert set(analysis.collectives.missing) == {"DeepCompile's operators record no sizes"}


def test_groups_are_told_apart(writer):
    """A tensor-parallel all-reduce beside ZeRO's gathers, and hpZ's gathers in a smaller group."""
    writer.mark(0, 0, 100 * US)
    for k, (name, sent, received, group, world) in enumerate([
        ("_allgather_base", 10, 80, "0", 8), ("_allgather_base", 40, 80, "3", 2), ("allreduce", 5, 5, "1", 2),
        ("_allgather_base", 10, 80, "0", 8),
    ]):  # fmt: skip
        writer.host("record_param_comms", k * 10 * US, k * 10 * US + 5 * US,
                    **arguments(name, sent, received, group, world))  # fmt: skip
        writer.kernel(
            "ncclDevKernel_Generic(x)", k * 10 * US + US, (k * 10 + 5) * US, (k * 10 + 8) * US, stream=20
        )
    analysis = analyze_trace(writer.load(), 0)
    assert [(r["kind"], r["group"], r["world"], r["count"], r["bytes"]) for r in analysis.collective_rows()] == [
        ("all_gather", "0", 8, 2, 320), ("all_gather", "3", 2, 1, 160), ("all_reduce", "1", 2, 1, 10),
    ]  # fmt: skip
    gathers = analysis.gather_rows(analysis.collectives.start)
    assert [(g["group"], g["world"]) for g in gathers] == [("0", 8), ("3", 2), ("0", 8)]


def test_a_file_of_two_ranks_is_refused(writer):
    writer.mark(0, 0, 100 * US)
    event = writer.mark(0, 0, 100 * US)
    event["pid"] = 8
    with pytest.raises(TraceError, match="2 processes train in this one file"):
        analyze_trace(writer.load(), 0)


def test_several_devices_are_said(writer):
    writer.kernel("gemm", 0, 10 * US, 20 * US)
    writer._add("gemm", 15 * US, 30 * US, "kernel", 1, 7, {"device": 1, "stream": 7, "correlation": 44})
    analysis = analyze_trace(writer.load(), 0)
    assert any("2 devices" in note for note in analysis.notes)
    (whole,) = analysis.whole_trace_rows()
    assert (whole["compute_ns"], whole["idle_ns"]) == (20 * US, 0)


# Phases and steps.


def micro_batch(writer, start, sequence):
    """A forward operator of 10 us, and 20 us after its start a backward node of 10 us."""
    writer.host("aten::mm", start, start + 10 * US, **{"Sequence number": sequence, "Fwd thread id": 0})
    writer.host(NODE, start + 20 * US, start + 30 * US, **{"Sequence number": sequence, "Fwd thread id": 1})


def optimizer(writer, start, length=10 * US):
    writer.host("Optimizer.step#AdamW.step", start, start + length, cat="user_annotation")


def phases_at(writer, *times):
    analysis = analyze_trace(writer.load(), 0)
    codes, micro = analysis.phases.at(__import__("numpy").array(times) * US)
    return [("forward", "backward", "optimizer", "other")[c] for c in codes], micro.tolist()


def test_marks_before_the_optimizers_step(writer):
    """A loop that calls profiler.step() between backward and optimizer.step()."""
    micro_batch(writer, 0, 1)
    writer.mark(1, 40 * US, 140 * US)
    optimizer(writer, 50 * US)
    micro_batch(writer, 100 * US, 2)
    writer.mark(2, 140 * US, 240 * US)
    optimizer(writer, 150 * US)
    micro_batch(writer, 200 * US, 3)
    names, micro = phases_at(writer, 5, 25, 45, 55, 70, 105, 125, 145, 155, 205, 225)
    assert names == ["forward", "backward", "optimizer", "optimizer", "optimizer", "forward", "backward",
                     "optimizer", "optimizer", "forward", "backward"]  # fmt: skip
    assert micro == [0] * 11


def test_a_mark_for_each_micro_batch(writer):
    for k in range(2):
        writer.mark(k, 100 * k * US, 100 * (k + 1) * US)
        micro_batch(writer, 100 * k * US + 10 * US, k + 1)
    optimizer(writer, 160 * US)
    names, _ = phases_at(writer, 5, 35, 60, 105, 135, 150, 165)
    assert names == ["forward", "backward", "other", "forward", "backward", "optimizer", "optimizer"]


def test_an_optimizer_called_for_each_subgroup_is_one_step(writer):
    for k in range(3):
        micro_batch(writer, 100 * k * US, k + 1)
        for call in range(3):
            optimizer(writer, 100 * k * US + (40 + 15 * call) * US)
    steps = analyze_trace(writer.load(), 0).steps
    assert [(s.number, s.start // US, s.end // US) for s in steps.steps] == [(0, 80, 180), (1, 180, 280)]


def test_without_marks_and_optimizer_backward_passes_are_steps(writer):
    for k in range(3):
        micro_batch(writer, 100 * k * US, k + 1)
    steps = analyze_trace(writer.load(), 0).steps
    assert [(s.number, s.start // US, s.end // US) for s in steps.steps] == [(0, 30, 130), (1, 130, 230)]
    assert "micro-batches" in steps.notes[0]


def test_evaluation_after_the_optimizer_is_a_forward_where_fsdp2_says_so(writer):
    writer.mark(0, 0, 300 * US)
    micro_batch(writer, 0, 1)
    optimizer(writer, 40 * US)
    for start in (100 * US, 150 * US):
        writer.host("FSDP::pre_forward (layers.0)", start, start + 20 * US, cat="user_annotation")
        writer.host("FSDP::all_gather (layers.0)", start + US, start + 10 * US, cat="user_annotation")
        writer.host("c10d::_allgather_base_", start + 2 * US, start + 5 * US, **FLAT)
    analysis = analyze_trace(writer.load(), 0)
    assert analysis.placement.phase == ("forward", "forward")
    assert [(o.used_phase, o.reason) for o in analysis.attribution.owners] == [("forward", "demand")] * 2


def test_recomputation_of_an_fsdp2_unit(writer):
    writer.mark(0, 0, 300 * US)
    micro_batch(writer, 0, 1)
    writer.host("autograd::engine::evaluate_function: X", 100 * US, 200 * US)
    writer.host("FSDP::pre_forward (layers.0.fc)", 110 * US, 140 * US, cat="user_annotation")
    writer.host("FSDP::all_gather (layers.0.fc)", 111 * US, 130 * US, cat="user_annotation")
    writer.host("c10d::_allgather_base_", 112 * US, 120 * US, **FLAT)
    analysis = analyze_trace(writer.load(), 0)
    assert analysis.placement.phase == ("backward",)
    (owner,) = analysis.attribution.owners
    assert (owner.unit, owner.reason, owner.used_phase) == ("layers.0.fc", "recompute", "backward")


def test_steps_that_launch_nothing_overlap_no_other(writer):
    writer.mark(1, 0, 50 * US)
    writer.mark(2, 50 * US, 100 * US)
    writer.mark(3, 100 * US, 150 * US)
    writer.kernel("gemm", 10 * US, 60 * US, 70 * US)  # launched in step 1, runs during step 2's mark
    writer.kernel("gemm", 110 * US, 120 * US, 130 * US)
    steps = analyze_trace(writer.load(), 0).steps.steps
    assert [(s.start // US, s.end // US) for s in steps] == [(60, 70), (70, 100), (120, 130)]


# Hooks of DeepSpeed and the calls of a model.


def layer(k):
    """Like Llama's: attention is called with keyword arguments only."""
    return Call(f"layers.{k}", (
        Call(f"layers.{k}.norm"), Call(f"layers.{k}.attn", (Call(f"layers.{k}.attn.q"), Call(f"layers.{k}.attn.o"))),
        Call(f"layers.{k}.mlp", (Call(f"layers.{k}.mlp.up"), Call(f"layers.{k}.mlp.down"))),
    ))  # fmt: skip


MODEL = Call("", (Call("model", (Call("embed"), Call("rotary"), layer(0), layer(1))), Call("head")))


def hooks(call, *, keyword_only=(), doubled=(), stop=None):
    """(path, is exit) of the events of one forward, as far as before the exit of the call `stop`."""
    entries = 0 if call.module.endswith(keyword_only) else 1
    found = [(call.module, False)] * entries
    for inner in call.inner:
        found += hooks(inner, keyword_only=keyword_only, doubled=doubled, stop=stop)
        if stop is not None and found and found[-1] is None:
            return found
    if call.module == stop:
        return [*found, None]
    return found + [(call.module, True)] * (2 if call.module in doubled else 1)


def named(tree, events, top=0, **options):
    found = tree.align([Hook(k, is_exit) for k, (_, is_exit) in enumerate(events)], top, **options)
    return None if found is None else [tree.names[found[k]] for k in range(len(events))]


def test_hooks_of_keyword_calls_are_missing():
    tree = CallTree(MODEL)
    events = [
        e for e in hooks(MODEL, keyword_only=("attn", "model"), doubled=("rotary",)) if e != ("", False)
    ]
    assert named(tree, events) == [path for path, _ in events]
    assert named(tree, events * 2) == [path for path, _ in events * 2], "two forwards, as in evaluation"


def test_hooks_of_a_root_that_takes_several_tensors():
    tree = CallTree(MODEL)
    events = [("", False), *hooks(MODEL)]
    assert named(tree, events) == [path for path, _ in events]


def test_hooks_of_a_recomputation_that_stops_early():
    tree = CallTree(MODEL)
    events = hooks(layer(1), stop="layers.1.mlp.down")
    events = events[: events.index(None)]
    top = tree.names.index("layers.1")
    assert named(tree, events, top, whole=False) == [path for path, _ in events]
    assert named(tree, events, top) is None, "it does not stop early"


def test_hooks_of_another_model_do_not_fit():
    tree = CallTree(MODEL)
    assert named(tree, hooks(layer(0))) is None
    leaves = CallTree(without_inner(MODEL, frozenset({"layers.0", "layers.1"})))
    seen = [("", False), ("model", False), ("embed", False), ("embed", True), ("rotary", False), ("rotary", True),
            ("layers.0", False), ("layers.0", True), ("layers.1", False), ("layers.1", True), ("model", True),
            ("head", False), ("head", True), ("", True)]  # fmt: skip
    assert named(tree, seen) is None
    assert named(leaves, seen) == [path for path, _ in seen]


def test_calls_are_numbered_where_no_model_is_known():
    events = hooks(layer(0))
    tree = CallTree(numbered([Hook(k, is_exit) for k, (_, is_exit) in enumerate(events)]))
    assert tree.names == [f"call {k}" for k in range(8)]
    assert named(tree, events)[0] == named(tree, events)[-1] == "call 0"
