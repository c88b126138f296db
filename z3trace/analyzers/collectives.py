"""Every collective of a trace, one row each, joined from whatever the trace holds of it.

What is asked for on the host: a `c10d::` operator (the functional collectives wrap one), or, without it, a
`record_param_comms` event, or DeepCompile's `dc::` operator. What runs: a kernel on a device, linked by its
launch or its External id; a span on one of gloo's worker threads, linked by order among those of the same
kind and size. What has only one of the two sides is kept, and `missing` says which side the trace lacks.
"""

import json
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.activity import Activity
from z3trace.analyzers.host import HostThreads, host_spans, nearest_ancestor, outermost_ancestor
from z3trace.analyzers.kinds import (
    DTYPE_BYTES,
    GLOO_SPAN_OF_OPERATOR,
    kind_of_collective_name,
    kind_of_gloo_span,
    kind_of_kernel,
    kind_of_operator,
)
from z3trace.analyzers.trace import NULL, Trace

Integers = NDArray[np.int64]

# Old traces are rounded to whole microseconds, starts and durations apart.
ROUNDING_NS = 2_000


@dataclass(frozen=True)
class Collectives:
    """Parallel arrays, one entry a collective, in order of issue (of start where the issue is unknown).

    `issue_row`: host operator (-1 unknown); `issue_ns`: its start, or the start of the transfer; `start`, `end`:
    the transfer (NULL unknown); `bytes`: all-gather output, reduce-scatter input, otherwise the message
    (NULL unknown); `world`: members of the group (NULL unknown); `missing`: "" or what the trace lacks of it.
    """

    kind: tuple[str, ...]
    issue_row: Integers
    issue_ns: Integers
    start: Integers
    end: Integers
    bytes: Integers
    world: Integers
    group: tuple[str | None, ...]
    dtype: tuple[str | None, ...]
    missing: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kind)

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
        return np.array([k in kinds for k in self.kind], np.bool_)


@dataclass
class _Row:
    kind: str
    issue_row: int = -1
    issue_ns: int = NULL
    start: int = NULL
    end: int = NULL
    bytes: int = NULL
    world: int = NULL
    group: str | None = None
    dtype: str | None = None
    missing: str = ""


def find_collectives(trace: Trace, threads: HostThreads, activity: Activity) -> Collectives:
    """The collectives of one trace."""
    rows, issue_of_event = _issued(trace)
    if activity.on_device:
        _join_kernels(trace, activity, rows, issue_of_event)
    else:
        _join_gloo_spans(trace, activity, rows)
    rows.sort(key=lambda row: row.issue_ns)

    def integers(name: str) -> Integers:
        return np.array([getattr(row, name) for row in rows], np.int64)

    return Collectives(
        kind=tuple(row.kind for row in rows),
        issue_row=integers("issue_row"),
        issue_ns=integers("issue_ns"),
        start=integers("start"),
        end=integers("end"),
        bytes=integers("bytes"),
        world=integers("world"),
        group=tuple(row.group for row in rows),
        dtype=tuple(row.dtype for row in rows),
        missing=tuple(row.missing for row in rows),
    )


def _issued(trace: Trace) -> tuple[list[_Row], dict[int, int]]:
    """Rows of what the host asked for, and for each host event that is one (or holds its parameters) its row."""
    operators = host_spans(trace, lambda name: kind_of_operator(name) is not None)
    is_operator = np.zeros(len(trace), np.bool_)
    is_operator[operators] = True
    # An operator inside another is the same collective seen again; the innermost carries the shapes.
    inner = nearest_ancestor(trace, operators, is_operator)
    is_operator[inner[inner >= 0]] = False
    operators = operators[is_operator[operators]]

    comms = host_spans(trace, lambda name: name == "record_param_comms")
    owner_of_comms = _enclosing_operator(trace, comms, operators, is_operator)
    has_name = np.array([trace.text("collective", int(r)) not in (None, "wait") for r in comms], np.bool_)
    named, owner = comms[has_name], owner_of_comms[has_name]
    parameters_of: dict[int, int] = {}
    for row, op in zip(named.tolist(), owner.tolist(), strict=True):
        parameters_of.setdefault(op, row)
    alone = named[(owner < 0) & (nearest_ancestor(trace, named, _mask(trace, named)) < 0)]

    rows: list[_Row] = []
    row_of: dict[int, int] = {}
    for event in sorted([*operators.tolist(), *alone.tolist()], key=lambda r: int(trace.ts[r])):
        parameters = parameters_of.get(event, event if trace.text("collective", event) else None)
        row_of[event] = len(rows)
        if parameters is not None:
            row_of[parameters] = len(rows)
        rows.append(_issued_row(trace, event, parameters))
    for event, op in zip(comms.tolist(), owner_of_comms.tolist(), strict=True):
        if op in row_of:
            row_of.setdefault(event, row_of[op])
    return rows, row_of


def _enclosing_operator(
    trace: Trace, events: Integers, operators: Integers, is_operator: NDArray[np.bool_]
) -> Integers:
    """The operator around each event; in traces rounded to microseconds also one that seems to end too early."""
    found = nearest_ancestor(trace, events, is_operator)
    for lane in np.unique(trace.lane[events[found < 0]]):
        lost = np.flatnonzero((found < 0) & (trace.lane[events] == lane))
        own = operators[trace.lane[operators] == lane]
        own = own[np.argsort(trace.ts[own], kind="stable")]
        if not len(own):
            continue
        latest = np.searchsorted(trace.ts[own], trace.ts[events[lost]], side="right") - 1
        close = (latest >= 0) & (
            trace.ts[events[lost]] <= trace.end[own[np.maximum(latest, 0)]] + ROUNDING_NS
        )
        found[lost[close]] = own[latest[close]]
    return found


def _mask(trace: Trace, rows: Integers) -> NDArray[np.bool_]:
    mask = np.zeros(len(trace), np.bool_)
    mask[rows] = True
    return mask


def _issued_row(trace: Trace, event: int, parameters: int | None) -> _Row:
    kind = kind_of_operator(trace.name_of(event))
    if parameters is not None and (kind is None or kind == "other"):
        kind = kind_of_collective_name(trace.text("collective", parameters) or "")
    row = _Row(kind or "other", event, int(trace.ts[event]))
    if parameters is not None:
        fill_from_parameters(trace, row, parameters)
    if row.bytes == NULL:
        _fill_from_shapes(trace, row, event)
    if row.world == NULL:
        row.world = _only_group_size(trace)
    return row


def _only_group_size(trace: Trace) -> int:
    """The size of the trace's process groups where all have the same; NULL otherwise."""
    info = trace.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    sizes = {g.get("pg_size") for g in groups if isinstance(g, dict)} if isinstance(groups, list) else set()
    size = sizes.pop() if len(sizes) == 1 else (trace.world_size if not sizes else None)
    return size if isinstance(size, int) else NULL


def fill_from_parameters(trace: Trace, row: _Row, event: int) -> None:
    """Size, group and dtype from an event with NCCL's arguments (a record_param_comms or a kernel)."""
    sent, received = (int(trace.ints(c)[event]) for c in ("in_nelems", "out_nelems"))
    dtype = trace.text("dtype", event)
    width = DTYPE_BYTES.get(dtype or "")
    elements = received if row.kind == "all_gather" else sent
    if width is not None and elements != NULL:
        row.bytes, row.dtype = elements * width, dtype
    size = int(trace.ints("group_size")[event])
    if size != NULL:
        row.world = size
    row.group = trace.text("group_name", event)


def _shapes(trace: Trace, event: int) -> tuple[list[object], list[object]]:
    dims, types = trace.text("input_dims", event), trace.text("input_types", event)
    try:
        shapes, dtypes = json.loads(dims or "[]"), json.loads(types or "[]")
    except ValueError:
        return [], []
    return (shapes, dtypes) if isinstance(shapes, list) and isinstance(dtypes, list) else ([], [])


def _elements(shape: object) -> int | None:
    """Elements of a tensor's shape or, for a list of tensors, of all of them."""
    if not isinstance(shape, list):
        return None
    if all(isinstance(n, int) for n in shape):
        return math.prod(shape)
    parts = [_elements(s) for s in shape]
    return None if any(p is None for p in parts) else sum(p for p in parts if p is not None)


def _fill_from_shapes(trace: Trace, row: _Row, event: int) -> None:
    """Size from the operator's recorded shapes: (output, input) for the tensor collectives."""
    shapes, dtypes = _shapes(trace, event)
    if not shapes:
        row.missing = "no shapes recorded (record_shapes=False)"
        return
    name = trace.name_of(event)
    flat = name.endswith("_base_")
    position = 1 if flat and row.kind in ("reduce_scatter", "all_to_all") else 0
    if name.endswith("reduce_scatter_") and len(shapes) > 1:
        position = 1
    elements = _elements(shapes[position]) if position < len(shapes) else None
    dtype = str(dtypes[position]) if position < len(dtypes) else ""
    if elements is not None and not (dtype == "TensorList" and shapes[position] == []):
        row.bytes = elements  # completed to bytes below or, for a list of tensors, by the span's dtype
        row.dtype = dtype if dtype in DTYPE_BYTES else None
        row.bytes = elements * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else NULL
    if flat and row.kind in ("all_gather", "reduce_scatter") and len(shapes) > 1:
        large, small = sorted((_elements(shapes[0]) or 0, _elements(shapes[1]) or 0), reverse=True)
        if small and large % small == 0:
            row.world = large // small
    if name.endswith("allgather_") and len(shapes) > 1 and isinstance(shapes[0], list) and shapes[0]:
        first = shapes[0][0]
        if isinstance(first, list) and first and isinstance(first[0], list):
            row.world = len(first)


def _join_gloo_spans(trace: Trace, activity: Activity, rows: list[_Row]) -> None:
    """The k-th operator of a kind and size ran as the k-th span of that kind and size that began later."""
    span_rows = activity.communication_rows
    span_rows = span_rows[np.argsort(trace.ts[span_rows], kind="stable")]
    waiting: dict[tuple[str, int | None], list[int]] = {}
    for span in span_rows.tolist():
        key = (trace.name_of(span), _span_elements(trace, span))
        waiting.setdefault(key, []).append(span)
    cursor = dict.fromkeys(waiting, 0)
    for row in rows:
        name = GLOO_SPAN_OF_OPERATOR.get(row.kind)
        if name is None:
            continue
        key = (name, _span_elements_of(trace, row))
        queue = waiting.get(key, [])
        position = cursor.get(key, 0)
        while position < len(queue) and trace.ts[queue[position]] < row.issue_ns:
            position += 1
        if position < len(queue):
            _take_span(trace, row, queue[position])
            queue[position] = -1
            position += 1
        elif not row.missing:
            row.missing = "no gloo span: it ended after the recording"
        if key in cursor:
            cursor[key] = position
    left = [span for queue in waiting.values() for span in queue if span >= 0]
    for span in sorted(left, key=lambda s: int(trace.ts[s])):
        row = _Row(kind_of_gloo_span(trace.name_of(span)), -1, int(trace.ts[span]))
        row.missing = "no c10d operator: it was issued before the recording or outside the profiled threads"
        _take_span(trace, row, span)
        rows.append(row)


def _take_span(trace: Trace, row: _Row, span: int) -> None:
    row.start, row.end = int(trace.ts[span]), int(trace.end[span])
    if row.bytes != NULL:
        return
    shapes, dtypes = _shapes(trace, span)
    elements = _elements(shapes[0]) if shapes else None
    width = DTYPE_BYTES.get(str(dtypes[0])) if dtypes else None
    if elements is None or width is None:
        return
    if row.kind == "all_gather":
        # The span shows the shard; the output needs the group's size.
        if row.world == NULL:
            return
        elements *= row.world
    row.bytes, row.dtype = elements * width, str(dtypes[0])


def _span_elements(trace: Trace, span: int) -> int | None:
    shapes, _ = _shapes(trace, span)
    return _elements(shapes[0]) if shapes else None


def _span_elements_of(trace: Trace, row: _Row) -> int | None:
    """Elements that gloo's span shows for an issued collective: the input of the operator."""
    shapes, _ = _shapes(trace, row.issue_row)
    if not shapes:
        return None
    name = trace.name_of(row.issue_row)
    position = 1 if name.endswith("_base_") or name in ("c10d::allgather_", "c10d::reduce_scatter_") else 0
    return _elements(shapes[position]) if position < len(shapes) else None


def _join_kernels(trace: Trace, activity: Activity, rows: list[_Row], row_of: dict[int, int]) -> None:
    kernels = activity.communication_rows
    known = np.zeros(len(trace), np.bool_)
    known[list(row_of)] = True
    launches = trace.launches[kernels]
    host = np.full(len(kernels), -1, np.int64)
    launched = launches >= 0
    host[launched] = outermost_ancestor(trace, launches[launched].astype(np.int64), known)
    by_external: dict[int, int] = {}
    external = trace.ints("external_id")
    for event in row_of:
        if external[event] != NULL:
            by_external.setdefault(int(external[event]), event)
    has_arguments = trace.has("collective")
    for kernel, event in zip(kernels.tolist(), host.tolist(), strict=True):
        if event < 0:
            event = by_external.get(int(external[kernel]), -1)
        start, end = int(trace.ts[kernel]), int(trace.end[kernel])
        collective = trace.text("collective", kernel) if has_arguments else None
        if event >= 0:
            row = rows[row_of[event]]
            # Several kernels of one collective (or one kernel per channel) make one transfer.
            row.end = max(row.end, end) if row.end != NULL else end
            row.start = min(row.start, start) if row.start != NULL else start
        else:
            kind = (
                kind_of_collective_name(collective) if collective else kind_of_kernel(trace.name_of(kernel))
            )
            launch = int(trace.launches[kernel])
            row = _Row(kind, launch, int(trace.ts[launch]) if launch >= 0 else start, start, end)
            row.missing = "no c10d operator or record_param_comms: known by its kernel only"
            rows.append(row)
        if collective is not None and row.bytes == NULL:
            fill_from_parameters(trace, row, kernel)
    for row in rows:
        if row.start == NULL and not row.missing:
            row.missing = "no kernel: not profiled, coalesced with another collective, or a single rank"
