"""Averages over the used steps: what a terminal or a comparison shows of a report."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from z3trace.analyzers.layers import natural_key
from z3trace.analyzers.report import Report

Row = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Mean:
    """Mean per step and rank. Times in ns, sizes in bytes; None: unknown in at least one row."""

    count: float
    bytes: float | None = None
    exposed_ns: float | None = None


@dataclass(frozen=True)
class Summary:
    """Means per step and rank over the used steps of all ranks.

    `anatomy`: column of the steps table -> mean ns. `collectives`: (phase, kind) -> mean. `layers`:
    (layer, phase) of all-gathers -> mean, layers in natural order. `idle`: cause -> (mean ns, where).
    """

    windows: int
    anatomy: Mapping[str, float]
    by_rank: Mapping[int, Mapping[str, float]]
    collectives: Mapping[tuple[str, str], Mean]
    layers: Mapping[tuple[str, str], Mean]
    idle: Mapping[str, tuple[float, str | None]]

    @property
    def overlap_fraction(self) -> float | None:
        """Overlapped over all communication time; None without communication."""
        comm = self.anatomy.get("comm_ns", 0)
        return self.anatomy["overlapped_ns"] / comm if comm else None

    def gathers_per_layer(self) -> tuple[int, float]:
        """(number of layers, mean all-gathers of one layer in a step); collectives of several layers left out."""
        counts: dict[str, float] = defaultdict(float)
        for (layer, _), mean in self.layers.items():
            if layer not in ("root", "none") and "+" not in layer:
                counts[layer] += mean.count
        return len(counts), (sum(counts.values()) / len(counts) if counts else 0.0)


ANATOMY = ("duration_ns", "compute_ns", "comm_ns", "memory_ns", "overlapped_ns", "exposed_comm_ns",
           "exposed_memory_ns", "idle_ns")  # fmt: skip


def summarize(report: Report) -> Summary:
    """The means of a report. Without steps (no marks) everything is empty and `windows` is 0."""
    steps = report["steps"].where(used=True).records()
    used = {(row["rank"], row["step"]) for row in steps}
    windows = len(used)

    def rows(table: str) -> list[dict[str, Any]]:
        return [row for row in report[table] if (row["rank"], row["step"]) in used]

    gathers = [row for row in rows("layers") if row["kind"] == "all_gather"]
    gathers.sort(key=lambda row: natural_key(row["layer"]))
    idle: dict[str, tuple[float, str | None]] = {}
    causes = [row for row in rows("idle") if row["split"] == "cause"]
    for name, members in _grouped(causes, lambda row: row["name"]).items():
        longest = max(members, key=lambda row: row["idle_ns"])
        idle[name] = (sum(row["idle_ns"] for row in members) / windows, longest["where"])
    return Summary(
        windows=windows,
        anatomy={name: sum(row[name] for row in steps) / windows for name in ANATOMY} if windows else {},
        by_rank={
            rank: {name: sum(row[name] for row in members) / len(members) for name in ANATOMY}
            for rank, members in _grouped(steps, lambda row: row["rank"]).items()
        },
        collectives=_means(rows("collectives"), lambda row: (row["phase"], row["kind"]), windows),
        layers=_means(gathers, lambda row: (row["layer"], row["phase"]), windows),
        idle=dict(sorted(idle.items(), key=lambda item: -item[1][0])),
    )


def _grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _means(rows: Iterable[Row], key: Callable[[Row], Key], windows: int) -> dict[Key, Mean]:
    return {
        name: Mean(
            sum(row["count"] for row in members) / windows,
            _mean(members, "bytes", windows),
            _mean(members, "exposed_ns", windows),
        )
        for name, members in _grouped(rows, key).items()
    }


def _mean(rows: list[Row], column: str, windows: int) -> float | None:
    values = [row[column] for row in rows]
    return None if any(v is None for v in values) else sum(values) / windows
