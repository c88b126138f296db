"""Run the user's script or module in this process as if Python had been called with it."""

import importlib.util
import io
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType

from z3trace.errors import UserError


class Terminated(BaseException):
    """SIGTERM arrived: unwinds the script like Ctrl-C does, so that what was recorded is kept."""


@dataclass(frozen=True)
class Outcome:
    """How the script ended. `problem` is None for an orderly end, whatever the exit code."""

    exit_code: int
    problem: str | None = None


@dataclass(frozen=True)
class Program:
    """What to run: a script's path or, with `module`, the name of a module (`python -m`)."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False

    @property
    def name(self) -> str:
        """The short name that a run directory carries."""
        return self.target if self.module else Path(self.target).stem

    def to_argv(self) -> list[str]:
        return [*(["-m"] if self.module else []), self.target, *self.args]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> "Program":
        if argv[0] == "-m":
            return cls(argv[1], tuple(argv[2:]), module=True)
        return cls(argv[0], tuple(argv[1:]))

    def check(self) -> None:
        """Raise UserError when there is plainly nothing to run."""
        if self.module:
            return
        path = Path(self.target)
        if not path.exists():
            raise UserError(f"{self.target}: no such file; give the path of a Python script, or -m MODULE")
        if not path.is_file():
            raise UserError(f"{self.target} is not a file; give the path of a Python script, or -m MODULE")

    def run_as_main(self) -> Outcome:
        """Run it as `__main__` with its own `sys.argv` and `sys.path[0]`, as Python would.

        An uncaught exception is printed without our frames. The `__main__` module stays in place afterwards,
        because threads and exit handlers of the script may still need it.
        """
        previous = signal.signal(signal.SIGTERM, _raise_terminated)
        try:
            # With -m, Python too shows the modules it imports on the way a placeholder.
            sys.argv = ["-m" if self.module else self.target, *self.args]
            if not getattr(sys.flags, "safe_path", False):
                sys.path[0] = str(Path.cwd() if self.module else Path(self.target).resolve().parent)
            code, main = self._load()
            sys.modules["__main__"] = main
            exec(code, main.__dict__)
        except SystemExit as error:
            return Outcome(_exit_code(error))
        except Terminated:
            return Outcome(128 + signal.SIGTERM, "stopped by SIGTERM")
        except KeyboardInterrupt:
            return Outcome(128 + signal.SIGINT, "stopped by Ctrl-C")
        except BaseException as error:
            _show(error)
            line = traceback.format_exception_only(error)[-1].strip()
            return Outcome(1, f"the script raised {line}")
        finally:
            if signal.getsignal(signal.SIGTERM) is _raise_terminated:  # a handler of the script's own stays
                signal.signal(signal.SIGTERM, previous)
        return Outcome(0)

    def _load(self) -> tuple[CodeType, ModuleType]:
        main = ModuleType("__main__")
        if self.module:
            code = self._load_module(main)
        else:
            path = str(Path(self.target).absolute())
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec")
            vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        vars(main)["__builtins__"] = __builtins__
        return code, main

    def _load_module(self, main: ModuleType) -> CodeType:
        try:
            spec = importlib.util.find_spec(self.target)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.target}.__main__")
        except ModuleNotFoundError as error:
            # A parent package that is not there; an import that fails inside one is the script's own error.
            if error.name is None or not self.target.startswith(error.name):
                raise
            spec = None
        code: CodeType | None = None
        if spec is not None and isinstance(spec.loader, InspectLoader):
            code = spec.loader.get_code(spec.name)
        if spec is None or code is None:
            raise SystemExit(f"z3trace: no module named {self.target}, or nothing in it that can be run")
        vars(main).update(
            __file__=spec.origin,
            __cached__=spec.cached,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )
        sys.argv[0] = spec.origin or self.target
        return code


def _exit_code(error: SystemExit) -> int:
    """The process exit code that Python makes of `sys.exit(code)`; text goes to stderr."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr, flush=True)
    return 1


def _show(error: BaseException) -> None:
    """What Python prints for an uncaught exception, from the script's first frame on."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
    raise Terminated
