"""Every collective of a trace, one row each, joined from whatever the trace holds of it.

What is asked for on the host: a `c10d::` operator (the functional collectives wrap one), or, without it, a
`record_param_comms` event, or DeepCompile's `dc::` and symmetric memory's `symm_mem::` operators. What runs is
joined to it by `joins`. What has only one of the two sides is kept, and `missing` says which the trace lacks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import shapes as sh
from z3trace.analyzers.activity import Activity
from z3trace.analyzers.host import host_spans, nearest_ancestor
from z3trace.analyzers.joins import Row, fill_from_parameters, join_gloo_spans, join_kernels
from z3trace.analyzers.kinds import (
    DTYPE_BYTES,
    is_collective_name,
    kind_of_collective_name,
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
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.kind)

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
        return np.array([k in kinds for k in self.kind], np.bool_)


def find_collectives(trace: Trace, activity: Activity) -> Collectives:
    """The collectives of one trace."""
    rows, issue_of_event = _issued(trace)
    notes: list[str] = []
    if activity.on_device:
        rows += join_kernels(trace, activity, rows, issue_of_event)
    else:
        rows += join_gloo_spans(trace, activity, rows, notes)
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
        notes=tuple(notes),
    )


def _issued(trace: Trace) -> tuple[list[Row], dict[int, int]]:
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
    has_name = np.array([is_collective_name(trace.text("collective", int(r))) for r in comms], np.bool_)
    named, owner = comms[has_name], owner_of_comms[has_name]
    parameters_of: dict[int, int] = {}
    for row, op in zip(named.tolist(), owner.tolist(), strict=True):
        parameters_of.setdefault(op, row)
    alone = named[(owner < 0) & (nearest_ancestor(trace, named, _mask(trace, named)) < 0)]

    rows: list[Row] = []
    row_of: dict[int, int] = {}
    world = _only_group_size(trace)
    for event in sorted([*operators.tolist(), *alone.tolist()], key=lambda r: int(trace.ts[r])):
        parameters = parameters_of.get(event, event if trace.text("collective", event) else None)
        row_of[event] = len(rows)
        if parameters is not None:
            row_of[parameters] = len(rows)
        rows.append(_issued_row(trace, event, parameters, world))
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


def _issued_row(trace: Trace, event: int, parameters: int | None, world: int | None) -> Row:
    kind = kind_of_operator(trace.name_of(event))
    if parameters is not None and (kind is None or kind == "other"):
        kind = kind_of_collective_name(trace.text("collective", parameters) or "")
    row = Row(kind or "other", event, int(trace.ts[event]), name=trace.name_of(event))
    if parameters is not None:
        fill_from_parameters(trace, row, parameters)
    row.shapes, dtypes = sh.shapes_of(trace, event)
    if row.elements is None:
        ratio = sh.ranks_sharing(row.name, row.kind, row.shapes)
        row.world = row.world if row.world != NULL else (ratio or NULL)
        members = row.world if row.world != NULL else world
        row.elements, position = sh.message(row.name, row.kind, row.shapes, members)
        if position is not None and position < len(dtypes) and dtypes[position] in DTYPE_BYTES:
            row.dtype = dtypes[position]
    if row.world == NULL and world is not None:
        row.world = world
    if not row.shapes and row.elements is None:
        row.missing = (
            "DeepCompile's operators record no sizes"
            if row.name.startswith("dc::")
            else "no shapes recorded (record_shapes=False)"
        )
    return row


def _only_group_size(trace: Trace) -> int | None:
    """The size of the trace's process groups where all have the same; None otherwise."""
    info = trace.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    found = [g.get("pg_size") for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []
    sizes = {size for size in found if isinstance(size, int) and size > 0}
    if not sizes:
        return trace.world_size
    return sizes.pop() if len(sizes) == 1 else None
