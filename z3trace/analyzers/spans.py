"""Which module the host is running at an instant, from what frameworks leave around modules in a trace."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.activity import Activity
from z3trace.analyzers.layers import ROOT, LayerNames
from z3trace.analyzers.trace import Trace

Span = tuple[int, int, str, bool]  # start, end, path, whether of backward


@dataclass(frozen=True)
class ModuleSpans:
    """Stretches of host time that belong to modules: starts and ends (n,) in ns, sorted by start.

    `paths` are the modules' paths; `backward` says of each whether it is a stretch of backward.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    paths: tuple[str, ...]
    backward: NDArray[np.bool_]

    def first_use(self, path: str, backward: bool, after: int) -> int | None:
        """When the module, or one inside it, is first run in that phase after an instant; None if it is not."""
        for k in range(int(np.searchsorted(self.starts, after, side="left")), len(self.starts)):
            inside = not path or self.paths[k] == path or self.paths[k].startswith(path + ".")
            if inside and bool(self.backward[k]) == backward:
                return int(self.starts[k])
        return None

    def layers_at(self, times: NDArray[np.int64], names: LayerNames) -> tuple[NDArray[np.int64], list[str]]:
        """(layer code at each instant, layers by code). Between two spans of one layer it is still that layer."""
        layers: dict[str, int] = {ROOT: 0}
        codes = np.array([layers.setdefault(names.layer_of(p), len(layers)) for p in self.paths], np.int64)
        index = np.searchsorted(self.starts, times, side="right") - 1
        known = index >= 0
        index = np.maximum(index, 0)
        following = np.minimum(index + 1, len(self.starts) - 1)
        inside = times < np.maximum.accumulate(self.ends)[index]
        within_layer = (
            (codes[index] == codes[following])
            & (self.backward[index] == self.backward[following])
            & (following > index)
        )
        return np.where(known & (inside | within_layer), codes[index], layers[ROOT]), list(layers)


def spans_of(found: list[Span]) -> ModuleSpans | None:
    """Module spans from (start, end, path, whether of backward) in any order; None from none."""
    if not found:
        return None
    found = sorted(found)
    return ModuleSpans(
        np.array([span[0] for span in found], np.int64),
        np.array([span[1] for span in found], np.int64),
        tuple(span[2] for span in found),
        np.array([span[3] for span in found], np.bool_),
    )


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
    codes, layers = spans.layers_at(times, names)
    return codes, layers, rows, times


def union_total(trace: Trace, rows: NDArray[np.int64]) -> int:
    """The length of the union of some events, in ns."""
    return iv.total(iv.union(trace.ts[rows], trace.end[rows]))
