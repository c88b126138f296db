"""Findings for a reader: the few that matter, and the page of each."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.text import Text

from z3trace.analyzers.report import Report
from z3trace.errors import UserError
from z3trace.reporting.format import milliseconds, percent

_SHOWN = 5
_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "dim"}
SEVERITIES = ("info", "warning", "critical")


def known_findings() -> tuple[str, ...]:
    """The ids that have a page, sorted."""
    pages = resources.files(__package__).joinpath("finding_pages")
    return tuple(sorted(p.name.removesuffix(".md") for p in pages.iterdir() if p.name.endswith(".md")))


def page_of(finding: str) -> str:
    """The page of a finding, as Markdown. Raises UserError for an unknown id, naming the nearest."""
    known = known_findings()
    if finding not in known:
        import difflib

        near = difflib.get_close_matches(finding, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UserError(f"--explain {finding}: no such finding: {hint}")
    return resources.files(__package__).joinpath(f"finding_pages/{finding}.md").read_text(encoding="utf-8")


def explanation(finding: str) -> RenderableType:
    """The page of a finding, rendered. Raises UserError for an unknown id."""
    return Markdown(page_of(finding))


def loud(report: Report) -> list[dict[str, Any]]:
    """The findings that ask for something to be done, most costly first."""
    return [row for row in report["findings"] if row["severity"] != "info"]


def at_least(report: Report, severity: str) -> list[dict[str, Any]]:
    """The findings of this severity or above."""
    least = SEVERITIES.index(severity)
    return [row for row in report["findings"] if SEVERITIES.index(row["severity"]) >= least]


def render_findings(report: Report, step_ns: float) -> RenderableType | None:
    """What to fix, with its cost and the settings it points to; None when there is nothing."""
    rows = loud(report)
    if not rows:
        return None
    lines: list[RenderableType] = [Text("What to fix", style="bold")]
    for row in rows[:_SHOWN]:
        lines.append(_headline(row, step_ns))
        lines += [Text(f"    → {setting}") for setting in _first(row["settings"])]
    more = len(rows) - _SHOWN
    if more > 0:
        lines.append(Text(f"  and {more} more, in the JSON report", style="dim"))
    lines.append(Text(f"  z3trace report --explain {rows[0]['id']} says more", style="dim"))
    return Group(*lines)


def _headline(row: dict[str, Any], step_ns: float) -> Text:
    text = Text("  ")
    text.append(row["id"], style=_STYLES[row["severity"]])
    cost = row["cost_ns_per_step"]
    if cost is not None:
        text.append(
            f"  {milliseconds(cost)} a step, {percent(cost / step_ns) if step_ns else ''}", style="bold"
        )
    text.append(f"\n    {row['title']}")
    return text


def _first(settings: Sequence[str]) -> Sequence[str]:
    return settings[:2]
