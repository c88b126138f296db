"""Attribution by our own labels, written by the engine and the recorder."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from z3trace.analyzers.attribution.base import Attribution, Owner, Placement
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.host import host_spans, nearest_ancestor
from z3trace.analyzers.spans import ModuleSpans, Span, spans_of
from z3trace.analyzers.trace import Trace
from z3trace.engine.labels import PREFIX, Label, parse_label

_REASON_OF_VERB = {"prefetch": "prefetch", "fetch": "demand", "post_step_gather": "post_step"}
_KIND_OF_VERB = {"reduce": "reduce_scatter", "gather": "all_gather", "fetch": "all_gather",
                 "prefetch": "all_gather", "post_step_gather": "all_gather"}  # fmt: skip


def has_labels(trace: Trace) -> bool:
    """Whether the trace carries labels of ours."""
    return any(isinstance(name, str) and name.startswith(PREFIX) for name in trace.values("name"))


def chains(trace: Trace, collectives: Collectives) -> list[list[Label]]:
    """The labels that enclose each collective's issue, innermost first."""
    rows = host_spans(trace, lambda name: name.startswith(PREFIX))
    is_label = np.zeros(len(trace), np.bool_)
    is_label[rows] = True
    parsed: dict[int, Label | None] = {}
    found: list[list[Label]] = [[] for _ in range(len(collectives))]
    issued = np.flatnonzero(collectives.issue_row >= 0)
    current = nearest_ancestor(trace, collectives.issue_row[issued], is_label)
    while len(issued):
        known = current >= 0
        issued, current = issued[known], current[known]
        for k, row in zip(issued.tolist(), current.tolist(), strict=True):
            if row not in parsed:
                parsed[row] = parse_label(trace.name_of(row))
            label = parsed[row]
            if label is not None:
                found[k].append(label)
        current = nearest_ancestor(trace, current, is_label)
    return found


def kinds_by_label(collectives: Collectives, labels: list[list[Label]]) -> tuple[str, ...]:
    """Kinds corrected by the labels: what a backend runs as another collective counts as what it is."""
    kinds = list(collectives.kind)
    for k, chain in enumerate(labels):
        verb = next((label.verb for label in chain if label.verb in _KIND_OF_VERB), None)
        if verb is not None:
            kinds[k] = _KIND_OF_VERB[verb]
    return tuple(kinds)


def module_spans(trace: Trace) -> ModuleSpans | None:
    """When which unit ran, from the forward and backward labels; the model itself is left out."""
    found: list[Span] = []
    for row in host_spans(
        trace, lambda n: n.startswith((PREFIX + "forward ", PREFIX + "backward "))
    ).tolist():
        label = parse_label(trace.name_of(row))
        unit = label.text("unit") if label is not None else None
        if label is not None and unit:
            found.append((int(trace.ts[row]), int(trace.end[row]), unit, label.verb == "backward"))
    return spans_of(found)


def attribute(
    trace: Trace, labels: list[list[Label]], placement: Placement, description: Mapping[str, Any] | None
) -> tuple[Attribution, Placement]:
    """Owners, and the placement with the phases that the labels state.

    The parameters of a unit come from the engine's own description of its units, where there is one.
    """
    listed = description.get("units") if description is not None else None
    parameters = {u["name"]: tuple(u["parameters"]) for u in listed} if isinstance(listed, list) else {}
    owners, phases = [], list(placement.phase)
    for k, chain in enumerate(labels):
        acting = next((label for label in chain if label.verb in _KIND_OF_VERB), None)
        phase = next((p for label in chain if (p := label.text("phase")) is not None), None)
        if phase is not None:
            phases[k] = phase
        if acting is None:
            owners.append(Owner())
            continue
        reason = acting.text("reason") or next(
            (_REASON_OF_VERB[label.verb] for label in chain if label.verb in _REASON_OF_VERB), None
        )
        unit, module = acting.text("unit"), acting.text("module")
        demanded = reason in ("demand", "recompute")
        owners.append(
            Owner(
                unit=unit,
                issued_in=module if module is not None else (unit if demanded else None),
                used_in=unit,
                used_phase=phases[k] if demanded or reason == "prefetch" else None,
                reason=reason,
                parameters=parameters.get(unit) if unit is not None else None,
            )
        )
    notes = ("gathers are named by the labels in the trace",)
    attribution = Attribution("z3trace", tuple(owners), notes, module_spans(trace))
    return attribution, placement.with_phase(tuple(phases))
