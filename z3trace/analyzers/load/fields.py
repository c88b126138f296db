"""Which fields of an event become which column.

An integer column may have several spellings in the args (`External id` of operators, `external id` of old
runtime calls); the first one present in an event counts.
"""

NULL = -(2**63)
"""Stands for "absent" in every int64 column."""

TOP = ("ph", "cat", "name", "pid", "tid")
"""Coded columns read from the event itself."""

INTS: dict[str, tuple[str, ...]] = {
    "external_id": ("External id", "external id"),
    "correlation": ("correlation",),
    "stream": ("stream",),
    "device": ("device",),
    "sequence": ("Sequence number",),
    "bytes": ("bytes",),
    "python_id": ("Python id",),
    "record_function_id": ("Record function id",),
}
"""Integer columns read from the args of every event, by their keys there."""

CODED: dict[str, str] = {"collective": "Collective name", "group_name": "Process Group Name"}
"""Coded columns read from the args of every event."""

RAW: dict[str, str] = {
    "input_dims": "Input Dims",
    "input_types": "Input type",
    "concrete_inputs": "Concrete Inputs",
}
"""Coded columns that hold the JSON text of an argument."""

COLLECTIVE_INTS: dict[str, str] = {
    "in_nelems": "In msg nelems",
    "out_nelems": "Out msg nelems",
    "group_size": "Group size",
    "seq": "Seq",
}
COLLECTIVE_CODED: dict[str, str] = {
    "dtype": "dtype",
    "group_ranks": "Process Group Ranks",
    "group_desc": "Process Group Description",
}
"""Columns read only from events that name a collective or a process group."""

FOLLOWERS: dict[str, dict[str, str]] = {
    "sequence": {"fwd_thread": "Fwd thread id"},
    "python_id": {"python_parent": "Python parent id", "python_module": "Python module id"},
}
"""Integer columns read only from events in which the leading column is present."""

SYNC_INTS: dict[str, str] = {
    "wait_stream": "wait_on_stream",
    "wait_correlation": "wait_on_cuda_event_record_corr_id",
    "wait_event": "wait_on_cuda_event_id",
}
"""Integer columns read only from events of category `cuda_sync`: what they wait for."""

OTHER_INTS: dict[str, str] = {
    "alloc_bytes": "Bytes",
    "alloc_device": "Device Id",
    "total_allocated": "Total Allocated",
    "total_reserved": "Total Reserved",
}
"""Integer columns read from events that are neither spans nor flows: the allocator's instants."""

LABEL_KEYS = {"label_name": "name", "label_labels": "labels"}
"""Args of `M` events, read to name processes and threads; they are no columns."""

SPAN_OR_FLOW = ("X", "B", "E", "s", "t", "f")

INT_COLUMNS = (
    "id",
    *INTS,
    *(column for group in FOLLOWERS.values() for column in group),
    *COLLECTIVE_INTS,
    *SYNC_INTS,
    *OTHER_INTS,
)
CODED_COLUMNS = (*TOP, *CODED, *COLLECTIVE_CODED, *RAW)
