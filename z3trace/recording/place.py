"""Where a run goes: a name that all ranks of one launch agree on, claimed before anything is written."""

import itertools
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from z3trace.errors import UserError
from z3trace.recording.program import Program
from z3trace.recording.rundir import RunDirectory
from z3trace.recording.settings import Rank, launched

RUNS = Path("runs")
TIME_FORMAT = "%Y%m%d-%H%M%S"


def choose_directory(output: Path | None, program: Program, *, force: bool) -> Path:
    """The absolute, claimed run directory. Raises UserError where a run must not go.

    Inside a launcher each rank comes here on its own and no rank may talk to another yet: the launcher's
    identity and start time are what they have in common.
    """
    if launched():
        return _joined(output, program, force=force)
    return claim(output or name_run(program.name), force=force)


def claim(path: Path, *, force: bool = False) -> Path:
    """Make the directory ours; refuse one that is in use, unless forced."""
    path = path.absolute()
    RunDirectory(path).claim(uuid.uuid4().hex, force=force)
    return path


def name_run(name: str) -> Path:
    """A path `runs/NAME-TIME` that does not exist yet."""
    stem = f"{name}-{time.strftime(TIME_FORMAT)}"
    candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for path in map(RUNS.joinpath, candidates) if not path.exists())


def _joined(output: Path | None, program: Program, *, force: bool) -> Path:
    rank = Rank.from_environment()
    if rank.local_world_size < rank.world_size:
        if output is None:
            raise UserError("several hosts cannot agree on a name for the run: name its directory with -o")
        launch = _rendezvous(os.environ)
    else:
        started = _started(os.getppid())
        if started is None:
            if output is None:
                raise UserError("cannot tell when the launcher started: name the run's directory with -o")
            launch = _rendezvous(os.environ)
        else:
            launch = f"launcher {os.getppid()} of {started}"
            if output is None:
                output = RUNS / f"{program.name}-{time.strftime(TIME_FORMAT, time.localtime(started))}"
    path = output.absolute()
    RunDirectory(path).claim(launch, force=force)
    return path


def _rendezvous(environ: Mapping[str, str]) -> str:
    keys = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE")
    return " ".join(environ.get(key, "-") for key in keys)


def _started(process: int) -> float | None:
    """When a process started, in seconds since the epoch; None where the system does not say."""
    try:
        # The second field, the name in parentheses, may hold spaces; the start time is field 22.
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
