"""Recording from inside a script or notebook: `with z3trace.profile("runs/x"): …`."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from z3trace.recording import active
from z3trace.recording.place import choose_directory, claim, name_run
from z3trace.recording.program import Outcome, Program
from z3trace.recording.recorder import Recorder
from z3trace.recording.rundir import RunDirectory
from z3trace.recording.settings import Rank, RecordSettings, launched
from z3trace.recording.summary import announce


class Profiler:
    """Records the training steps made between `start()` and `stop()`, or inside a `with` block.

    Args:
        directory: where the run goes; `runs/SCRIPT-TIME` without it.
        skip, warmup, steps: as the options of `z3trace record`, counted from `start()`.
        record_shapes, with_stack, memory, labels: what to record.
        force: overwrite a run that is already there.
        quiet: say nothing but what went wrong.

    Steps are found by themselves where a torch optimizer, DeepSpeed or `z3trace.engine` makes them; a loop that
    calls `step()` after each step decides itself. Raises UserError where the run must not go, or when the
    process is being recorded already.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        skip: int = RecordSettings.skip,
        warmup: int = RecordSettings.warmup,
        steps: int = RecordSettings.steps,
        record_shapes: bool = True,
        with_stack: bool = False,
        memory: bool = False,
        labels: bool = True,
        force: bool = False,
        quiet: bool = False,
    ) -> None:
        self._given = None if directory is None else Path(directory)
        self._force = force
        self._labels = labels
        self._settings = RecordSettings(
            Path(), skip=skip, warmup=warmup, steps=steps, record_shapes=record_shapes, with_stack=with_stack,
            profile_memory=memory, labels=labels, verbosity=-1 if quiet else 0, command=tuple(sys.argv),
        )  # fmt: skip
        self._recorder: Recorder | None = None

    @property
    def directory(self) -> Path:
        """Where the run is; known from `start()` on."""
        return self._settings.directory

    def start(self) -> None:
        rank = _this_rank()
        recorder = Recorder(replace(self._settings, directory=Path()), rank)
        active.begin(recorder, labels=self._labels)
        try:
            self._settings = replace(self._settings, directory=_place(self._given, rank, force=self._force))
        except BaseException:
            active.end()
            raise
        recorder.settings, recorder.directory = self._settings, RunDirectory(self._settings.directory)
        self._recorder = recorder

    def step(self) -> None:
        """Say that a training step is over."""
        active.step()

    def stop(self, problem: str | None = None) -> None:
        """Save what there is and say what to type next."""
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        active.end()
        recorder.close(Outcome(0 if problem is None else 1, problem))
        if recorder.rank.rank == 0:
            announce(self._settings, [recorder.report])

    def __enter__(self) -> "Profiler":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop(None if error is None else f"the recorded block raised {type(error).__name__}: {error}")


def profile(directory: str | os.PathLike[str] | None = None, **options: Any) -> Profiler:
    """`with z3trace.profile("runs/x"): train()`; the options are those of `Profiler`."""
    return Profiler(directory, **options)


def _this_rank() -> Rank:
    """As the process group says where there is one already: processes may be spawned without a launcher."""
    distributed = sys.modules.get("torch.distributed")
    if (
        launched()
        or distributed is None
        or not distributed.is_available()
        or not distributed.is_initialized()
    ):
        return Rank.from_environment()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return Rank(rank=rank, world_size=world, local_rank=rank, local_world_size=world)


def _place(given: Path | None, rank: Rank, *, force: bool) -> Path:
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "notebook"
    if launched():
        return choose_directory(given, Program(name), force=force)
    if rank.world_size == 1:
        return claim(given or name_run(name), force=force)
    # Spawned ranks have their parent in common, and may have no clock tick.
    path = (given or Path("runs") / f"{name}-{os.getppid()}").absolute()
    RunDirectory(path).claim(f"ranks spawned by {os.getppid()}", force=force)
    return path
