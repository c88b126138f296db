"""Trainings with our own engine, which tells of itself."""

from typing import TYPE_CHECKING, Any

from z3trace.recording.steps import Authority, Steps

if TYPE_CHECKING:
    from z3trace.engine import Engine


class EngineTraining:
    """Our engine as the recorder sees it."""

    framework = "z3trace"

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    @property
    def device(self) -> str:
        return str(self._engine.device.type)

    def describe(self) -> dict[str, Any]:
        """The engine's own description, in the shape that `model.json` has for any framework."""
        told = self._engine.describe()
        kept = (
            "dtype",
            "schedule",
            "gradient_accumulation_steps",
            "settings",
            "call_order",
            "units",
            "parameters",
        )
        return {
            "modules": [module["path"] for module in told["modules"]],
            "module_classes": {module["path"]: module["class"] for module in told["modules"]},
            "zero_optimization": told["settings"]["zero_optimization"],
            **{key: told[key] for key in kept},
        }

    def collectives(self, steps: tuple[int, ...]) -> list[dict[str, Any]]:
        return [row for row in self._engine.counter.rows() if row["step"] in steps]


class _Observer:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._trainings: dict[int, EngineTraining] = {}

    def engine_created(self, engine: "Engine") -> None:
        self._steps.created(self._training(engine), Authority.ENGINE)

    def step_started(self, engine: "Engine", step: int) -> None:
        self._steps.began(self._training(engine), Authority.ENGINE, step)

    def step_finished(self, engine: "Engine", step: int) -> None:
        self._steps.finished(self._training(engine), Authority.ENGINE, step)

    def _training(self, engine: "Engine") -> EngineTraining:
        """An engine may be older than we are."""
        return self._trainings.setdefault(id(engine), EngineTraining(engine))


def observe_engines(steps: Steps) -> None:
    """From now on `steps` hears of every engine in this process."""
    from z3trace.engine.observe import add_observer

    add_observer(_Observer(steps))
