"""The command itself: help, version, errors, exit codes, and what it must not import for them."""

import subprocess
import sys

import pytest

from z3trace import __version__
from z3trace.cli import COMMANDS

HEAVY = ("torch", "pandas", "numpy", "plotly", "rich")


def z3trace(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "z3trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["record", "--help"], ["demo", "--help"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from z3trace.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as end:\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    sys.exit(f'imported {heavy}' if heavy or end.code else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_overview_lists_every_command_and_each_can_be_called() -> None:
    shown = z3trace("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in shown
        own = z3trace(name, "--help")
        assert (own.returncode, own.stderr) == (0, ""), name
        assert own.stdout.startswith(f"Usage: z3trace {name} ")


def test_version() -> None:
    done = z3trace("--version")
    assert (done.returncode, done.stdout) == (0, f"z3trace {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "No such option"),
        (["recrod"], "No such command"),
        (["record"], "Missing argument 'SCRIPT'"),
        (["record", "--steps", "0", "train.py"], "0 is not in the range"),
        (["-q", "-v", "record", "train.py"], "contradict"),
        (["record", "no_such_script.py"], "no_such_script.py: no such file"),
        (["record", "."], ". is not a file"),
    ],
)
def test_wrong_use_is_one_message_on_stderr_and_code_2(arguments: list[str], said: str) -> None:
    done = z3trace(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_user_errors_are_one_line_and_debug_shows_where_they_come_from() -> None:
    plain = z3trace("record", "no_such_script.py")
    assert plain.stderr.count("\n") == 1
    debugged = z3trace("--debug", "record", "no_such_script.py")
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr
    assert "UserError: no_such_script.py" in debugged.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -c 'from z3trace.cli import main; main([\"--help\"])' | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
