"""Tell the recorder of the trainings that use our own engine."""

from typing import TYPE_CHECKING, Any

from z3trace.recording.recorder import Recorder

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
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._trainings: dict[int, EngineTraining] = {}

    def engine_created(self, engine: "Engine") -> None:
        training = EngineTraining(engine)
        self._trainings[id(engine)] = training
        self._recorder.created(training)

    def step_started(self, engine: "Engine", step: int) -> None:
        self._recorder.step_started(self._trainings[id(engine)], step)

    def step_finished(self, engine: "Engine", step: int) -> None:
        self._recorder.step_finished(self._trainings[id(engine)], step)


def observe_engines(recorder: Recorder) -> None:
    """From now on the recorder hears of every engine that is made in this process."""
    from z3trace.engine.observe import add_observer

    add_observer(_Observer(recorder))
