"""z3trace: see why ZeRO-3 training is slow.

In code: `with z3trace.profile("runs/x"): …` records the steps made inside, `z3trace.step()` says where one ends.
The command is `z3trace`; the parts are `z3trace.engine` (an instrumented ZeRO-3 engine),
`z3trace.analyzers` (trace -> tables -> findings) and `z3trace.recording`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from z3trace.recording.active import step
    from z3trace.recording.in_code import Profiler, profile

__all__ = ["Profiler", "__version__", "profile", "step"]
__version__ = "0.1.0"

_LAZY = {
    "step": "z3trace.recording.active",
    "profile": "z3trace.recording.in_code",
    "Profiler": "z3trace.recording.in_code",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:  # most who import z3trace want none of these
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
