"""`z3trace report`: read traces and say what communication and idle time cost."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from z3trace.cli import Options
from z3trace.errors import UserError

if TYPE_CHECKING:
    from z3trace.analyzers.report import Report

OUTPUTS = (".json",)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the report to FILE.json; may be given several times.",
)
@click.option(
    "--window",
    type=click.Choice(["device", "host"]),
    default="device",
    show_default=True,
    help="What a step is on an accelerator: from its first device activity, or its mark on the host.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A model.json that names modules and parameters, for traces without labels.",
)
@click.option(
    "--ds-config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="The DeepSpeed configuration of the run, for traces that were not recorded by z3trace.",
)
@click.option("--ranks", metavar="LIST", help="Read only these ranks, as in 0,8-11.")
@click.option("--rank-regex", metavar="REGEX", help="Finds the rank in a path, in its first group.")
@click.option(
    "--comm-kernels",
    metavar="REGEX",
    help="Kernels to count as communication besides NCCL's and RCCL's, by name.",
)
@click.option(
    "--max-bytes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Give up on a file that is larger than this when unpacked.",
)
@click.option("--explain", metavar="FINDING", help="Print the page of a finding and read nothing.")
@click.option(
    "--fail-on",
    type=click.Choice(["warning", "critical"]),
    help="Exit with 1 when there is a finding of this severity or above.",
)
@click.pass_obj
def report(
    options: Options,
    paths: tuple[str, ...],
    outputs: tuple[Path, ...],
    window: str,
    model: Path | None,
    ds_config: Path | None,
    ranks: str | None,
    rank_regex: str | None,
    comm_kernels: str | None,
    max_bytes: int | None,
    explain: str | None,
    fail_on: str | None,
) -> int:
    """Read traces of one job and report all-gathers per layer, overlap with compute, and idle time.

    PATH is a trace (.json, .json.gz, .zip, or - for stdin), a directory that `z3trace record` or a profiler wrote,
    or a glob. Several ranks are read together.
    """
    if explain is not None:
        from rich.console import Console

        from z3trace.reporting.findings import explanation

        Console().print(explanation(explain))
        return 0
    if not paths:
        raise click.UsageError("Missing argument 'PATH...'.")
    for output in outputs:
        if output.suffix not in OUTPUTS:
            raise UserError(
                f"{output}: a report is written as {' or '.join(OUTPUTS)}: change the file's ending"
            )
        if not output.parent.is_dir():
            raise UserError(f"{output}: the folder {output.parent} does not exist")
    pattern = _compiled(comm_kernels)

    from z3trace.analyzers import analyze, open_run

    run = open_run(
        paths,
        model=model,
        config=ds_config,
        rank_regex=rank_regex,
        ranks=parse_ranks(ranks) if ranks else None,
        max_bytes=max_bytes,
    )
    result = analyze(run, window="host" if window == "host" else "device", communication_pattern=pattern)
    if outputs:
        from z3trace.analyzers.report import write_json

        for output in outputs:
            try:
                write_json(result, output)
            except OSError as error:
                raise UserError(f"{output}: cannot write the report: {error.strerror}") from None
            if options.verbosity >= 0:
                click.echo(f"wrote {output}")
    else:
        from rich.console import Console

        from z3trace.reporting.terminal import print_report

        print_report(Console(), result)
    return _gate(result, fail_on, options)


def _gate(result: "Report", fail_on: str | None, options: Options) -> int:
    """1 when a finding is at least as severe as asked for, and says which."""
    if fail_on is None:
        return 0
    from z3trace.reporting.findings import at_least

    matched = at_least(result, fail_on)
    if matched and options.verbosity >= 0:
        click.echo(f"--fail-on {fail_on}: {', '.join(row['id'] for row in matched)}", err=True)
    return 1 if matched else 0


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"--comm-kernels {pattern!r} is no regular expression: {error}") from None


def parse_ranks(text: str) -> set[int]:
    """Ranks from a list like "0,8-11". Raises UserError."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"--ranks {text!r}: give numbers and ranges, as in 0,8-11")
        ranks.update(range(int(first), int(last if dash else first) + 1))
    return ranks
