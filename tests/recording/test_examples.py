"""The examples record and report as their pages say."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from z3trace.analyzers.inputs import open_run
from z3trace.analyzers.report import analyze

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(150)]
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_fsdp2_example(z3trace: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path) -> None:
    script = str(EXAMPLES / "fsdp2_train.py")
    done = z3trace("record", "--nproc-per-node", "2", "-o", "run", script, "--dim", "32")
    assert done.returncode == 0, done.stderr
    gathers = analyze(open_run([tmp_path / "run"]))["gathers"]
    forward = [g for g in gathers if g["rank"] == 0 and g["step"] == 8 and g["issued_phase"] == "forward"]
    assert [g["unit"] for g in forward] == ["", *(f"layers.{k}" for k in range(4))]
    assert all(g["parameters"] for g in gathers)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_example(
    z3trace: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path, environment: dict[str, str]
) -> None:
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    # Around a C++ operator that only inference uses, and that takes a compiler and over a minute to build.
    (tmp_path / "run_example.py").write_text(
        "import runpy\nfrom importlib import import_module\n"
        "import_module('deepspeed.comm.torch').build_shm_op = lambda: None\n"
        f"runpy.run_path({str(EXAMPLES / 'deepspeed_train.py')!r}, run_name='__main__')\n"
    )
    done = z3trace(
        "record",
        "--nproc-per-node",
        "2",
        "-o",
        "run",
        "run_example.py",
        "--dim",
        "32",
        "--leaf",
        "--prefetch",
        "0",
    )
    assert done.returncode == 0, done.stderr
    gathers = analyze(open_run([tmp_path / "run"]))["gathers"]
    # Each layer comes at once, or what of it does not stay after the step.
    whole = {g["unit"] for g in gathers if g["issued_phase"] in ("forward", "backward")}
    assert (
        {f"layers.{k}" for k in range(4)}
        <= whole
        <= {"", "embedding", "head", *(f"layers.{k}" for k in range(4))}
    )
    assert all(g["parameters"] for g in gathers)
