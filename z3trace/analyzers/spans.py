"""Which layer the host is running at an instant, from the ranges that frameworks leave around modules."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.activity import Activity
from z3trace.analyzers.attribution.fsdp import range_of
from z3trace.analyzers.host import host_spans
from z3trace.analyzers.layers import ROOT, LayerNames
from z3trace.analyzers.trace import Trace
from z3trace.engine.labels import PREFIX, parse_label


@dataclass(frozen=True)
class ModuleSpans:
    """Stretches of host time that belong to modules: starts and ends (n,) in ns, sorted by start, and paths."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    paths: tuple[str, ...]

    def layers_at(self, times: NDArray[np.int64], names: LayerNames) -> NDArray[np.int64]:
        """Code of the layer at each instant into `codes(names)`; between two spans of one layer: that layer."""
        codes, layers = self.codes(names)
        index = np.searchsorted(self.starts, times, side="right") - 1
        known = index >= 0
        index = np.maximum(index, 0)
        following = np.minimum(index + 1, len(self.starts) - 1)
        inside = times < np.maximum.accumulate(self.ends)[index]
        within_layer = (codes[index] == codes[following]) & (following > index)
        return np.where(known & (inside | within_layer), codes[index], layers.index(ROOT))

    def codes(self, names: LayerNames) -> tuple[NDArray[np.int64], list[str]]:
        """Layer code of each span and the layers by code (root always among them)."""
        layers: dict[str, int] = {ROOT: 0}
        codes = [layers.setdefault(names.layer_of(p), len(layers)) for p in self.paths]
        return np.array(codes, np.int64), list(layers)


def find_module_spans(trace: Trace, framework: str) -> ModuleSpans | None:
    """The spans of modules; None when this framework's traces do not show them."""
    found: list[tuple[int, int, str]] = []
    if framework == "z3trace":
        for row in host_spans(
            trace, lambda n: n.startswith((PREFIX + "forward ", PREFIX + "backward "))
        ).tolist():
            label = parse_label(trace.name_of(row))
            unit = label.text("unit") if label else None
            if unit is not None:
                found.append((int(trace.ts[row]), int(trace.end[row]), unit))
    elif framework == "fsdp2":
        found = _between_hooks(trace, "pre_forward", "post_forward", open_at_start=True)
        found += _between_hooks(trace, "pre_backward", "post_backward_reduce", open_at_start=True)
    found = [span for span in found if span[2]]
    if not found:
        return None
    found.sort()
    return ModuleSpans(
        np.array([f[0] for f in found], np.int64), np.array([f[1] for f in found], np.int64),
        tuple(f[2] for f in found),
    )  # fmt: skip


def _between_hooks(
    trace: Trace, before: str, after: str, *, open_at_start: bool
) -> list[tuple[int, int, str]]:
    """(start of the hook before, end of the hook after, path) for each pair of one module's hooks."""
    events = []
    for row in host_spans(trace, lambda n: n.startswith(("FSDP::" + before, "FSDP::" + after))).tolist():
        what = range_of(trace.name_of(row))
        if what is not None and what[0] in (before, after):
            events.append((int(trace.ts[row]), int(trace.end[row]), *what))
    pending: dict[str, int] = {}
    spans = []
    for start, end, verb, path in sorted(events):
        if verb == before:
            pending[path] = start if open_at_start else end
        elif path in pending:
            spans.append((pending.pop(path), end, path))
    return spans


def compute_by_layer(
    trace: Trace, activity: Activity, spans: ModuleSpans, names: LayerNames
) -> tuple[NDArray[np.int64], list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Layer of each compute event by the host instant that started it.

    Returns (layer code per event, layers by code, event rows, host instants in ns); a kernel without a known
    launch is left out.
    """
    rows = activity.compute_rows
    times = trace.ts[rows]
    if activity.on_device:
        launches = trace.launches[rows]
        rows, launches = rows[launches >= 0], launches[launches >= 0]
        times = trace.ts[launches]
    _, layers = spans.codes(names)
    return spans.layers_at(times, names), layers, rows, times


def union_total(trace: Trace, rows: NDArray[np.int64]) -> int:
    """The length of the union of some events, in ns."""
    return iv.total(iv.union(trace.ts[rows], trace.end[rows]))
