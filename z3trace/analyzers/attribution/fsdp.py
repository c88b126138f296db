"""Attribution of FSDP's collectives by the ranges that FSDP itself records."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from z3trace.analyzers.attribution.base import Attribution, Owner, Placement, parameters_of_units
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.host import AUTOGRAD_NODE, host_spans, nearest_ancestor
from z3trace.analyzers.phases import FORWARD, OPTIMIZER, OTHER
from z3trace.analyzers.spans import ModuleSpans, Span, spans_of
from z3trace.analyzers.trace import Trace

_RANGE = re.compile(r"FSDP::(\w+)(?: for ([^()]+?))?(?: \((.*)\))?\Z")
_UNIT_RANGES = ("all_gather", "post_backward_reduce", "post_backward_accumulate")
_WHERE_RANGES = ("pre_forward", "pre_backward", "root_pre_forward", "post_backward_reduce",
                 "root_post_backward_callback")  # fmt: skip
_BEFORE_FORWARD = ("pre_forward", "root_pre_forward")
_FSDP1 = "FullyShardedDataParallel."


def version_of(trace: Trace) -> str | None:
    """ "fsdp2", "fsdp1" or None, by the ranges in the trace."""
    names = [n for n in trace.values("name") if isinstance(n, str)]
    if any(n.startswith("FSDP::") for n in names):
        return "fsdp2"
    return "fsdp1" if any(n.startswith(_FSDP1) for n in names) else None


def range_of(name: str) -> tuple[str, str] | None:
    """(verb, module path) of an FSDP2 range; the root module's path is ""."""
    match = _RANGE.match(name)
    return (match[1], match[3] or match[2] or "") if match else None


def attribute_fsdp2(
    trace: Trace, collectives: Collectives, placement: Placement, description: Mapping[str, Any] | None
) -> tuple[Attribution, Placement]:
    """Unit from the enclosing `FSDP::all_gather (unit)`, issuing module from the hook's range around it.

    The ranges do not say a unit's parameters: the recorder's description does.
    A hook before a forward that runs in no backward is of a forward, also of one without a backward
    (evaluation, generation): the placement says so. One inside a node of backward is of a recomputation.
    """
    parameters = parameters_of_units(description)
    rows = host_spans(trace, lambda name: name.startswith("FSDP::"))
    of_unit, of_hook = (np.zeros(len(trace), np.bool_) for _ in range(2))
    parsed = {int(row): range_of(trace.name_of(int(row))) for row in rows}
    for row, what in parsed.items():
        if what is not None:
            of_unit[row] = what[0] in _UNIT_RANGES
            of_hook[row] = what[0] in _WHERE_RANGES
    issued = collectives.issue_row
    known = issued >= 0
    unit_rows, hook_rows, nodes = (np.full(len(issued), -1, np.int64) for _ in range(3))
    unit_rows[known] = nearest_ancestor(trace, issued[known], of_unit)
    hook_rows[known] = nearest_ancestor(trace, issued[known], of_hook)
    nodes[known] = nearest_ancestor(
        trace, issued[known], trace.named(lambda name: name.startswith(AUTOGRAD_NODE))
    )
    owners, phases = [], list(placement.phase)
    for k in range(len(collectives)):
        unit = parsed.get(int(unit_rows[k]))
        hook = parsed.get(int(hook_rows[k]))
        if unit is None:
            owners.append(Owner())
            continue
        before_forward = hook is not None and hook[0] in _BEFORE_FORWARD
        recomputed = before_forward and nodes[k] >= 0
        if before_forward and not recomputed and phases[k] in (OPTIMIZER, OTHER):
            phases[k] = FORWARD
        issued_in = hook[1] if hook else unit[1]
        reason = None
        if collectives.kind[k] == "all_gather":
            reason = "prefetch" if issued_in != unit[1] else "recompute" if recomputed else "demand"
        owners.append(Owner(unit[1], issued_in, unit[1], phases[k], reason, parameters.get(unit[1])))
    notes = ("gathers are named by FSDP2's own ranges",)
    attribution = Attribution("fsdp2", tuple(owners), notes, module_spans(trace))
    return attribution, placement.with_phase(tuple(phases))


def module_spans(trace: Trace) -> ModuleSpans | None:
    """When which unit ran: from the hook before it to the hook after it, in forward and in backward."""
    forward = _between_hooks(trace, "pre_forward", "post_forward", backward=False)
    return spans_of(forward + _between_hooks(trace, "pre_backward", "post_backward_reduce", backward=True))


def _between_hooks(trace: Trace, before: str, after: str, *, backward: bool) -> list[Span]:
    """From the start of the hook before to the end of the hook after, for each pair of one unit's hooks."""
    events = []
    for row in host_spans(trace, lambda n: n.startswith(("FSDP::" + before, "FSDP::" + after))).tolist():
        what = range_of(trace.name_of(row))
        if what is not None and what[0] in (before, after) and what[1]:
            events.append((int(trace.ts[row]), int(trace.end[row]), *what))
    pending: dict[str, int] = {}
    spans: list[Span] = []
    for start, end, verb, path in sorted(events):
        if verb == before:
            pending[path] = start
        elif path in pending:
            spans.append((pending.pop(path), end, path, backward))
    return spans
