"""The order in which modules are fetched: recorded in one pass, used for prefetching in the next ones."""

from collections import deque
from collections.abc import Callable
from enum import Enum

NEVER = -(10**10)


class ScheduleError(RuntimeError):
    """The calls fit neither the recorded order nor a break of it; DeepSpeed stops with "tracing error"."""


class Mode(str, Enum):
    INVALID = "invalid"  # the recorded order broke in this pass
    RECORD = "record"
    COMPLETE = "complete"


class Recorder:
    """DeepSpeed's trace of module fetches over one forward and backward, and the queue made from it.

    `step` counts the fetches of this pass. `fetched_for` says, for each parameter, at which step the latest
    use lies for which it was taken off the queue.
    """

    def __init__(self) -> None:
        self.mode = Mode.INVALID
        self.modules: list[str] = []
        self.step = 0
        self.fetched_for: dict[str, int] = {}
        self._uses: list[tuple[str, int]] = []
        self._queue: deque[tuple[str, int]] = deque()

    def begin_pass(self, parameters: Callable[[str], tuple[str, ...]]) -> None:
        """A forward of the whole model begins; `parameters` gives what a recorded module fetches."""
        if self.mode is Mode.RECORD:
            self._uses = [(name, step) for step, path in enumerate(self.modules) for name in parameters(path)]
            self.mode = Mode.COMPLETE
        elif self.mode is Mode.INVALID:
            self.mode = Mode.RECORD
        self._queue = deque(self._uses)
        self.fetched_for = {}
        self.step = 0

    def enter(self, module: str) -> bool:
        """A module is about to be fetched. False when that breaks the recorded order."""
        if self.mode is Mode.COMPLETE and (
            self.step >= len(self.modules) or self.modules[self.step] != module
        ):
            self.mode = Mode.INVALID
            self.modules, self._uses, self.fetched_for = [], [], {}
            self._queue.clear()
            return False
        if self.mode is Mode.RECORD:
            self.modules.append(module)
        return True

    def latest_use(self, name: str) -> int:
        return self.fetched_for.get(name, NEVER)

    def take_own(self, module: str, names: tuple[str, ...]) -> None:
        """Take the module's own parameters off the queue, unless prefetching already took them."""
        wanted = {name for name in names if self.latest_use(name) < self.step}
        taken: set[str] = set()
        while self._queue and len(taken) < len(wanted):
            name, step = self._queue.popleft()
            self.fetched_for[name] = step
            taken.add(name)
        if taken != wanted:
            raise ScheduleError(
                f"tracing error at fetch {self.step} (module {module!r}): expected {sorted(wanted)} next, "
                f"the recorded order has {sorted(taken)}"
            )

    def take_ahead(
        self, limit: int, missing: Callable[[str], bool], numel: Callable[[str], int]
    ) -> list[str]:
        """Take uses off the queue until the missing parameters among them reach `limit` elements."""
        found: list[str] = []
        total = 0
        while self._queue and total < limit:
            name, step = self._queue.popleft()
            self.fetched_for[name] = max(self.latest_use(name), step)
            if missing(name) and name not in found:
                found.append(name)
                total += numel(name)
        return found
