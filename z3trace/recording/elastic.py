"""Processes of a job on this host, through torch's elastic launcher."""

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class JobResult:
    """Exit codes (negative: a signal) of the ranks that failed first, and the signal that stopped us all."""

    failures: dict[int, int] = field(default_factory=dict)
    stopped_by: int | None = None


def run_ranks(
    arguments: Sequence[str], ranks: int, *, logs: Path | None = None, verbose: bool = False
) -> JobResult:
    """Run `python ARGUMENTS` on `ranks` processes that find each other, and wait for them.

    When one fails, the others are stopped. They write to our stdout and stderr or, with `logs`, into files
    there (see `log_file`).
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if ranks > 1:  # as torchrun does: the ranks share the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not verbose:  # failures are told by whoever called us
        for name in logging.root.manager.loggerDict:  # some of them have a level of their own
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="z3trace-") as scratch:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(str(logs or scratch), redirects=Std.ALL if logs else Std.NONE),
        )
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            return JobResult({rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException as error:
            return JobResult(stopped_by=int(error.sigval))
    return JobResult()


def log_file(logs: Path, rank: int, stream: str) -> Path | None:
    """The file with a rank's `stdout` or `stderr`; None as long as it has none."""
    return next(logs.glob(f"*/attempt_0/{rank}/{stream}.log"), None)
