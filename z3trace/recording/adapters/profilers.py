"""Profilers that the script starts itself. They come first: two at once end in a crash or in an empty trace."""

import functools
from types import ModuleType
from typing import Any

from z3trace.recording.steps import Steps


def watch_profilers(module: ModuleType, steps: Steps) -> None:
    """Tell the recorder before any profiler starts, and after it has ended. torch.profiler uses this one, too."""
    kind = module.profile
    prepare, leave = kind._prepare_trace, kind.__exit__
    running: set[int] = set()  # those that are not ours

    @functools.wraps(prepare)
    def _prepare_trace(self: Any) -> Any:
        if steps.recorder is None or not steps.recorder.owns(self):
            running.add(id(self))
            if steps.recorder is not None:
                steps.recorder.other_profiler_starts()
        return prepare(self)

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if id(self) in running:
                running.remove(id(self))
                if steps.recorder is not None and not running:
                    steps.recorder.other_profiler_ended()

    kind._prepare_trace, kind.__exit__ = _prepare_trace, __exit__
