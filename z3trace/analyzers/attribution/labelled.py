"""Attribution by our own labels, written by the engine and the recorder."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from z3trace.analyzers.attribution.base import (
    Attribution,
    Owner,
    Placement,
    common_module,
    parameters_of_units,
)
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


class _Parameters:
    """Which parameters a labelled collective carried, by the run's description.

    Units stand in `units`. What is not always gathered alike stands in `gathered_together`, under the number
    that is the label's `set`; where one label holds several collectives, each has its part there, in order.
    """

    def __init__(self, description: Mapping[str, Any] | None) -> None:
        self._of_unit = parameters_of_units(description)
        listed = description.get("gathered_together") if description is not None else None
        self._sets: list[Mapping[str, Any]] = listed if isinstance(listed, list) else []
        self._seen: Counter[int] = Counter()

    def carried(self, label: Label) -> tuple[str, ...] | None:
        """Of the label's next collective."""
        number, unit = label.integer("set"), label.text("unit")
        if number is None or number >= len(self._sets):
            return self._of_unit.get(unit) if unit is not None else None
        entry, sequence = self._sets[number], label.integer("seq") or 0
        parts = entry.get("collectives", [entry["parameters"]])
        position = self._seen[sequence]
        self._seen[sequence] += 1
        return tuple(parts[position] if position < len(parts) else entry["parameters"])


def _waits(trace: Trace) -> dict[int, tuple[str | None, str | None]]:
    """Sequence number of a gather -> module and phase that first waited for it."""
    rows = host_spans(trace, lambda name: name.startswith(PREFIX + "wait "))
    found: dict[int, tuple[str | None, str | None]] = {}
    for row in rows[np.argsort(trace.ts[rows], kind="stable")].tolist():
        label = parse_label(trace.name_of(row))
        sequence = label.integer("seq") if label is not None else None
        if label is not None and sequence is not None and label.text("module") is not None:
            found.setdefault(sequence, (label.text("module"), label.text("phase")))
    return found


def attribute(
    trace: Trace,
    collectives: Collectives,
    labels: list[list[Label]],
    placement: Placement,
    description: Mapping[str, Any] | None,
    framework: str,
) -> tuple[Attribution, Placement]:
    """Owners, and the placement with the phases that the labels state."""
    parameters, waits = _Parameters(description), _waits(trace)
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
        carried = parameters.carried(acting)
        unit, module = acting.text("unit"), acting.text("module")
        if carried and acting.integer("set") is not None:
            unit = common_module(carried)
        demanded = reason in ("demand", "recompute")
        used_in = unit
        used_phase = phases[k] if demanded or reason == "prefetch" else None
        sequence = acting.integer("seq")
        if sequence in waits and sequence is not None:
            used_in, used_phase = waits[sequence]
        owners.append(
            Owner(
                unit=unit,
                issued_in=module if module is not None else (unit if demanded else None),
                used_in=used_in,
                used_phase=used_phase,
                reason=reason,
                parameters=carried,
            )
        )
    notes = ("gathers are named by the labels in the trace",)
    return Attribution(framework, tuple(owners), notes, module_spans(trace)), placement.with_phase(
        tuple(phases)
    )
