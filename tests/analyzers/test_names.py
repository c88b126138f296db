"""What names of collectives, modules, and ranges mean."""

import pytest

from z3trace.analyzers.attribution.fsdp import range_of
from z3trace.analyzers.attribution.repetition import find_repetition
from z3trace.analyzers.kinds import (
    DTYPE_BYTES,
    kind_of_collective_name,
    kind_of_gloo_span,
    kind_of_kernel,
    kind_of_operator,
)
from z3trace.analyzers.layers import LayerNames, natural_key


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        (
            "ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
            "reduce_scatter",
        ),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevComm*)", "broadcast"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "other"),
    ],
)
def test_kernels(name, kind):
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("alltoallv", "all_to_all"),
        ("ALLTOALL_BASE", "all_to_all"),
        ("barrier", "barrier"),
        ("gather", "other"),
    ],
)
def test_collective_names(name, kind):
    assert kind_of_collective_name(name) == kind


def test_operators_and_spans():
    assert kind_of_operator("c10d::_allgather_base_") == "all_gather"
    assert kind_of_operator("aten::all_gather") is None
    assert kind_of_gloo_span("gloo:all_to_all") == "all_to_all"
    assert kind_of_gloo_span("gloo:recvAnySource") == "send_recv"


def test_widths_of_both_spellings():
    for nccl, cpp, torch, width in (
        ("BFloat16", "c10::BFloat16", "bfloat16", 2),
        ("Float", "float", "float32", 4),
        ("Long", "long int", "int64", 8),
        ("Byte", "unsigned char", "uint8", 1),
        ("Float8_e4m3fn", "c10::Float8_e4m3fn", "int8", 1),
        ("ComplexFloat", "c10::complex<float>", "float64", 8),
    ):
        assert DTYPE_BYTES[nccl] == DTYPE_BYTES[cpp] == DTYPE_BYTES[torch] == width


def test_layers_are_the_outermost_repeated_blocks():
    names = LayerNames(["", "embed", "model.layers.0.mlp.experts.0", "model.layers.0.mlp.experts.1.w",
                        "model.layers.11", "head", "net.0"])  # fmt: skip
    assert names.layer_of("model.layers.0.mlp.experts.1.w.weight") == "model.layers.0"
    assert names.layer_of("model.layers.11") == "model.layers.11"
    assert names.layer_of("net.0") == "root", "a number without a sibling is no stack"
    assert names.layer_of("") == names.layer_of("head.weight") == "root"
    assert names.layer_of_all(["model.layers.0.a", "head.w", "model.layers.0.b"]) == "model.layers.0+root"
    assert names.layer_of_all([]) == "none"


def test_natural_order():
    layers = ["layers.10", "layers.9", "root", "layers.9+layers.10", "none"]
    assert sorted(layers, key=natural_key) == ["layers.9", "layers.9+layers.10", "layers.10", "none", "root"]


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("FSDP::all_gather (layers.3)", ("all_gather", "layers.3")),
        ("FSDP::all_gather", ("all_gather", "")),
        ("FSDP::backward_prefetch for layers.3", ("backward_prefetch", "layers.3")),
        ("FSDP::post_backward_reduce (a.b.c)", ("post_backward_reduce", "a.b.c")),
        ("fsdp::all_gather_copy_in", None),
    ],
)
def test_fsdp_ranges(name, meaning):
    assert range_of(name) == meaning


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8], (1, 3, 3)),
        ([5, 5, 5, 5], (0, 1, 4)),
        ([7, 4, 4, 4, 9], (1, 1, 3)),
        ([1, 2, 1, 2, 1], (0, 2, 2)),
        ([1, 2, 3], None),
        ([], None),
    ],
)
def test_repetition(sizes, found):
    assert find_repetition(sizes) == found
