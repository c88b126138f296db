"""What the user is told when a recording is over."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from z3trace.recording.messages import say
from z3trace.recording.rundir import RankReport, RunDirectory
from z3trace.recording.settings import RecordSettings

NOTHING_SEEN = (
    "nothing recorded: no training step was seen. Steps are found where a torch optimizer, DeepSpeed or "
    "z3trace.engine makes them; for others call z3trace.step() after each step, or give --step-from MODULE:FUNCTION"
)


def announce(
    settings: RecordSettings, reports: Sequence[RankReport], deaths: Mapping[int, str] | None = None
) -> None:
    """Say what went wrong, what there is, and what to type next."""
    problems = [(report.rank, text) for report in reports for text in report.problems]
    problems += list((deaths or {}).items())
    for text in dict.fromkeys(text for _, text in problems):
        alone = len(reports) == 1 and reports[0].world_size == 1
        whose = "" if alone else _ranks([rank for rank, other in problems if other == text]) + ": "
        say(whose + text)
    traces = RunDirectory(settings.directory).traces()
    if not traces:
        if not any(report.training_seen for report in reports):
            say("nothing recorded: it failed before its first training step" if problems else NOTHING_SEEN)
        elif not problems:
            say("nothing recorded")
    elif settings.verbosity >= 0:
        shown = shown_path(settings.directory)
        size = sum(path.stat().st_size for path in traces)
        whose = "1 trace" if len(traces) == 1 else f"{len(traces)} traces"
        say(f"recorded {whose}, {size / 1e6:.1f} MB, in {shown}")
        say(f"next: z3trace report {shown}")


def shown_path(path: Path) -> str:
    """The path as the user would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in sorted(ranks))}"
