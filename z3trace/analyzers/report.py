"""The report: all ranks' tables together, with what they are about and what could not be known."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import z3trace
from z3trace.analyzers import schemas
from z3trace.analyzers.findings import find
from z3trace.analyzers.inputs import Run
from z3trace.analyzers.memory import memory_rows
from z3trace.analyzers.pipeline import RankAnalysis, analyze_trace
from z3trace.analyzers.ranks import join_ranks
from z3trace.analyzers.steps import WindowKind
from z3trace.analyzers.table import Table
from z3trace.analyzers.trace import NULL

SCHEMA = "z3trace.report/1"


@dataclass(frozen=True)
class Report:
    """The result of all analyses. `tables` holds one table for each schema of `schemas.ALL`, by name."""

    trace: Mapping[str, Any]
    tables: Mapping[str, Table]
    notes: tuple[str, ...]
    ranks: tuple[RankAnalysis, ...] = field(repr=False, default=())

    def __getitem__(self, name: str) -> Table:
        return self.tables[name]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, in the form of schema `z3trace.report/1`."""
        return {
            "schema": SCHEMA,
            "generator": f"z3trace {z3trace.__version__}",
            "notes": list(self.notes),
            "trace": dict(self.trace),
            **{name: table.records() for name, table in self.tables.items()},
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def analyze(
    run: Run, *, window: WindowKind = "device", communication_pattern: re.Pattern[str] | None = None
) -> Report:
    """Analyse a run's traces.

    `window`: how a step is delimited on an accelerator, see `find_steps`. `communication_pattern`: kernels to
    count as communication besides those known, by name.
    """
    description = run.model if run.model is not None else run.description
    ranks = [
        analyze_trace(
            trace, trace.rank if trace.rank is not None else position, window=window,
            communication_pattern=communication_pattern, description=description,
        )
        for position, trace in enumerate(run.traces)
    ]  # fmt: skip
    joined = join_ranks(ranks)
    rows: dict[str, list[dict[str, Any]]] = {schema.name: [] for schema in schemas.ALL}
    for rank, transfer in zip(ranks, joined.arrivals.transfer, strict=True):
        rows["whole_trace"] += rank.whole_trace_rows()
        rows["steps"] += rank.step_rows()
        rows["collectives"] += rank.collective_rows()
        rows["layers"] += rank.layer_rows()
        rows["gathers"] += rank.gather_rows(transfer)
        rows["idle"] += rank.idle_rows()
        rows["memory"] += memory_rows(rank)
    rows["ranks"] = joined.rows()
    rows["links"] = joined.link_rows()
    about = _about(run, ranks)
    rows["findings"] = find(
        joined, framework=about["framework"], device=about["device"], world_size=about["world_size"],
        description=_described(run),
    )  # fmt: skip
    notes = [*run.notes, *_shared_notes(ranks), *joined.notes(), *_missing_notes(ranks), *_not_yet(rows)]
    tables = {schema.name: Table(schema, rows[schema.name]) for schema in schemas.ALL}
    return Report(about, tables, tuple(dict.fromkeys(notes)), tuple(ranks))


def _described(run: Run) -> dict[str, Any]:
    """All that is known of the run besides its traces; what describes the run counts over the model's file."""
    return {**(run.model or {}), **(run.description or {})}


def _about(run: Run, ranks: Sequence[RankAnalysis]) -> dict[str, Any]:
    frameworks = {r.attribution.framework for r in ranks}
    used = sorted({s.number for r in ranks for s in r.steps.steps if s.used})
    sizes = {t.world_size for t in run.traces if t.world_size is not None}
    description = run.description or {}
    return {
        "paths": [t.path for t in run.traces],
        "framework": frameworks.pop() if len(frameworks) == 1 else "unknown",
        "device": run.traces[0].device,
        "world_size": max(sizes) if sizes else description.get("world_size"),
        "ranks": [r.rank for r in ranks],
        "steps_used": used,
        "profiler": _profiler(run),
    }


def _profiler(run: Run) -> dict[str, Any]:
    """How the trace was taken, as far as it says so itself."""
    metadata = run.traces[0].metadata
    kept = ("record_shapes", "with_stack", "with_modules", "with_flops", "profile_memory")
    settings = {key: bool(metadata[key]) for key in kept if key in metadata}
    own = metadata.get("z3trace")
    if isinstance(own, Mapping) and isinstance(own.get("profiler"), Mapping):
        settings |= dict(own["profiler"])
    return settings


def _shared_notes(ranks: Sequence[RankAnalysis]) -> list[str]:
    """Notes once where all ranks say the same, else with the rank they are about."""
    everywhere = [set(r.notes) for r in ranks]
    common = set.intersection(*everywhere) if everywhere else set()
    notes = [note for note in (ranks[0].notes if ranks else []) if note in common]
    return notes + [f"rank {r.rank}: {note}" for r in ranks for note in r.notes if note not in common]


def _missing_notes(ranks: Sequence[RankAnalysis]) -> list[str]:
    counts: dict[str, int] = {}
    for rank in ranks:
        for reason in rank.collectives.missing:
            if reason:
                counts[reason] = counts.get(reason, 0) + 1
    notes = [f"{n} collectives: {reason}" for reason, n in counts.items()]
    unsized = sum(int(np.count_nonzero(r.collectives.bytes == NULL)) for r in ranks)
    return notes + ([f"{unsized} collectives: size unknown, so sums over them are absent"] if unsized else [])


def _not_yet(rows: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    empty = [name for name in ("recommendations",) if not rows[name]]
    return [f"not computed by this version: {', '.join(empty)}"] if empty else []


def write_json(report: Report, path: Path) -> None:
    """Write the report atomically."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(report.to_json(), encoding="utf-8")
    temporary.replace(path)
