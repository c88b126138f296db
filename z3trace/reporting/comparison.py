"""Several reports side by side."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from z3trace.analyzers.report import Report
from z3trace.analyzers.summary import Summary, summarize
from z3trace.reporting.format import count, milliseconds, percent, size


def print_comparison(
    console: Console, reports: Mapping[str, Report], step_ms: Mapping[str, float] | None = None
) -> None:
    """Print reports side by side, the first being what the others are compared with.

    `step_ms`: step times measured without the profiler, in ms, by the same names; shown first.
    """
    summaries = {name: summarize(report) for name, report in reports.items()}
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in summaries:
        table.add_column(name, justify="right")
    if step_ms:
        first = next(iter(step_ms.values()))
        table.add_row("step time, not profiled", *(milliseconds(step_ms[n] * 1e6) for n in summaries))
        table.add_row("  relative", *(f"{step_ms[n] / first:.2f}" for n in summaries), style="bold")
    for title, value in _LINES:
        table.add_row(title, *(value(summary) for summary in summaries.values()))
    console.print(table)


def _gathers(summary: Summary, phase: str) -> str:
    mean = summary.collectives.get((phase, "all_gather"))
    return count(mean.count) if mean else "0"


def _gathered_bytes(summary: Summary) -> str:
    moved = [mean.bytes for (_, kind), mean in summary.collectives.items() if kind == "all_gather"]
    return size(None if None in moved else sum(b for b in moved if b is not None))


def _per_layer(summary: Summary) -> str:
    layers, gathers = summary.gathers_per_layer()
    return f"{layers} layers × {count(gathers)}"


_LINES = (
    ("all-gathers per layer", _per_layer),
    ("  in forward, all", lambda s: _gathers(s, "forward")),
    ("  in backward, all", lambda s: _gathers(s, "backward")),
    ("bytes gathered", _gathered_bytes),
    ("communication", lambda s: milliseconds(s.anatomy.get("comm_ns"))),
    ("  hidden by compute", lambda s: percent(s.overlap_fraction)),
    ("  exposed", lambda s: milliseconds(s.anatomy.get("exposed_comm_ns"))),
    ("idle", lambda s: milliseconds(s.anatomy.get("idle_ns"))),
    ("step, profiled", lambda s: milliseconds(s.anatomy.get("duration_ns"))),
)
