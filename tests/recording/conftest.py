"""Running `z3trace record` as a user does, in processes of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]

# Without what a launcher above the tests, or the user's shell, would add.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in LAUNCHER} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def z3trace(tmp_path: Path, environment: dict[str, str]) -> Command:
    """Run the command in the test's own folder; stdout and stderr are kept as text."""

    def run(*arguments: str, cwd: Path = tmp_path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).with_name("z3trace"), *arguments]
        return subprocess.run(
            command, cwd=cwd, env=environment, timeout=timeout, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start the command without waiting for it; whatever the test does, no process of it is left behind."""
    jobs = []

    def begin(*arguments: str) -> "subprocess.Popen[str]":
        job = subprocess.Popen(
            [Path(sys.executable).with_name("z3trace"), *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever runs the tests in the background ignores Ctrl-C; the command must not inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        jobs.append(job)
        return job

    yield begin
    for job in jobs:
        if job.poll() is None:
            job.terminate()  # the launcher takes its ranks with it
        job.communicate(timeout=60)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write a script into the test's own folder and give its name."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return write
