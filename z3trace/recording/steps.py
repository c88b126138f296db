"""Which of the things that look like a training step is one."""

from enum import IntEnum
from typing import Any

from z3trace.recording.recorder import Recorder, Training


class Authority(IntEnum):
    """Whose word counts: an engine's over an optimizer's (it calls one), the script's over both."""

    OPTIMIZER = 1
    ENGINE = 2
    SCRIPT = 3


class UnknownTraining:
    """A training of which only the steps are seen."""

    framework = "unknown"
    device = "cpu"

    def describe(self) -> dict[str, Any]:
        return {}

    def collectives(self, steps: tuple[int, ...]) -> list[dict[str, Any]]:
        return []


class Steps:
    """Passes the steps of the highest authority heard of on to the recorder, if there is one.

    With `only_script` nothing counts but what the script itself calls a step.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._training: Training = UnknownTraining()
        self._announced = Authority.OPTIMIZER
        self._authority = Authority.OPTIMIZER
        self._count = 0

    def tell(self, recorder: Recorder | None, *, only_script: bool = False) -> None:
        """From now on tell this recorder, or nobody. Trainings that are known stay known."""
        self.recorder = recorder
        self._count = 0
        self._authority = Authority.SCRIPT if only_script else self._announced
        if recorder is not None and not isinstance(self._training, UnknownTraining):
            recorder.created(self._training)

    def created(self, training: Training, authority: Authority) -> None:
        """A training is there; that of an engine hides what it uses inside."""
        if isinstance(self._training, UnknownTraining) or authority > self._announced:
            self._training, self._announced = training, authority
            if self.recorder is not None:
                self.recorder.created(training)
        self._authority = max(self._authority, authority)

    @property
    def has_engine(self) -> bool:
        return self._announced >= Authority.ENGINE

    def hides(self, authority: Authority) -> bool:
        """Whether steps of this kind do not count."""
        return authority < self._authority

    def began(self, training: Training, authority: Authority, step: int | None = None) -> None:
        """The first forward of a step begins. `step` is the training's own number for it."""
        if self.recorder is None:
            return
        if authority == self._authority:
            self.recorder.step_started(training, self._count if step is None else step)
        elif authority == self._announced:  # the script ends its steps itself, but this is where one begins
            self.recorder.step_started(self._training, self._count)

    def finished(self, training: Training | None, authority: Authority, step: int | None = None) -> None:
        """A step is over; without `training` it is one of the training that is known."""
        if self.hides(authority):
            return
        if authority > self._authority:
            self._authority = authority
            if self._count:  # the step that the script speaks of was counted when its optimizer stepped
                return
        if self.recorder is None:
            return
        known = self._training if training is None else training
        number = self._count if step is None else step
        self._count += 1
        if self.recorder.begun:
            self.recorder.step_finished(known, number)
        else:  # where this step began is not known, where the next one begins is
            self.recorder.step_started(known, number + 1)
