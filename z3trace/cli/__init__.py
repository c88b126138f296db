"""The command `z3trace`: one module a subcommand, imported when it is called."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from z3trace import __version__
from z3trace.errors import UserError

# name -> (module, attribute, one line for the overview): the overview must not import any of them.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "record": (
        "z3trace.cli.record",
        "record",
        "Run a training script and record some of its steps.",
    ),
    "report": (
        "z3trace.cli.report",
        "report",
        "Read traces: what communication and idle time cost.",
    ),
    "demo": (
        "z3trace.cli.demo",
        "demo",
        "Record a small transformer twice and compare.",
    ),
}


@dataclass
class Options:
    """The options before the subcommand. `verbosity`: -1 quiet, 0, 1 and more verbose."""

    verbosity: int = 0
    debug: bool = False


class LazyGroup(click.Group):
    """A group that knows its subcommands by name and imports one only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="z3trace", message="%(prog)s %(version)s")
@click.option("-q", "--quiet", is_flag=True, help="Say only what went wrong.")
@click.option("-v", "--verbose", count=True, help="Say more; also what the launcher says.")
@click.option("--debug", is_flag=True, envvar="Z3TRACE_DEBUG", help="Show tracebacks also for errors of use.")
@click.pass_obj
def cli(options: Options, quiet: bool, verbose: int, debug: bool) -> None:
    """See why ZeRO-3 training is slow: all-gathers per layer, overlap with compute, idle time and its causes.

    Start with `z3trace demo`. Then record your own training with `z3trace record train.py` and read it with
    `z3trace report`.
    """
    if quiet and verbose:
        raise click.UsageError("--quiet and --verbose contradict each other")
    options.verbosity = -1 if quiet else verbose
    options.debug = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code: 0 fine, 1 a gate matched, 2 usage or unreadable input."""
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    options = Options()
    try:
        result = cli.main(args=arguments, prog_name="z3trace", standalone_mode=False, obj=options)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except UserError as error:
        if options.debug:
            raise
        print(f"z3trace: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("z3trace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left, as `| head` does. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0
