"""From traces to tables: `open_run(paths)` loads, `analyze(run)` gives a `Report`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from z3trace.analyzers.inputs import Run, open_run
    from z3trace.analyzers.report import Report, analyze

__all__ = ["Report", "Run", "analyze", "open_run"]


def __getattr__(name: str) -> Any:
    # Lazily: whoever needs one stage (the loader, the intervals) does not pay for all.
    if name in ("Run", "open_run"):
        from z3trace.analyzers import inputs

        return getattr(inputs, name)
    if name in ("Report", "analyze"):
        from z3trace.analyzers import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
