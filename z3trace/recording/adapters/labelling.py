"""Labels around a library's own functions: nothing while nobody profiles, and never an error."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from z3trace.engine.labels import format_label
from z3trace.recording.messages import say

_NOTHING: AbstractContextManager[object] = nullcontext()


class Labels:
    """The labels of one library. After the first failure there are no more of them, and one sentence says so."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._failed = False

    def around(
        self, verb: str, values: Callable[[], Mapping[str, int | str]]
    ) -> AbstractContextManager[object]:
        """A range `z3::<verb> …`; `values` is only called when somebody profiles."""
        if self._failed or not profiling():
            return _NOTHING
        try:
            from torch.profiler import record_function

            return record_function(format_label(verb, **values()))
        except Exception as error:
            self.give_up(error)
            return _NOTHING

    def give_up(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            say(
                f"{self._library} is not as known ({type(error).__name__}: {error}): its gathers get no labels"
            )

    @property
    def active(self) -> bool:
        """Whether a label would be written now."""
        return not self._failed and profiling()


def profiling() -> bool:
    return bool(_torch()._autograd._profiler_enabled())


def inside_backward() -> bool:
    """Whether autograd runs on this thread: in recomputation forward hooks run there, too."""
    return bool(_torch()._current_graph_task_id() != -1)


@functools.cache
def _torch() -> Any:
    """Imported when first asked, and then only looked up: an import statement costs microseconds each time."""
    import torch

    return torch._C
