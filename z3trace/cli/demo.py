"""`z3trace demo`: the first command of the README."""

import os
from pathlib import Path

import click

from z3trace.cli import Options


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--world",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    metavar="N",
    help="Ranks to train on.",
)
@click.option(
    "--dim",
    type=click.IntRange(min=4),
    default=64,
    show_default=True,
    metavar="N",
    help="Width of the transformer, a multiple of its 4 heads.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Where the two runs go.  [default: runs/demo-TIME]",
)
@click.option("--force", is_flag=True, help="Overwrite runs that are already there.")
@click.pass_obj
def demo(options: Options, world: int, dim: int, output: Path | None, force: bool) -> None:
    """Train a 6-layer transformer on this machine's CPU in two layouts, record both, and compare them.

    The first layout gathers the parameters of every linear layer and norm on its own, as ZeRO-3 does by
    default; the second those of a whole layer at once. Takes about a minute.
    """
    if dim % 4:
        raise click.BadParameter(f"{dim} is not a multiple of 4", param_hint="--dim")

    from rich.console import Console

    from z3trace.analyzers import analyze, open_run
    from z3trace.demo.compare import record_layouts, time_layouts
    from z3trace.recording.place import name_run
    from z3trace.recording.summary import shown_path
    from z3trace.reporting.comparison import print_comparison

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU everywhere, so that everybody sees the same
    console = Console()
    progress = Console(stderr=True, quiet=options.verbosity < 0)
    directory = (output or name_run("demo")).absolute()
    arguments = ["--dim", str(dim)]
    runs = record_layouts(directory, world, arguments, progress, force=force)
    step_ms = time_layouts(world, arguments, progress)
    with progress.status("reading the traces"):
        reports = {name: analyze(open_run([run])) for name, run in runs.items()}
    print_comparison(console, reports, step_ms=step_ms)
    console.print(f"\nThe runs are in {shown_path(directory)}. Next:", highlight=False)
    for run in runs.values():
        console.print(f"  z3trace report {shown_path(run)}", highlight=False, soft_wrap=True)
