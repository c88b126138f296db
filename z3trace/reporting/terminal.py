"""A report for the terminal."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from z3trace.analyzers.layers import natural_key
from z3trace.analyzers.report import Report
from z3trace.analyzers.summary import Summary, summarize
from z3trace.reporting.findings import render_findings
from z3trace.reporting.format import UNKNOWN, count, milliseconds, percent, size

_PHASES = ("forward", "backward", "optimizer", "other")
_CAUSES = {
    "sync_stream": "host waits in a stream synchronize",
    "sync_event": "host waits in an event synchronize",
    "sync_device": "host waits in a device synchronize",
    "allocator": "host allocates or frees device memory",
    "host_dataloader": "host loads data",
    "host_hooks": "host runs sharding hooks",
    "host_collective_issue": "host prepares collectives",
    "host_dispatch": "host dispatches operators",
    "host_optimizer": "host runs the optimizer",
    "host_other": "host does something else",
    "device_gap": "device waits for itself",
    "end_of_trace": "nothing follows in the trace",
}


def print_report(console: Console, report: Report) -> None:
    """Print a report: verdict, what to fix, anatomy of the step, gathers per layer, idle time, notes."""
    console.print(render(report))


def render(report: Report) -> RenderableType:
    """The report as one renderable."""
    summary = summarize(report)
    parts: list[RenderableType] = [_headline(report), _verdict(summary)]
    findings = render_findings(report, summary.anatomy.get("duration_ns", 0.0))
    if findings is not None:
        parts.append(findings)
    if summary.windows:
        parts += [_anatomy(summary), _collectives(summary)]
        if summary.layers:
            parts.append(_layers(summary))
        if summary.idle:
            parts.append(_idle(summary))
    else:
        parts.append(_whole_trace(report))
    parts.append(_notes(report))
    return Group(*(line for part in parts for line in (part, Text(""))))


def _headline(report: Report) -> Text:
    about = report.trace
    ranks, world = about["ranks"], about["world_size"]
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    text = Text("z3trace", style="bold")
    of_world = f" of {world}" if world else ""
    text.append(f" · {about['framework']} on {about['device']} · rank {shown}{of_world}", style="not bold")
    steps = about["steps_used"]
    if steps:
        text.append(f" · step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}", style="not bold")
    return text


def _verdict(summary: Summary) -> Text:
    if not summary.windows:
        return Text("No training steps were found; these are the totals of the whole trace.")
    step = summary.anatomy["duration_ns"] or 1
    gathers = [mean for (_, kind), mean in summary.collectives.items() if kind == "all_gather"]
    number = sum(mean.count for mean in gathers)
    text = Text()
    text.append(f"A step takes {milliseconds(step)}", style="bold")
    text.append(
        f": {percent(summary.anatomy['compute_ns'] / step)} compute, "
        f"{percent(summary.anatomy['exposed_comm_ns'] / step)} communication that nothing hides, "
        f"{percent(summary.anatomy['idle_ns'] / step)} idle."
    )
    if number:
        layers, per_layer = summary.gathers_per_layer()
        of_layers = f", {count(per_layer)} for each of {layers} layers" if layers else ""
        text.append(f" {count(number)} all-gathers{of_layers}.")
    if summary.overlap_fraction is not None:
        text.append(f" Compute hides {percent(summary.overlap_fraction)} of the communication.")
    return text


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", no_wrap=position > 0)
    return table


def _anatomy(summary: Summary) -> Table:
    table = _table("The step", "", "step", "compute", "hidden comm", "exposed comm", "memory", "idle")
    rows = [("mean", summary.anatomy)] if len(summary.by_rank) > 1 else []
    rows += [(f"rank {rank}", parts) for rank, parts in list(summary.by_rank.items())[:16]]
    for name, parts in rows:
        table.add_row(
            name,
            *(milliseconds(parts[c]) for c in ("duration_ns", "compute_ns", "overlapped_ns",
                                               "exposed_comm_ns", "exposed_memory_ns", "idle_ns")),
        )  # fmt: skip
    return table


def _collectives(summary: Summary) -> Table:
    table = _table("Collectives of a step", "phase", "kind", "count", "bytes", "exposed")
    table.columns[1].justify = "left"
    for phase, kind in sorted(summary.collectives, key=lambda key: (_PHASES.index(key[0]), key[1])):
        mean = summary.collectives[phase, kind]
        table.add_row(
            phase, kind.replace("_", "-"), count(mean.count), size(mean.bytes), milliseconds(mean.exposed_ns)
        )
    if not summary.collectives:
        table.add_row("none", "", "", "", "")
    return table


def _layers(summary: Summary) -> Table:
    table = _table("All-gathers of a step by layer", "layer", *_PHASES[:3], "bytes", "exposed")
    for layer in sorted({layer for layer, _ in summary.layers}, key=natural_key):
        means = {phase: summary.layers.get((layer, phase)) for phase in _PHASES}
        there = [mean for mean in means.values() if mean is not None]
        moved = [mean.bytes for mean in there]
        exposed = [mean.exposed_ns for mean in there]
        table.add_row(
            _short(layer),
            *(count(mean.count) if (mean := means[p]) else UNKNOWN for p in _PHASES[:3]),
            size(None if None in moved else sum(b for b in moved if b is not None)),
            milliseconds(None if None in exposed else sum(e for e in exposed if e is not None)),
        )
    return table


def _short(layer: str) -> str:
    parts = layer.split("+")
    return layer if len(parts) <= 2 else f"{parts[0]} … {parts[-1]} ({len(parts)})"


def _idle(summary: Summary) -> Table:
    table = _table("Why it idles", "cause", "time", "share", "mostly in")
    table.columns[3].justify = "left"
    table.columns[3].no_wrap = False
    idle = summary.anatomy["idle_ns"] or 1
    for name, (ns, where) in summary.idle.items():
        table.add_row(_CAUSES.get(name, name), milliseconds(ns), percent(ns / idle), (where or "")[:60])
    return table


def _whole_trace(report: Report) -> Table:
    table = _table("The whole trace", "", "length", "compute", "comm", "exposed comm", "idle")
    for row in report["whole_trace"]:
        table.add_row(
            f"rank {row['rank']}",
            *(milliseconds(row[c]) for c in ("duration_ns", "compute_ns", "comm_ns", "exposed_comm_ns",
                                             "idle_ns")),
        )  # fmt: skip
    return table


def _notes(report: Report) -> Text:
    text = Text("Notes", style="bold")
    for note in report.notes:
        text.append(f"\n· {note}", style="not bold dim")
    return text
