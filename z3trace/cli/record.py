"""`z3trace record`: options to settings, then launch or become a rank."""

import importlib.util
import sys
from pathlib import Path

import click

from z3trace.cli import Options
from z3trace.errors import UserError
from z3trace.recording.settings import RecordSettings


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS]",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start N ranks on this host. Without it: one process, or the rank that torchrun made this one.",
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=RecordSettings.skip,
    show_default=True,
    metavar="N",
    help="Steps to let pass first; they are timed without the profiler.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=RecordSettings.warmup,
    show_default=True,
    metavar="N",
    help="Steps with the profiler on whose events are thrown away.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=RecordSettings.steps,
    show_default=True,
    metavar="N",
    help="Steps to record.",
)
@click.option(
    "--step-from",
    metavar="MODULE:FUNCTION",
    help="A step ends where this function returns. Without it steps are found by themselves.",
)
@click.option("--no-labels", is_flag=True, help="Leave the training libraries untouched: write no labels.")
@click.option("--no-shapes", is_flag=True, help="Record no shapes: smaller traces, sizes unknown on CPU.")
@click.option(
    "--with-stack", is_flag=True, help="Record Python stacks: some 15 times the events, slower steps."
)
@click.option("--memory", is_flag=True, help="Record allocations.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Where the run goes.  [default: runs/SCRIPT-TIME]",
)
@click.option("--force", is_flag=True, help="Overwrite a run that is already there.")
@click.option(
    "--exit-grace",
    type=click.FloatRange(min=0),
    default=RecordSettings.exit_grace,
    show_default=True,
    metavar="SECONDS",
    help="End a rank that has not exited so long after its script ended; 0 waits for ever.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def record(
    options: Options,
    module: bool,
    nproc_per_node: int | None,
    skip: int,
    warmup: int,
    steps: int,
    step_from: str | None,
    no_labels: bool,
    no_shapes: bool,
    with_stack: bool,
    memory: bool,
    output: Path | None,
    force: bool,
    exit_grace: float,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run SCRIPT with ARGS and record some of its training steps.

    Everything after SCRIPT belongs to the script. Its exit code is passed on. Every rank writes one trace
    into the run directory, which `z3trace report` reads.

    \b
    z3trace record --nproc-per-node 2 train.py --lr 1e-3
    torchrun --nproc-per-node 8 -m z3trace record train.py --lr 1e-3
    """
    from z3trace.recording.active import check_step_from
    from z3trace.recording.launch import become_worker, launch
    from z3trace.recording.place import choose_directory
    from z3trace.recording.program import Program
    from z3trace.recording.settings import launched
    from z3trace.recording.summary import announce

    if importlib.util.find_spec("torch") is None:
        raise UserError("recording needs torch, which this Python does not have: install your build of it")
    if launched() and nproc_per_node is not None:
        raise UserError("a launcher already started this process (RANK is set): leave out --nproc-per-node")
    program = Program(script, args, module=module)
    program.check()
    if step_from is not None:
        check_step_from(step_from)
    settings = RecordSettings(
        directory=choose_directory(output, program, force=force),
        skip=skip,
        warmup=warmup,
        steps=steps,
        record_shapes=not no_shapes,
        with_stack=with_stack,
        profile_memory=memory,
        labels=not no_labels,
        step_from=step_from,
        exit_grace=exit_grace,
        verbosity=options.verbosity,
        command=(Path(sys.argv[0]).name, *sys.argv[1:]),
    )
    if nproc_per_node is None:
        become_worker(settings, program)
    ending = launch(settings, program, nproc_per_node)
    announce(settings, ending.reports, ending.deaths)
    return ending.exit_code
