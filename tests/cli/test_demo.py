"""The demo from end to end, and what it says when a rank fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.timeout(300)
def test_the_demo_shows_fewer_gathers_and_a_shorter_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "z3trace", "demo", "-o", "runs/here", "--dim", "64"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    # Per layer six modules own parameters; each is gathered in forward and in backward. As one unit, twice
    # at most: what is still there from forward is not fetched again.
    assert re.search(r"per layer +6 layers × 12 +6 layers × [12](\.\d)?\n", done.stdout), done.stdout
    relative = re.search(r"relative +1\.00 +(\d\.\d\d)", done.stdout)
    assert relative is not None, done.stdout
    assert float(relative[1]) < 0.8
    for layout in ("fragmented", "layer-wise"):
        assert f"z3trace report runs/here/{layout}\n" in done.stdout
        assert sorted(path.name for path in (tmp_path / "runs/here" / layout).iterdir()) == [
            "rank0.pt.trace.json.gz",
            "rank1.pt.trace.json.gz",
            "run.json",
        ]


def test_a_failing_rank_fails_the_demo_with_its_message(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rich.console import Console\n"
        "from z3trace.demo.compare import record_layouts\n"
        "from z3trace.errors import UserError\n"
        "try: record_layouts(Path('runs').absolute(), 2, ['--heads', '5'], Console(stderr=True))\n"
        "except UserError as error: sys.exit(f'said: {error}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert not list((tmp_path / "runs").glob("*"))
    assert re.search(r"RuntimeError: shape '\[4, \d+, 3, 5, 12\]' is invalid", done.stderr)
    assert re.search(
        r"said: demo: rank [01] of the fragmented training failed: the script raised", done.stderr
    )


def test_a_width_that_the_heads_do_not_divide() -> None:
    command = [sys.executable, "-m", "z3trace", "demo", "--dim", "65"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "65 is not a multiple of 4" in done.stderr
