"""In which module call a DeepSpeed gather was issued, by the autograd functions of its hooks.

Entering a module, the pre-forward hook fetches and then runs `PostBackwardFunctionModule`; leaving it, the
post-forward hook runs `PreBackwardFunctionForModule`. So the entry that follows a gather in forward belongs
to the call that fetches. In backward a fetch lies inside the node `PreBackwardFunctionForModuleBackward`,
whose sequence number is that of the exit it belongs to. Hooks that run inside another node are those of
activation checkpointing's second forward.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.attribution import repetition
from z3trace.analyzers.attribution.base import Attribution, Owner, Placement
from z3trace.analyzers.attribution.calls import CallTree, Hook, numbered, without_inner
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.host import AUTOGRAD_NODE, host_spans, nearest_ancestor, outermost_ancestor
from z3trace.analyzers.kinds import DTYPE_BYTES
from z3trace.analyzers.phases import FORWARD, NAMES, Phases
from z3trace.analyzers.spans import ModuleSpans, Span, spans_of
from z3trace.analyzers.steps import Steps
from z3trace.analyzers.trace import NULL, Trace
from z3trace.engine.schedule.calls import call_tree
from z3trace.engine.schedule.model_file import Description

ENTRY, EXIT = "PostBackwardFunctionModule", "PreBackwardFunctionForModule"
BACKWARD_FETCH = EXIT + "Backward"
REENTRANT = "CheckpointFunctionBackward"
Integers = NDArray[np.int64]
Pass = tuple[int, int]  # step, micro-batch


@dataclass(frozen=True)
class Hooks:
    """The events of DeepSpeed's hooks in a trace, in order of time: those of each forward, and of each recomputation.

    `forwards` by step and micro-batch; `recomputed` by the row of the node of backward that they ran in.
    """

    trace: Trace
    forwards: dict[Pass, list[Hook]]
    recomputed: dict[int, list[Hook]]

    @property
    def reentrant(self) -> bool:
        """Whether recomputations are activation checkpointing's older kind."""
        return any(REENTRANT in self.trace.name_of(node) for node in self.recomputed)


def find_hooks(trace: Trace, steps: Steps, phases: Phases) -> Hooks:
    """The hooks' events of one trace; those of no step are left out."""
    rows = host_spans(trace, lambda name: name in (ENTRY, EXIT))
    rows = rows[np.argsort(trace.ts[rows], kind="stable")]
    exits = trace.named({EXIT})[rows]
    nodes = trace.named(lambda name: name.startswith(AUTOGRAD_NODE))
    around = outermost_ancestor(trace, rows, nodes)
    codes, micro_batches = phases.at(trace.ts[rows])
    numbers = steps.index_at(trace.ts[rows])
    forwards: dict[Pass, list[Hook]] = defaultdict(list)
    recomputed: dict[int, list[Hook]] = defaultdict(list)
    for k, row in enumerate(rows.tolist()):
        if around[k] >= 0:
            recomputed[int(around[k])].append(Hook(row, bool(exits[k])))
        elif numbers[k] >= 0 and codes[k] == NAMES.index(FORWARD):
            forwards[int(numbers[k]), int(micro_batches[k])].append(Hook(row, bool(exits[k])))
    return Hooks(trace, dict(forwards), dict(recomputed))


@dataclass(frozen=True)
class Calls:
    """Which call each hook event belongs to (`of_row`), the calls' paths, and whether they are paths or numbers."""

    tree: CallTree
    of_row: dict[int, int]
    named: bool

    def name(self, row: int) -> str | None:
        call = self.of_row.get(row)
        return None if call is None else self.tree.names[call]


def find_calls(
    hooks: Hooks, description: Description | None, levels: Sequence[Sequence[str]] = ()
) -> Calls | None:
    """Align the hooks with the calls of the described model or, if they do not fit, with those of the first pass.

    `levels` are sets of modules that may be leaves although the description does not say so.
    """
    first = next(iter(hooks.forwards.values()), None)
    if first is None:
        return None
    if description is not None:
        model = call_tree(description.model, description.facts)
        for leaves in (description.leaves, *levels):
            calls = _aligned(hooks, CallTree(without_inner(model, frozenset(leaves))), named=True)
            if calls is not None:
                return calls
    return _aligned(hooks, CallTree(numbered(first)), named=False)


def _aligned(hooks: Hooks, tree: CallTree, *, named: bool) -> Calls | None:
    """None when a named tree fits no pass; passes that do not fit have no calls."""
    of_row: dict[int, int] = {}
    for events in hooks.forwards.values():
        of_row |= tree.align(events) or {}
    if not of_row:
        return None
    calls = Calls(tree, of_row, named)
    _align_recomputations(hooks, calls)
    return calls


def _align_recomputations(hooks: Hooks, calls: Calls) -> None:
    """A recomputation runs the call around the one whose backward needs it.

    A reentrant one runs before the backward of what is inside: it is of that call, or of the one before it, that
    has as many calls and was not computed again in this pass.
    """
    trace, tree = hooks.trace, calls.tree
    sequence = trace.ints("sequence")
    fetches = host_spans(trace, lambda name: name == BACKWARD_FETCH)
    fetches = fetches[np.argsort(trace.ts[fetches], kind="stable")]
    by_sequence = {int(sequence[row]): call for row, call in calls.of_row.items() if sequence[row] != NULL}
    passes = sorted(int(trace.ts[events[0].row]) for events in hooks.forwards.values())
    done: set[tuple[int, int | None]] = set()
    for node, events in sorted(hooks.recomputed.items(), key=lambda item: trace.ts[item[1][0].row]):
        latest = int(np.searchsorted(trace.ts[fetches], trace.ts[events[0].row])) - 1
        current = by_sequence.get(int(sequence[fetches[latest]])) if latest >= 0 else None
        if current is None:
            continue
        length = sum(
            1 for k, hook in enumerate(events) if not hook.is_exit and (k == 0 or events[k - 1].is_exit)
        )
        begun = bisect_right(passes, int(trace.ts[events[0].row]))
        if REENTRANT in trace.name_of(node):
            candidates = (c for c in (*tree.around(current), *tree.before(current)) if (begun, c) not in done)
            top = next((c for c in candidates if tree.length(c) == length), None)
        else:
            top = next((c for c in tree.around(current) if tree.length(c) >= length), None)
        done.add((begun, top))
        found = tree.align(events, top, whole=False) if top is not None else None
        for row, call in (found or {}).items():
            calls.of_row[row] = call
            if sequence[row] != NULL:
                by_sequence[int(sequence[row])] = call


def attribute(
    trace: Trace,
    collectives: Collectives,
    placement: Placement,
    hooks: Hooks,
    description: Description | None,
    levels: Sequence[Sequence[str]],
) -> Attribution | None:
    """Issuing call of each gather of forward and backward; None when the trace does not show the hooks.

    With a model whose calls fit the events seen, calls are named; else they are numbered in order of entry
    and layers are told by repetition.
    """
    calls = find_calls(hooks, description, levels)
    if calls is None or (description is not None and not calls.named):
        return None
    unnamed = repetition.attribute("deepspeed", collectives, placement)
    owners = list(unnamed.owners)
    placed = dict(_placed(trace, collectives, placement, hooks, calls))
    for k, (where, reason) in placed.items():
        owners[k] = Owner(issued_in=where, layer=owners[k].layer, reason=reason)
    if description is None:
        note = "no description of the model (model.json): calls are numbered in order of entry"
        return Attribution("deepspeed", tuple(owners), (note, *unnamed.notes))
    notes = ["gathers are placed by DeepSpeed's hooks in the trace"]
    if _fetches_only_its_own(collectives, placed, _own_sizes(description, calls.tree.names)):
        notes.append("each has the size of what the module that issues it owns: none is a prefetch")
        for k, (where, reason) in placed.items():
            owners[k] = Owner(
                unit=where, issued_in=where, used_in=where, used_phase=placement.phase[k],
                reason=reason or "demand",
            )  # fmt: skip
    return Attribution("deepspeed", tuple(owners), tuple(notes), module_spans(hooks, calls))


def _placed(
    trace: Trace, collectives: Collectives, placement: Placement, hooks: Hooks, calls: Calls
) -> Iterator[tuple[int, tuple[str | None, str | None]]]:
    """(collective, (issuing module, "recompute" if it is one)) of the gathers in hooks that the trace shows."""
    issued = collectives.issue_row
    known = np.flatnonzero(collectives.is_kind("all_gather") & (issued >= 0))
    fetches = nearest_ancestor(trace, issued[known], trace.named({BACKWARD_FETCH}))
    nodes = outermost_ancestor(trace, issued[known], trace.named(lambda name: name.startswith(AUTOGRAD_NODE)))
    sequence = trace.ints("sequence")
    is_exit = trace.named({EXIT})
    exits = {int(sequence[row]): row for row in calls.of_row if is_exit[row] and sequence[row] != NULL}
    for k, fetch, node in zip(known.tolist(), fetches.tolist(), nodes.tolist(), strict=True):
        at = (int(placement.step[k]), int(placement.micro_batch[k]))
        if fetch >= 0:
            yield k, (calls.name(exits.get(int(sequence[fetch]), -1)), None)
        elif node in hooks.recomputed:
            yield (
                k,
                (_entered_after(hooks, hooks.recomputed[node], calls, collectives.issue_ns[k]), "recompute"),
            )
        elif placement.phase[k] == FORWARD and at in hooks.forwards:
            yield k, (_entered_after(hooks, hooks.forwards[at], calls, collectives.issue_ns[k]), None)


def _entered_after(hooks: Hooks, events: list[Hook], calls: Calls, time: Any) -> str | None:
    """The call that the first entry after an instant belongs to."""
    first = bisect_right(events, time, key=lambda hook: int(hooks.trace.ts[hook.row]))
    entry = next((hook for hook in events[first:] if not hook.is_exit), None)
    return None if entry is None else calls.name(entry.row)


def _own_sizes(description: Description, called: Sequence[str]) -> dict[str, set[int]]:
    """Elements that a call may gather of what it owns: all, or the larger parameters if the rest is persistent.

    A leaf owns what the modules inside it do, which have no hooks.
    """
    known = frozenset(called)
    numel = {part.name: part.numel for part in description.model.partitions}
    owned: dict[str, list[int]] = defaultdict(list)
    for module in description.model.modules:
        path = module.path
        while path and path not in known:
            path = path.rpartition(".")[0]
        world = description.world_size
        owned[path] += [-(-numel[name] // world) * world for name in module.partitions]
    return {path: set(accumulate(sorted(sizes, reverse=True))) for path, sizes in owned.items()}


def _fetches_only_its_own(
    collectives: Collectives,
    placed: Mapping[int, tuple[str | None, str | None]],
    own: Mapping[str, set[int]],
) -> bool:
    if not placed:
        return False
    for k, (where, _) in placed.items():
        width = DTYPE_BYTES.get(collectives.dtype[k] or "")
        if where is None or width is None or int(collectives.bytes[k]) // width not in own.get(where, ()):
            return False
    return True


def module_spans(hooks: Hooks, calls: Calls) -> ModuleSpans | None:
    """When which module ran, in forward from its entry to its exit, in backward between the nodes of the two."""
    trace = hooks.trace
    sequence = trace.ints("sequence")
    ends = {int(sequence[r]): int(trace.end[r]) for r in host_spans(trace, lambda n: n == ENTRY + "Backward")}
    begins = {int(sequence[r]): int(trace.ts[r]) for r in host_spans(trace, lambda n: n == BACKWARD_FETCH)}
    found: list[Span] = []
    for events in hooks.forwards.values():
        entered: dict[int, int] = {}
        for hook in events:
            call = calls.of_row.get(hook.row)
            if call is None or not calls.tree.names[call]:
                continue
            if not hook.is_exit:
                entered[call] = hook.row
            elif call in entered:
                entry, path = entered.pop(call), calls.tree.names[call]
                found.append((int(trace.end[entry]), int(trace.ts[hook.row]), path, False))
                begin, end = begins.get(int(sequence[hook.row])), ends.get(int(sequence[entry]))
                if begin is not None and end is not None and begin < end:
                    found.append((begin, end, path, True))
    return spans_of(found)
