"""The recording of this process, for what the script itself says: `z3trace.step()`, `z3trace.profile(...)`."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from z3trace.errors import UserError
from z3trace.recording.adapters import install
from z3trace.recording.imports import after_import
from z3trace.recording.messages import say
from z3trace.recording.recorder import Recorder
from z3trace.recording.steps import Authority, Steps

_steps = Steps()
_installed = False


def begin(recorder: Recorder, *, labels: bool = True, step_from: str | None = None) -> None:
    """Record trainings of this process with `recorder`.

    Raises UserError when another recording is going on, or `step_from` is not MODULE:FUNCTION.
    """
    global _installed
    if _steps.recorder is not None:
        raise UserError("this process is being recorded already: leave out the inner z3trace.profile")
    if step_from is not None:
        _watch(step_from)
    _steps.tell(recorder, only_script=step_from is not None)
    if not _installed:
        _installed = True
        install(_steps, labels=labels)


def end() -> None:
    _steps.tell(None)


def step() -> None:
    """Say that a training step is over. Does nothing where nobody records."""
    if _steps.recorder is not None:
        _steps.finished(None, Authority.SCRIPT)


def check_step_from(text: str) -> tuple[str, list[str]]:
    """(module, names from the module down) of MODULE:FUNCTION or MODULE:CLASS.METHOD."""
    module, colon, function = text.partition(":")
    if not (colon and module and function) or not all(name.isidentifier() for name in function.split(".")):
        raise UserError(f"{text} is not MODULE:FUNCTION: give, for example, mypackage.training:train_step")
    if module == "__main__":
        raise UserError(
            "--step-from cannot see into the script itself: call z3trace.step() there after each step"
        )
    return module, function.split(".")


def _watch(text: str) -> None:
    """Each return of the function ends a step."""
    name, path = check_step_from(text)

    def wrap(module: ModuleType) -> None:
        owner: Any = module
        try:
            for part in path[:-1]:
                owner = getattr(owner, part)
            function: Callable[..., Any] = getattr(owner, path[-1])
        except AttributeError:
            say(f"--step-from: {name} has no {'.'.join(path)}; no step will be seen")
            return

        @functools.wraps(function)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            step()
            return result

        setattr(owner, path[-1], stepping)

    after_import(name, wrap)
