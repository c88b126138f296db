"""What to record, and which process this is."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RecordSettings:
    """What a recording is asked for. Steps are optimizer steps.

    `step_from` is MODULE:FUNCTION where the script's own function ends a step; `labels` false leaves the
    training libraries untouched.
    `directory` is absolute: the script may change the working folder. `exit_grace` is in seconds, 0 waits
    for ever. `command` is what the user typed, kept for the run's metadata. `supervised` is true
    for ranks that our own launcher started: it settles the run directory and tells the user what came of it.
    """

    directory: Path
    skip: int = 5
    warmup: int = 2
    steps: int = 3
    record_shapes: bool = True
    with_stack: bool = False
    profile_memory: bool = False
    labels: bool = True
    step_from: str | None = None
    exit_grace: float = 60.0
    verbosity: int = 0
    supervised: bool = False
    command: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        """How many steps pass before the first recorded one."""
        return self.skip + self.warmup

    @property
    def needed(self) -> int:
        """How many steps the script must make for a complete recording."""
        return self.first + self.steps

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"directory": str(self.directory)})

    @classmethod
    def from_json(cls, text: str) -> "RecordSettings":
        values = json.loads(text)
        return cls(**values | {"directory": Path(values["directory"]), "command": tuple(values["command"])})


@dataclass(frozen=True)
class Rank:
    """One process of the job, as the launcher's environment describes it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Rank":
        """The rank that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE name; alone without them."""
        world = int(environ.get("WORLD_SIZE", 1))
        rank = int(environ.get("RANK", 0))
        return cls(
            rank=rank,
            world_size=world,
            local_rank=int(environ.get("LOCAL_RANK", rank)),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", world)),
        )


def launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (torchrun and its kin) started this process as one rank of a job."""
    return "RANK" in environ and "WORLD_SIZE" in environ
