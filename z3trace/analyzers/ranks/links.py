"""How fast the links are: latency and bandwidth of each process group, fitted to its transfers."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from z3trace.analyzers.pipeline import RankAnalysis
from z3trace.analyzers.ranks.arrivals import Arrivals
from z3trace.analyzers.trace import NULL

# Below this a message's time is all latency and says nothing of the bandwidth.
LARGE_BYTES = 1_000_000
_FACTORS = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}


@dataclass(frozen=True)
class Link:
    """One group's transfers of one kind: time = alpha_ns + bytes / bytes_per_ns.

    `bus_gb_per_s`: algorithm bandwidth times (n-1)/n, for an all-reduce 2(n-1)/n, in 1e9 bytes a second (NCCL
    tests' busbw), of the large messages; None where there are none. `waits_known`: whether waiting for peers
    was taken out. `world` is the group's size.
    """

    group: str | None
    kind: str
    world: int | None
    count: int
    alpha_ns: float
    bytes_per_ns: float | None
    bus_gb_per_s: float | None
    waits_known: bool

    def time_of(self, size: float) -> float:
        """The expected transfer time of a message, ns."""
        return self.alpha_ns + (size / self.bytes_per_ns if self.bytes_per_ns else 0.0)


def fit_links(ranks: Sequence[RankAnalysis], arrivals: Arrivals | None) -> list[Link]:
    """A fit for each group and kind that moved data. Without peers' traces, the shortest time of each size is
    taken for its transfer, because it has waited least."""
    samples: dict[tuple[str | None, str], list[tuple[int, int]]] = defaultdict(list)
    worlds: dict[tuple[str | None, str], int] = {}
    for position, rank in enumerate(ranks):
        c = rank.collectives
        for k in range(len(c)):
            if c.kind[k] not in _FACTORS or c.bytes[k] in (NULL, 0) or c.start[k] == NULL:
                continue
            time = int(c.end[k] - c.start[k])
            if arrivals is not None:
                time = int(arrivals.transfer[position][k])  # NULL, so left out, where nobody else saw it
            if time <= 0:
                continue
            key = (c.group[k], c.kind[k])
            samples[key].append((int(c.bytes[k]), time))
            if c.world[k] != NULL:
                worlds[key] = int(c.world[k])
    return [
        _fit(*key, worlds.get(key), points, arrivals is not None)
        for key, points in samples.items()
        if points
    ]  # fmt: skip


def _fit(
    group: str | None, kind: str, world: int | None, points: list[tuple[int, int]], waits_known: bool
) -> Link:
    by_size: dict[int, list[int]] = defaultdict(list)
    for size, time in points:
        by_size[size].append(time)
    # The lower quartile of each size: above it lies contention with compute and, with one rank, waiting.
    sizes = np.array(sorted(by_size), np.float64)
    times = np.array([float(np.percentile(by_size[int(s)], 25)) for s in sizes])
    weights = np.sqrt([len(by_size[int(s)]) for s in sizes]) / times  # relative errors count
    alpha, slope = float(times.min()), 0.0
    if len(sizes) > 1 and sizes[-1] > sizes[0]:
        design = np.column_stack((np.ones(len(sizes)), sizes))
        solution = np.linalg.lstsq(design * weights[:, None], times * weights, rcond=None)[0]
        alpha, slope = max(0.0, float(solution[0])), max(0.0, float(solution[1]))
    elif sizes[0] >= LARGE_BYTES:
        alpha, slope = 0.0, float(times[0] / sizes[0])
    bus = None
    if sizes[-1] >= LARGE_BYTES and world is not None and world > 1:
        bus = float(sizes[-1] / times[-1]) * _FACTORS[kind] * (world - 1) / world
    return Link(group, kind, world, len(points), alpha, 1 / slope if slope else None, bus, waits_known)
