"""What ran for each collective that the host issued: kernels and copies on a device, gloo's spans on its threads."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from z3trace.analyzers import shapes as sh
from z3trace.analyzers.activity import Activity
from z3trace.analyzers.host import host_spans, nearest_ancestor, outermost_ancestor
from z3trace.analyzers.kinds import (
    DTYPE_BYTES,
    is_collective_name,
    kind_of_collective_name,
    kind_of_gloo_span,
    kind_of_kernel,
    kind_of_operator,
)
from z3trace.analyzers.trace import NULL, Trace

_LARGEST = np.iinfo(np.int64).max


@dataclass
class Row:
    """A collective while it is put together; see `Collectives`."""

    kind: str
    issue_row: int = -1
    issue_ns: int = NULL
    start: int = NULL
    end: int = NULL
    world: int = NULL
    group: str | None = None
    elements: int | None = None  # of the whole message
    dtype: str | None = None
    moved: int | None = None  # bytes, where elements of several types are in one message
    missing: str = ""
    name: str = ""
    shapes: list[object] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        if self.kind == "barrier":
            return 0
        width = DTYPE_BYTES.get(self.dtype or "")
        size = self.moved
        if size is None and width is not None and self.elements is not None:
            size = self.elements * width
        return size if size is not None and 0 <= size <= _LARGEST else NULL

    def ran(self, start: int, end: int) -> None:
        """Several kernels of one collective (or one for each channel) make one transfer."""
        self.start = start if self.start == NULL else min(self.start, start)
        self.end = end if self.end == NULL else max(self.end, end)


def fill_from_parameters(trace: Trace, row: Row, event: int) -> None:
    """Size, group and dtype from an event with NCCL's arguments (a record_param_comms or a kernel)."""
    sent, received = (int(trace.ints(c)[event]) for c in ("in_nelems", "out_nelems"))
    dtype = trace.text("dtype", event)
    count = received if row.kind == "all_gather" else sent
    if dtype in DTYPE_BYTES and count != NULL:
        row.elements, row.dtype = count, dtype
    size = int(trace.ints("group_size")[event])
    if size > 0:
        row.world = size
    row.group = trace.text("group_name", event)


def join_gloo_spans(trace: Trace, activity: Activity, rows: list[Row], notes: list[str]) -> list[Row]:
    """Give the rows their spans: the k-th operator of a kind and size ran as the k-th such span that began later.

    Returns rows of the spans that are left, issued by nothing in the trace.
    """
    spans = activity.communication_rows
    spans = spans[np.argsort(trace.ts[spans], kind="stable")]
    checks = _consistency_checks(trace, spans)
    if len(checks):
        notes.append(
            f"recorded with TORCH_DISTRIBUTED_DEBUG=DETAIL: {len(checks)} collectives of its own checks are not "
            "counted, and every collective waits for them: record without it for true times"
        )
    waiting: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for span in spans[~np.isin(spans, checks)].tolist():
        waiting[trace.name_of(span), sh.span_elements(trace, span)].append(span)
    cursor = dict.fromkeys(waiting, 0)
    messages = host_spans(trace, lambda name: name.startswith(("gloo:send", "gloo:recv")))
    messages = messages[np.argsort(trace.ts[messages], kind="stable")]
    for row in rows:
        world = row.world if row.world != NULL else None
        wanted = sh.gloo_spans(row.name, row.kind, row.shapes, world)
        taken = []
        for key in wanted:
            queue, position = waiting.get(key, []), cursor.get(key, 0)
            while position < len(queue) and trace.ts[queue[position]] < row.issue_ns:
                position += 1
            if position < len(queue):
                taken.append(queue[position])
                queue[position] = -1
                position += 1
            if key in cursor:
                cursor[key] = position
        for span in taken:
            row.ran(int(trace.ts[span]), int(trace.end[span]))
        if row.kind == "send_recv":
            # Its span begins in the operator, on the same thread, and ends only when somebody waits for it.
            first = int(np.searchsorted(trace.ts[messages], row.issue_ns))
            within = first < len(messages) and trace.ts[messages[first]] < trace.end[row.issue_row]
            taken = [int(messages[first])] if within else []
        _size_from_spans(trace, row, taken)
        if len(taken) < len(wanted):
            row.missing = row.missing or "no gloo span: it ended after the recording"
        elif not wanted:
            row.missing = row.missing or "gloo does not show when it runs"
    left = []
    for span in sorted((s for queue in waiting.values() for s in queue if s >= 0), key=lambda s: trace.ts[s]):
        row = Row(kind_of_gloo_span(trace.name_of(span)), -1, int(trace.ts[span]))
        row.missing = "no c10d operator: it was issued before the recording or outside the profiled threads"
        row.ran(int(trace.ts[span]), int(trace.end[span]))
        _size_from_spans(trace, row, [span])
        left.append(row)
    return left


def _consistency_checks(trace: Trace, spans: np.ndarray) -> np.ndarray:
    """Spans of the fingerprints that TORCH_DISTRIBUTED_DEBUG=DETAIL gathers before every collective.

    It also runs a barrier of sends and receives inside the operators: that tells that it was on. The
    fingerprints have groups, and so threads, of their own, and are integers.
    """
    messages = host_spans(trace, lambda name: name in ("gloo:send", "gloo:recv"))
    issuing = trace.named(lambda name: kind_of_operator(name) not in (None, "send_recv"))
    around = nearest_ancestor(trace, messages, issuing & ~trace.named({"c10d::monitored_barrier_"}))
    if not (around >= 0).any():
        return np.empty(0, np.int64)
    is_check = np.array(
        [trace.name_of(s) == "gloo:all_gather" and sh.shapes_of(trace, s)[1] == ["long int"] for s in spans],
        np.bool_,
    )
    lanes = trace.lane[spans]
    own = ~np.isin(lanes, np.unique(lanes[~is_check]))
    return np.asarray(spans[is_check & own])


def _size_from_spans(trace: Trace, row: Row, spans: list[int]) -> None:
    """The element type of lists of tensors, and sizes that the operator does not show."""
    if row.bytes != NULL or not spans:
        return
    count, moved, dtypes = 0, 0, set()
    for span in spans:
        shapes, types = sh.shapes_of(trace, span)
        for shape, dtype in zip(shapes, types, strict=False):
            tensor = sh.elements(shape)
            if tensor is None or dtype not in DTYPE_BYTES:
                return
            count, moved = count + tensor, moved + tensor * DTYPE_BYTES[dtype]
            dtypes.add(dtype)
    if not count:
        return
    if row.elements is None:
        # The span of an all-gather shows the shard; the output needs the group's size.
        if row.kind == "all_gather" and row.world == NULL:
            return
        row.elements = count * (row.world if row.kind == "all_gather" else 1)
    if len(dtypes) == 1:
        row.dtype = dtypes.pop()
    else:
        row.moved = moved * row.elements // count


def join_kernels(trace: Trace, activity: Activity, rows: list[Row], row_of: dict[int, int]) -> list[Row]:
    """Give the rows their kernels: by launch or External id, or else as the group that a later launch ran.

    `row_of` maps host events to rows. Returns rows of the kernels that are left, issued by nothing in the trace.
    """
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
    unowned: list[int] = []
    for kernel, event in zip(kernels.tolist(), host.tolist(), strict=True):
        if event < 0:
            event = by_external.get(int(external[kernel]), -1)
        if event < 0:
            unowned.append(kernel)
            continue
        row = rows[row_of[event]]
        row.ran(int(trace.ts[kernel]), int(trace.end[kernel]))
        if row.bytes == NULL and is_collective_name(_collective(trace, kernel)):
            fill_from_parameters(trace, row, kernel)
    left = [_of_kernel(trace, kernel) for kernel in _joined_as_groups(trace, rows, unowned)]
    for row in rows:
        if row.start == NULL and not row.missing:
            row.missing = "no kernel: it was not profiled, or a single rank needs none"
    return left


def _collective(trace: Trace, kernel: int) -> str | None:
    return trace.text("collective", kernel) if trace.has("collective") else None


def _kind_of(trace: Trace, kernel: int) -> str:
    collective = _collective(trace, kernel)
    if is_collective_name(collective):
        return kind_of_collective_name(collective or "")
    return kind_of_kernel(trace.name_of(kernel))


def _of_kernel(trace: Trace, kernel: int) -> Row:
    launch = int(trace.launches[kernel])
    start, end = int(trace.ts[kernel]), int(trace.end[kernel])
    issued = int(trace.ts[launch]) if launch >= 0 and trace.ts[launch] != NULL else start
    row = Row(_kind_of(trace, kernel), launch, issued, start, end)
    row.missing = "no c10d operator or record_param_comms: known by its kernel only"
    if is_collective_name(_collective(trace, kernel)):
        fill_from_parameters(trace, row, kernel)
    return row


# Kernels of point-to-point messages also run all-to-alls; RCCL's Generic ones (other) run anything.
_LARGEST_GROUP = 64
_RUNS = {"send_recv": ("send_recv", "all_to_all")}


def _joined_as_groups(trace: Trace, rows: list[Row], kernels: list[int]) -> list[int]:
    """Coalesced collectives run when their group ends, outside the operators: one kernel may run several of them.

    A launch on the thread that issued them runs those of its kind that wait for one. Returns the other kernels.
    """
    waiting: dict[int, list[Row]] = defaultdict(list)
    for row in reversed(rows):
        if row.start == NULL and row.issue_row >= 0:
            waiting[int(trace.lane[row.issue_row])].append(row)
    graphs = trace.named(lambda name: "GraphLaunch" in name)
    left: list[int] = []
    open_groups: dict[int, list[Row]] = defaultdict(list)  # by thread
    ran: dict[int, list[Row]] = {}  # by launch: several kernels may come of one
    for kernel in sorted(kernels, key=lambda k: int(trace.ts[max(int(trace.launches[k]), 0)])):
        launch = int(trace.launches[kernel])
        if launch < 0 or graphs[launch]:
            left.append(kernel)
            continue
        kind = _kind_of(trace, kernel)
        if launch not in ran:
            thread = int(trace.lane[launch])
            issued, open_group = waiting[thread], open_groups[thread]
            while issued and issued[-1].issue_ns < trace.ts[launch]:
                open_group.append(issued.pop())
            runs = [kind == "other" or row.kind in _RUNS.get(kind, (kind,)) for row in open_group]
            ran[launch] = [row for row, fits in zip(open_group, runs, strict=True) if fits]
            others = [row for row, fits in zip(open_group, runs, strict=True) if not fits]
            open_groups[thread] = others[-_LARGEST_GROUP:]
        if not ran[launch]:
            left.append(kernel)
        for row in ran[launch]:
            row.ran(int(trace.ts[kernel]), int(trace.end[kernel]))
    return left
