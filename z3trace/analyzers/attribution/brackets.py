"""In which module call a DeepSpeed gather was issued, by the autograd functions of its hooks.

Entering a module, the pre-forward hook fetches and then runs `PostBackwardFunctionModule`; leaving it, the
post-forward hook runs `PreBackwardFunctionForModule`. So the entry that follows a gather in forward belongs
to the call that fetches. In backward a fetch lies inside the node `PreBackwardFunctionForModuleBackward`,
whose sequence number is that of the exit it belongs to.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.attribution import repetition
from z3trace.analyzers.attribution.base import Attribution, Owner, Placement
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.host import host_spans, nearest_ancestor
from z3trace.analyzers.phases import FORWARD, NAMES, Phases
from z3trace.analyzers.spans import ModuleSpans, Span, spans_of
from z3trace.analyzers.steps import Steps
from z3trace.analyzers.trace import NULL, Trace
from z3trace.engine.schedule.calls import Call, CallFacts, call_tree
from z3trace.engine.schedule.interface import Model

ENTRY, EXIT = "PostBackwardFunctionModule", "PreBackwardFunctionForModule"
BACKWARD_FETCH = EXIT + "Backward"
Integers = NDArray[np.int64]


def _entries_and_exits(trace: Trace) -> tuple[Integers, Integers, NDArray[np.bool_]]:
    """(entries, exits, whether each event lies in a backward node), in order of time."""
    in_node = trace.named(lambda name: name.startswith("autograd::engine::evaluate_function"))
    rows = []
    for name in (ENTRY, EXIT):
        found = host_spans(trace, lambda n, name=name: n == name)  # type: ignore[misc]
        rows.append(found[np.argsort(trace.ts[found], kind="stable")])
    return rows[0], rows[1], in_node


def recomputes(trace: Trace) -> bool:
    """Whether modules are entered inside backward: activation checkpointing runs their forward again."""
    entries, _, in_node = _entries_and_exits(trace)
    return bool((nearest_ancestor(trace, entries, in_node) >= 0).any())


def attribute(
    trace: Trace,
    collectives: Collectives,
    placement: Placement,
    steps: Steps,
    phases: Phases,
    model: Model | None,
    facts: CallFacts | None,
) -> Attribution | None:
    """Issuing call of each gather of forward and backward; None when the trace does not show the hooks.

    With a model whose calls fit the entries seen, calls are named; else they are numbered in order of entry
    and layers are told by repetition.
    """
    entries, exits, in_node = _entries_and_exits(trace)
    if not len(entries) or not len(exits):
        return None
    own = nearest_ancestor(trace, entries, in_node) < 0
    entries = entries[own]
    exits = exits[nearest_ancestor(trace, exits, in_node) < 0]
    names = _called(call_tree(model, facts)) if model is not None else None
    unnamed = repetition.attribute("deepspeed", collectives, placement)
    owners = list(unnamed.owners)
    fetches = trace.named({BACKWARD_FETCH})
    sequence = trace.ints("sequence")
    passes: dict[int, list[int]] = defaultdict(list)
    for k in np.flatnonzero(collectives.is_kind("all_gather")).tolist():
        if placement.phase[k] in ("forward", "backward"):
            passes[_pass_key(int(placement.step[k]), int(placement.micro_batch[k]))].append(k)
    named = 0
    entry_passes, exit_passes = (_forward_passes(trace, rows, steps, phases) for rows in (entries, exits))
    for key, members in passes.items():
        calls = _Calls(trace, entries[entry_passes == key], exits[exit_passes == key], names)
        for k in members:
            row = int(collectives.issue_row[k])
            node = int(nearest_ancestor(trace, np.array([row]), fetches)[0]) if row >= 0 else -1
            if node >= 0:
                where = calls.by_sequence(int(sequence[node]))
            elif placement.phase[k] == "forward":
                where = calls.entered_after(int(collectives.issue_ns[k]))
            else:
                where = None
            if where is not None:
                named += names is not None
                owners[k] = Owner(issued_in=where, layer=owners[k].layer)
    if names is not None:
        if not named or model is None:
            return None
        notes = ("gathers are placed by DeepSpeed's hooks in the trace",)
        spans = module_spans(trace, steps, phases, model, facts)
        return Attribution("deepspeed", tuple(owners), notes, spans)
    note = "no description of the model (model.json): calls are numbered in order of entry"
    return Attribution("deepspeed", tuple(owners), (note, *unnamed.notes))


def module_spans(
    trace: Trace, steps: Steps, phases: Phases, model: Model, facts: CallFacts | None
) -> ModuleSpans | None:
    """When which module ran, in forward from its entry to its exit, in backward between the nodes of the two.

    None where the entries seen are not those of the model's calls.
    """
    entries, exits, in_node = _entries_and_exits(trace)
    entries = entries[nearest_ancestor(trace, entries, in_node) < 0]
    exits = exits[nearest_ancestor(trace, exits, in_node) < 0]
    names = _called(call_tree(model, facts))
    sequence = trace.ints("sequence")
    ends = {int(sequence[r]): int(trace.end[r]) for r in host_spans(trace, lambda n: n == ENTRY + "Backward")}
    begins = {int(sequence[r]): int(trace.ts[r]) for r in host_spans(trace, lambda n: n == BACKWARD_FETCH)}
    entry_passes, exit_passes = (_forward_passes(trace, rows, steps, phases) for rows in (entries, exits))
    found: list[Span] = []
    for key in np.unique(entry_passes[entry_passes >= 0]):
        inside = entries[entry_passes == key]
        if len(inside) < len(names):
            return None
        for entry, exit_row, path in _Calls(trace, inside, exits[exit_passes == key], names).pairs():
            if not path:
                continue
            found.append((int(trace.end[entry]), int(trace.ts[exit_row]), path, False))
            begin, end = begins.get(int(sequence[exit_row])), ends.get(int(sequence[entry]))
            if begin is not None and end is not None and begin < end:
                found.append((begin, end, path, True))
    return spans_of(found)


def _pass_key(step: Any, micro_batch: Any) -> Any:
    """One number for a pass, for integers and for arrays of them."""
    return step * 1_000_000 + micro_batch


def _forward_passes(trace: Trace, rows: Integers, steps: Steps, phases: Phases) -> Integers:
    """The forward pass (see `_pass_key`) in which each event happens; negative outside forward."""
    codes, micro_batches = phases.at(trace.ts[rows])
    numbers = steps.index_at(trace.ts[rows])
    forward = (codes == NAMES.index(FORWARD)) & (numbers >= 0)
    return np.where(forward, _pass_key(numbers, micro_batches), -1)


def _called(call: Call) -> list[str]:
    return [call.module, *(name for inner in call.inner for name in _called(inner))]


class _Calls:
    """The module calls of one forward, from its entries and exits."""

    def __init__(self, trace: Trace, entries: Integers, exits: Integers, names: list[str] | None) -> None:
        self._times = trace.ts[entries]
        # The model itself enters once for each tensor it is given; every other call once.
        extra = 0
        if names is not None:
            extra = max(0, len(entries) - len(names))
        self._extra, self._names = extra, names if names is not None and len(entries) >= len(names) else None
        self._by_sequence: dict[int, int] = {}
        self._pairs: list[tuple[int, int, int]] = []
        stack: list[int] = []
        events = sorted(
            [(int(trace.ts[r]), 0, k, int(r)) for k, r in enumerate(entries)]
            + [(int(trace.ts[r]), 1, k, int(r)) for k, r in enumerate(exits)]
        )
        sequence = trace.ints("sequence")
        for _, is_exit, k, row in events:
            if not is_exit:
                stack.append(k)
            elif stack:
                call = stack.pop()
                self._pairs.append((call, int(entries[call]), row))
                if sequence[row] != NULL:
                    self._by_sequence[int(sequence[row])] = call

    def _name(self, entry: int) -> str | None:
        call = max(0, entry - self._extra)
        if self._names is None:
            return f"call {call}"
        return self._names[call] if call < len(self._names) else None

    def pairs(self) -> list[tuple[int, int, str]]:
        """(entry event, exit event, path) of each call that has both."""
        named = [(entry, exit_row, self._name(call)) for call, entry, exit_row in self._pairs]
        return [(entry, exit_row, name) for entry, exit_row, name in named if name is not None]

    def entered_after(self, time: int) -> str | None:
        entry = int(np.searchsorted(self._times, time, side="right"))
        return self._name(entry) if entry < len(self._times) else None

    def by_sequence(self, number: int) -> str | None:
        entry = self._by_sequence.get(number)
        return None if entry is None else self._name(entry)
