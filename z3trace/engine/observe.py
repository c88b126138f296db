"""Who wants to hear of engines and their steps. The recorder registers here; the engine knows nothing of it."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from z3trace.engine.engine import Engine


class Observer(Protocol):
    """Called on the training's own thread. Steps are optimizer steps, counted from 0."""

    def engine_created(self, engine: "Engine") -> None: ...

    def step_started(self, engine: "Engine", step: int) -> None:
        """The first forward with gradients since the last optimizer step begins."""
        ...

    def step_finished(self, engine: "Engine", step: int) -> None:
        """The optimizer has stepped, and everything that follows from it is issued."""
        ...


_observers: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Tell `observer` of every engine made from now on, and of the steps of all engines."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Stop telling it. Raises ValueError when it was not added."""
    _observers.remove(observer)


def observers() -> tuple[Observer, ...]:
    return tuple(_observers)
