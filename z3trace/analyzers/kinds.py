"""What the many names of collectives mean, and how wide their element types are."""

import re

# c10d's operators; the functional collectives wrap one of them. A name not listed is no collective.
_OPERATORS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_coalesced_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send_recv",
    "c10d::recv_": "send_recv",
    "c10d::recv_any_source_": "send_recv",
    "c10d::barrier": "barrier",
    "c10d::monitored_barrier_": "barrier",
    "c10d::reduce_": "other",
    "c10d::gather_": "other",
    "c10d::scatter_": "other",
    # Functional collectives, as torch.compile and DTensor issue them.
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::broadcast_": "broadcast",
    # DeepSpeed's DeepCompile calls NCCL from its own operators.
    "dc::allgather_param": "all_gather",
    "dc::prefetch_params_fused": "all_gather",
    "dc::reduce_grad": "reduce_scatter",
}

# The width of an element in bytes, by the names of NCCL's `dtype`, of `Input type`, and of torch.
DTYPE_BYTES = {
    name: width
    for width, names in {
        1: "Byte Char Bool Int8 UInt8 Float8_e4m3fn Float8_e5m2 Float8_e4m3fnuz Float8_e5m2fnuz Float8_e8m0fnu "
        "unsigned_char signed_char bool c10::Float8_e4m3fn c10::Float8_e5m2 c10::Float8_e4m3fnuz "
        "c10::Float8_e5m2fnuz uint8 int8",
        2: "Half BFloat16 Short Int16 UInt16 short short_int c10::Half c10::BFloat16 float16 bfloat16 int16",
        4: "Float Int Int32 UInt32 float int float32 int32",
        8: "Double Long Int64 UInt64 ComplexFloat double long_int long c10::complex<float> float64 int64",
        16: "ComplexDouble c10::complex<double>",
    }.items()
    for name in (n.replace("_char", " char").replace("_int", " int") for n in names.split())
}

_SQUASH = re.compile(r"[^a-z]")
_BY_SQUASHED_NAME = (
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("sendrecv", "send_recv"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)


def kind_of_operator(name: str) -> str | None:
    """The kind of collective a host operator issues; None when it issues none."""
    if name.startswith("symm_mem::"):
        kind = _by_parts(name.removeprefix("symm_mem::"))
        return None if kind in ("other", "barrier") else kind
    return _OPERATORS.get(name)


def _by_parts(name: str) -> str:
    squashed = _SQUASH.sub("", name.lower())
    return next((kind for part, kind in _BY_SQUASHED_NAME if part in squashed), "other")


def is_collective_name(name: str | None) -> bool:
    """Whether NCCL's `Collective name` is one: waiting and the edges of a coalesced group carry one, too."""
    return name is not None and name != "wait" and "coalescing" not in name.lower()


def kind_of_collective_name(name: str) -> str:
    """The kind for NCCL's `Collective name`, such as `_allgather_base` or `all_gather_into_tensor_coalesced`."""
    return _by_parts(name)


def kind_of_gloo_span(name: str) -> str:
    """The kind for a span like `gloo:all_gather`, taken at its word."""
    return _by_parts(name)


def kind_of_kernel(name: str) -> str:
    """The kind for a communication kernel by its name; RCCL's Generic kernels tell nothing: other."""
    return _by_parts(name.partition("(")[0])
