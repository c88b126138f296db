"""What a script sees and what comes back from it: as under plain Python. No training is needed for these."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

pytestmark = pytest.mark.distributed

SHOW = """
import json, sys
print(json.dumps({"argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__}))
"""


def test_everything_after_the_script_is_the_scripts(z3trace: Command, script: Script) -> None:
    arguments = ["-o", "x", "--help", "--steps", "3", "--", "-m", "--", "a b", ""]
    done = z3trace("record", script(SHOW), *arguments)
    assert done.returncode == 0
    assert json.loads(done.stdout)["argv"] == ["script.py", *arguments]


def test_the_launcher_hands_arguments_on_untouched(z3trace: Command, script: Script) -> None:
    arguments = ["--nproc-per-node", "9", "--", "--", "{}", "$HOME"]
    done = z3trace("record", "--nproc-per-node", "1", script(SHOW), *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["argv"] == ["script.py", *arguments]


def test_the_script_is_main_in_its_own_folder(z3trace: Command, script: Script, tmp_path: Path) -> None:
    name = script(SHOW, "below/train.py")
    seen = json.loads(z3trace("record", name).stdout)
    plain = subprocess.run(
        [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert seen == json.loads(plain.stdout)


def test_a_module_runs_as_with_python_m(z3trace: Command, script: Script, tmp_path: Path) -> None:
    script("", "pack/__init__.py")
    script(SHOW + "from . import other\nprint(other.__name__, __package__, __spec__.name)", "pack/train.py")
    script("", "pack/other.py")
    done = z3trace("record", "-m", "pack.train", "-m", "x")
    plain = subprocess.run(
        [sys.executable, "-m", "pack.train", "-m", "x"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == plain.stdout


def test_a_package_runs_its_main_module(z3trace: Command, script: Script) -> None:
    script("", "pack/__init__.py")
    script("print('main of', __package__)", "pack/__main__.py")
    assert z3trace("record", "-m", "pack").stdout == "main of pack\n"


def test_a_module_that_is_not_there(z3trace: Command) -> None:
    done = z3trace("record", "-m", "no.such.module")
    assert done.returncode == 1
    assert "no module named no.such.module" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("clash", ["engine", "analyzers", "recording", "click", "cli"])
def test_the_scripts_own_modules_win(z3trace: Command, script: Script, clash: str) -> None:
    script("WHOSE = 'mine'", f"{clash}.py" if clash != "analyzers" else "analyzers/__init__.py")
    name = script(f"import z3trace.engine.labels, {clash}\nprint({clash}.WHOSE)")
    assert z3trace("record", name).stdout == "mine\n"


@pytest.mark.parametrize("ranks", [(), ("--nproc-per-node", "1"), ("--nproc-per-node", "2")])
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("sys.exit(0)", 0),
        ("sys.exit('enough')", 1),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_exit_codes_pass_through(
    z3trace: Command, script: Script, ranks: tuple[str, ...], ending: str, code: int
) -> None:
    done = z3trace("record", *ranks, script(f"import os, signal, sys\n{ending}"))
    if ranks and code < 0:
        code = 128 - code  # as a shell says it
        assert "killed by SIGKILL" in done.stderr
    assert done.returncode == code, done.stderr


def test_the_rank_that_failed_first_gives_the_exit_code(z3trace: Command, script: Script) -> None:
    name = script(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        "try: time.sleep(60)\n"
        "finally: print('cleaned up', flush=True)\n"
    )
    done = z3trace("record", "--nproc-per-node", "2", name)
    assert done.returncode == 7
    assert done.stdout == "cleaned up\n"


def test_an_exception_shows_the_scripts_frames_alone(
    z3trace: Command, script: Script, tmp_path: Path
) -> None:
    name = script("def inner():\n    raise ValueError('boom')\ninner()\n")
    done = z3trace("record", name)
    plain = subprocess.run(
        [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == plain.returncode == 1
    assert done.stderr.startswith(plain.stderr)
    assert "recorded" in done.stderr.removeprefix(plain.stderr)


def test_a_syntax_error_is_the_scripts(z3trace: Command, script: Script) -> None:
    done = z3trace("record", script("x = = 1\n"))
    assert done.returncode == 1
    assert "SyntaxError: invalid syntax" in done.stderr
    assert "z3trace/recording" not in done.stderr


def test_a_script_without_our_engine_is_told_what_can_be_recorded(
    z3trace: Command, script: Script, tmp_path: Path
) -> None:
    done = z3trace("record", script("print('trained')"))
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "no training step was seen" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_threads_that_never_end_do_not_keep_the_job(z3trace: Command, script: Script) -> None:
    name = script(
        "import sys, threading\n"
        "threading.Thread(target=threading.Event().wait, name='eternal').start()\n"
        "sys.exit(7)\n"
    )
    begun = time.monotonic()
    done = z3trace("record", "--exit-grace", "0.5", name, timeout=30)
    assert time.monotonic() - begun < 20
    assert done.returncode == 7
    assert "waiting for eternal" in done.stderr


def test_threads_that_end_in_time_are_waited_for(z3trace: Command, script: Script) -> None:
    name = script(
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(1), print('uploaded'))).start()\n"
    )
    done = z3trace("record", name)
    assert (done.returncode, done.stdout) == (0, "uploaded\n")


@pytest.mark.slow
def test_ranks_that_hang_after_pythons_own_exit_are_ended(z3trace: Command, script: Script) -> None:
    # A C-level exit handler that sleeps: no Python thread runs any more when it is reached.
    name = script(
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)\n"
    )
    done = z3trace("record", "--exit-grace", "0.5", "--nproc-per-node", "2", name, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("ranks", [(), ("--nproc-per-node", "2")])
def test_signals_stop_every_rank(
    start: Callable[..., "subprocess.Popen[str]"],
    script: Script,
    ranks: tuple[str, ...],
    number: signal.Signals,
    code: int,
) -> None:
    name = script(  # os.write, because two ranks share the pipe and print may write in pieces
        "import os, time\n"
        "try:\n"
        "    os.write(1, f'{os.getpid()}\\n'.encode())\n"
        "    time.sleep(60)\n"
        "finally: os.write(1, b'cleaned up\\n')\n"
    )
    job = start("record", *ranks, name)
    assert job.stdout is not None
    count = 2 if ranks else 1
    pids = [int(job.stdout.readline()) for _ in range(count)]
    job.send_signal(number)
    out, err = job.communicate(timeout=40)
    assert job.returncode == code, err
    assert out == "cleaned up\n" * count
    assert "Traceback" not in err
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_ranks_of_torchrun_record_themselves(
    script: Script, tmp_path: Path, environment: dict[str, str]
) -> None:
    name = script("import os, sys\nsys.stdout.write(f\"rank {os.environ['RANK']} {sys.argv[1:]}\\n\")")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "z3trace", "record", name, "--flag", "--",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} ['--flag', '--']" for rank in (0, 1)]


def test_a_launcher_above_leaves_nothing_to_launch(
    script: Script, tmp_path: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "z3trace", "record", "--nproc-per-node", "2", script("")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "leave out --nproc-per-node" in done.stderr
