"""Labelled ranges in the trace. They cost a tenth of a microsecond while nobody profiles."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

from z3trace.engine.labels import format_label

_profiling = torch._C._autograd._profiler_enabled
_NOTHING = nullcontext()


def labelled(verb: str, **values: int | str) -> AbstractContextManager[object]:
    """A range `z3::<verb> ...` around what is done within."""
    return record_function(format_label(verb, **values)) if _profiling() else _NOTHING


class OpenRanges:
    """Ranges that begin in one hook and end in another: one for each module that is running.

    Backward ranges begin inside an autograd node and end inside a later one, so they cross the ranges that
    autograd itself writes.
    """

    def __init__(self, verb: str, phase: str) -> None:
        self._verb = verb
        self._phase = phase
        self._open: list[tuple[str, record_function | None]] = []

    def begin(self, module: str) -> None:
        range_ = None
        if _profiling():
            range_ = record_function(format_label(self._verb, unit=module, phase=self._phase))
            range_.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((module, range_))

    def end(self, module: str) -> None:
        """End the innermost range of this module and those inside it; nothing when it has none."""
        if any(name == module for name, _ in self._open):
            while self._close_innermost() != module:
                pass

    def end_all_but_enclosing(self, module: str) -> None:
        """End every range but those of modules that contain this one."""
        while self._open and not encloses(self._open[-1][0], module):
            self._close_innermost()

    def end_all(self) -> None:
        while self._open:
            self._close_innermost()

    def _close_innermost(self) -> str:
        module, range_ = self._open.pop()
        if range_ is not None:
            range_.__exit__(None, None, None)
        return module


def encloses(outer: str, inner: str) -> bool:
    """Whether the module at path `outer` strictly contains the one at path `inner`."""
    return inner != outer and (outer == "" or inner.startswith(outer + "."))
