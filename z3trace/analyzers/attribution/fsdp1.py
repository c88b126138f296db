"""Attribution of FSDP1's collectives by its ranges, which carry no names.

A unit is told by the order of the calls of `FullyShardedDataParallel.forward` in a forward pass: the k-th is
unit k, the root unit 0. Backward visits the units in the order in which their pre-backward hooks run: the
root, then the others from the last to the first; their post-backward hooks reduce them in the same order, the
root last. A prefetch inside a hook is of the unit whose hook comes next.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.attribution import repetition
from z3trace.analyzers.attribution.base import Attribution, Owner, Placement
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.host import AUTOGRAD_NODE, host_spans, nearest_ancestor
from z3trace.analyzers.kinds import DTYPE_BYTES
from z3trace.analyzers.layers import LayerNames
from z3trace.analyzers.trace import Trace

PREFIX = "FullyShardedDataParallel."
_FORWARD, _PRE, _POST = (PREFIX + name for name in ("forward", "_pre_backward_hook", "_post_backward_hook"))
_PREFETCHES = tuple(
    PREFIX + name for name in ("_pre_forward_prefetch", "_pre_backward_prefetch", "_post_backward_prefetch")
)
Mask = NDArray[np.bool_]


def attribute(
    trace: Trace, collectives: Collectives, placement: Placement, description: Mapping[str, Any] | None
) -> Attribution:
    """Units by number or, with a description whose repeated blocks have their sizes, by module."""
    fallback = repetition.attribute("fsdp1", collectives, placement)
    passes = _Passes(trace, collectives)
    units = dict(passes.units())
    count = max((unit for unit, _ in units.values()), default=0) + 1
    if count < 2:
        return fallback
    names = _modules(description, _sizes(collectives, units, count), count)
    owners = list(fallback.owners)
    for k, (unit, reason) in units.items():
        name = names[unit] if names else f"unit {unit}"
        layer = None if names else (f"unit {unit}" if unit else "root")
        gather = collectives.kind[k] == "all_gather"
        owners[k] = Owner(
            unit=name, issued_in=passes.issued_in(k, names), used_in=name, used_phase=placement.phase[k],
            reason=reason if gather else None, layer=layer,
        )  # fmt: skip
    how = "FSDP1's ranges carry no names: units are told by the order of their calls"
    said = " and named by the described modules of their sizes" if names else " (unit 0 is the root)"
    return Attribution("fsdp1", tuple(owners), (how + said,))


class _Passes:
    """The units of each pass, and where each collective was issued."""

    def __init__(self, trace: Trace, collectives: Collectives) -> None:
        self._trace = trace
        issued = collectives.issue_row
        self._known = np.flatnonzero(issued >= 0)
        rows = issued[self._known]
        wanted = trace.named({_FORWARD, _PRE, _POST})
        self._around = dict(
            zip(self._known.tolist(), nearest_ancestor(trace, rows, wanted).tolist(), strict=True)
        )
        prefetch = nearest_ancestor(trace, rows, trace.named(set(_PREFETCHES)))
        self._ahead = dict(zip(self._known.tolist(), (prefetch >= 0).tolist(), strict=True))
        nodes = trace.named(lambda name: name.startswith(AUTOGRAD_NODE))
        hooks = host_spans(trace, lambda name: name in (_FORWARD, _PRE, _POST))
        hooks = hooks[np.argsort(trace.ts[hooks], kind="stable")]
        inside_node = nearest_ancestor(trace, hooks, nodes) >= 0
        forwards = trace.named({_FORWARD})
        self._number: dict[int, int] = {}
        self._next: dict[int, int] = {}
        outermost = nearest_ancestor(trace, hooks, forwards) < 0
        lists: dict[str, list[int]] = defaultdict(list)
        last = 0
        for row, in_node, outer in zip(hooks.tolist(), inside_node.tolist(), outermost.tolist(), strict=True):
            name = trace.name_of(row)
            if name == _FORWARD and in_node:
                continue
            if name == _FORWARD and outer:
                self._finish(lists, last)
                lists.clear()
                last = 0
            elif name == _FORWARD:
                last += 1
            if name == _FORWARD:
                self._number[row] = last
            else:
                lists[name].append(row)
        self._finish(lists, last)

    def _finish(self, hooks: Mapping[str, list[int]], last: int) -> None:
        """Number the hooks of one backward, whose forward had units 0 to `last`."""
        order = [0, *range(last, 0, -1)]
        for row, unit, following in zip(hooks.get(_PRE, ()), order, [*order[1:], -1], strict=False):
            self._number[row], self._next[row] = unit, following
        reduced = [*order[1:], 0]
        for row, unit, following in zip(hooks.get(_POST, ()), reduced, [*reduced[1:], -1], strict=False):
            self._number[row], self._next[row] = unit, following

    def units(self) -> Iterator[tuple[int, tuple[int, str]]]:
        """(collective, (unit, reason)) of those issued in a range of a unit."""
        for k in self._known.tolist():
            row = self._around[k]
            if row not in self._number:
                continue
            unit = self._number[row]
            if self._ahead[k]:
                unit = self._next.get(row, unit + 1 if self._trace.name_of(row) == _FORWARD else -1)
            if unit >= 0:
                yield k, (unit, "prefetch" if self._ahead[k] else "demand")

    def issued_in(self, k: int, names: Sequence[str] | None) -> str:
        unit = self._number[self._around[k]]
        return names[unit] if names else f"unit {unit}"


def _sizes(collectives: Collectives, units: Mapping[int, tuple[int, str]], count: int) -> list[int | None]:
    """Elements of each unit's gathers, None where they are unknown or differ."""
    found: list[set[int]] = [set() for _ in range(count)]
    for k, (unit, _) in units.items():
        width = DTYPE_BYTES.get(collectives.dtype[k] or "")
        if collectives.kind[k] == "all_gather" and width:
            found[unit].add(int(collectives.bytes[k]) // width)
    return [sizes.pop() if len(sizes) == 1 else None for sizes in found]


def _modules(
    description: Mapping[str, Any] | None, sizes: Sequence[int | None], count: int
) -> list[str] | None:
    """The module of each unit: the repeated blocks of a described model, if they are as many and as large."""
    parameters = (description or {}).get("parameters")
    if not isinstance(parameters, Mapping):
        return None
    names = LayerNames(parameters)
    held: dict[str, int] = defaultdict(int)
    for name, entry in parameters.items():
        numel = entry.get("numel") if isinstance(entry, Mapping) else None
        held[names.layer_of(str(name))] += numel if isinstance(numel, int) else 0
    blocks = [layer for layer in held if layer != "root"]
    if len(blocks) != count - 1:
        return None
    for size, layer in zip(sizes, ["root", *blocks], strict=True):
        # A unit is padded to the number of ranks, and each parameter may be aligned to 16 bytes.
        if size is None or not held[layer] <= size <= held[layer] * 1.01 + 4096:
            return None
    return ["", *blocks]
