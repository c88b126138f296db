"""What the user points at -> the traces of a run, each with its rank, and what is known about the run."""

import glob
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from z3trace.analyzers.errors import NotATraceError, TraceError
from z3trace.analyzers.load import load
from z3trace.analyzers.load.source import STDIN
from z3trace.analyzers.trace import Trace
from z3trace.errors import UserError

SUFFIXES = (".json", ".json.gz", ".zip")
RUN_FILE = "run.json"
MODEL_FILE = "model.json"

_RANK_IN_NAME = (
    re.compile(r"(?:^|[^a-z])rank[-_.=]?(\d+)(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])worker[-_.=]?(\d+)(?!\d)", re.IGNORECASE),
)
"""`rank-0.json.gz`, `rank0_trace.json`, `rank0.pt.trace.json.gz`, `worker0.1694128201545.pt.trace.json`."""


@dataclass(frozen=True)
class Run:
    """The traces of one job, sorted by rank, and what is known about it.

    `description` is run.json of a run directory, else model.json beside the traces, else the trace's own
    `z3trace` metadata. `model` is what was given for the model or the part of the description that names
    modules and parameters. `notes` say, a line each, what was left out or assumed.
    """

    traces: tuple[Trace, ...]
    description: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(trace.rank for trace in self.traces if trace.rank is not None)


def open_run(
    paths: Sequence[str | Path],
    *,
    model: Path | None = None,
    config: Path | None = None,
    rank_regex: str | None = None,
    ranks: Collection[int] | None = None,
    jobs: int = 1,
    max_bytes: int | None = None,
) -> Run:
    """Load all traces that `paths` name.

    Args:
        paths: trace files, run directories, folders of traces, globs, or "-" for stdin.
        model: a model.json to use in place of the one beside the traces.
        config: the DeepSpeed configuration of the run, whose settings go before those of the model.json.
        rank_regex: finds the rank in a file's path, in its first group, where neither the file nor its
            name says it.
        ranks: keep only these.
        jobs: load that many files at a time, each in a process of its own.
        max_bytes: give up on a file that is larger than this when unpacked.

    Raises:
        UserError: in one line, when something cannot be found or read, or two files claim the same rank.
    """
    pattern = _compiled(rank_regex)
    found, folders = find_traces(paths)
    notes: list[str] = []
    traces = _load_all(found, folders, notes, jobs, max_bytes)
    traces = _ranked(traces, pattern, notes)
    if ranks is not None:
        missing = sorted(set(ranks) - {trace.rank for trace in traces})
        if missing:
            there = ", ".join(str(trace.rank) for trace in traces)
            raise UserError(f"no trace of rank {missing[0]}: there are ranks {there}")
        traces = [trace for trace in traces if trace.rank in ranks]
    for trace in traces:
        notes += [f"{trace.path}: {warning.message}" for warning in trace.warnings]
    description = _description(traces)
    given = _json_object(model) if model is not None else _beside(traces, MODEL_FILE)
    if (
        given is None
        and description is not None
        and ("modules" in description or "parameters" in description)
    ):
        given = description
    if config is not None:
        settings = _settings(config)
        if given is None:
            notes.append(f"{config}: of no use without a description of the model (model.json)")
        else:
            given = {**given, **settings}
    return Run(tuple(traces), description, given, notes)


def _settings(config: Path) -> dict[str, Any]:
    """What a DeepSpeed configuration says that a model.json may say, too."""
    read = _json_object(config)
    if not isinstance(read.get("zero_optimization"), dict):
        raise UserError(f"{config}: a DeepSpeed configuration with a zero_optimization section is expected")
    found = {"zero_optimization": read["zero_optimization"]}
    steps = read.get("gradient_accumulation_steps")
    if isinstance(steps, int):
        found["gradient_accumulation_steps"] = steps
    for key, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        section = read.get(key)
        if isinstance(section, dict) and section.get("enabled") is True:
            found["dtype"] = dtype
    return found


def find_traces(paths: Sequence[str | Path]) -> tuple[list[str], set[str]]:
    """The files that `paths` name, and those among them that were only found in a folder."""
    if not paths:
        raise UserError("no trace given: name a trace file or a run directory")
    files: dict[str, None] = {}
    in_folders: set[str] = set()
    for given in map(str, paths):
        path = Path(given)
        if given == STDIN or path.is_file():
            files[given] = None
        elif path.is_dir():
            inside = _in_folder(path)
            in_folders.update(inside)
            files |= dict.fromkeys(inside)
        elif path.exists():
            files[given] = None  # a pipe, perhaps: loading says what is wrong with it
        else:
            is_pattern = glob.has_magic(given)
            matches = sorted(glob.glob(given, recursive=True)) if is_pattern else []  # noqa: PTH207
            if not matches:
                raise UserError(f"{given}: {'nothing matches' if is_pattern else 'no such file'}")
            named = [match for match in matches if Path(match).is_file()]
            in_folders.update(named)
            files |= dict.fromkeys(named)
            for folder in (Path(match) for match in matches if Path(match).is_dir()):
                inside = _in_folder(folder)
                in_folders.update(inside)
                files |= dict.fromkeys(inside)
    return list(files), in_folders


def _in_folder(folder: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except PermissionError:
        raise UserError(f"{folder}: no permission to read it") from None
    traces = [
        str(folder / name)
        for name in names
        if name.lower().endswith(SUFFIXES) and name not in (RUN_FILE, MODEL_FILE)
    ]
    if not traces:
        below = sorted(
            {path.parent.name for path in folder.glob("*/*") if path.name.lower().endswith(SUFFIXES)}
        )
        hint = f", but there are files in {', '.join(below[:3])}" if below else ""
        raise UserError(f"{folder}: no traces in this directory (*.json, *.json.gz or *.zip){hint}")
    return traces


def _load_all(
    files: list[str], in_folders: set[str], notes: list[str], jobs: int, max_bytes: int | None
) -> list[Trace]:
    traces = []
    failed: list[TraceError] = []
    read: Callable[[str], Trace | TraceError] = partial(_try_load, max_bytes=max_bytes)
    results: Iterable[Trace | TraceError]
    if jobs > 1 and len(files) > 1:
        # Here, because their import takes as long as loading a small trace.
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(min(jobs, len(files)), mp_context=get_context("spawn")) as pool:
            results = list(pool.map(read, files))
    else:
        results = map(read, files)
    for file, result in zip(files, results, strict=True):
        if isinstance(result, Trace):
            traces.append(result)
            continue
        if file not in in_folders:
            raise result
        failed.append(result)
        if not isinstance(result, NotATraceError):
            notes.append(f"left out: {result}")
    if not traces:
        raise UserError(f"no readable trace among {len(files)} files: {failed[0]}")
    return traces


def _try_load(file: str, max_bytes: int | None) -> Trace | TraceError:
    try:
        return load(file, max_bytes=max_bytes)
    except TraceError as error:
        return error


def _compiled(rank_regex: str | None) -> re.Pattern[str] | None:
    if rank_regex is None:
        return None
    try:
        pattern = re.compile(rank_regex)
    except re.error as error:
        raise UserError(f"--rank-regex {rank_regex!r} is no regular expression: {error}") from None
    if pattern.groups < 1:
        raise UserError(
            f"--rank-regex {rank_regex!r} needs a group that matches the rank, as in 'node(\\d+)'"
        )
    return pattern


def _ranked(traces: list[Trace], pattern: re.Pattern[str] | None, notes: list[str]) -> list[Trace]:
    """The traces with their ranks, sorted."""
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        rank = trace.rank
        if rank is None:
            rank = rank_from_name(trace.path, pattern)
        if rank is None:
            if len(traces) > 1:
                raise UserError(
                    f"{trace.path}: neither the trace nor its name says which rank it is: give --rank-regex"
                )
            notes.append(f"{trace.path}: it does not say which rank it is: taken as rank 0")
            rank = 0
        if rank in by_rank:
            raise UserError(
                f"{by_rank[rank].path} and {trace.path} both claim to be rank {rank}: give only one of them"
            )
        by_rank[rank] = trace if trace.rank == rank else trace.with_rank(rank)
    return [by_rank[rank] for rank in sorted(by_rank)]


def rank_from_name(path: str, pattern: re.Pattern[str] | None = None) -> int | None:
    """The rank in a file's name, as the usual recorders write it; else what `pattern` finds in the path."""
    name = Path(path).name
    for usual in _RANK_IN_NAME:
        match = usual.search(name)
        if match:
            return int(match.group(1))
    if pattern is not None:
        match = pattern.search(path)
        if match and match.group(1) and match.group(1).isdecimal():
            return int(match.group(1))
    return None


def _description(traces: Sequence[Trace]) -> dict[str, Any] | None:
    for name in (RUN_FILE, MODEL_FILE):
        found = _beside(traces, name)
        if found is not None:
            return found
    for trace in traces:
        own = trace.metadata.get("z3trace")
        if isinstance(own, Mapping):
            return dict(own)
    return None


def _beside(traces: Sequence[Trace], name: str) -> dict[str, Any] | None:
    """The file of this name in the folder of the traces; the first one if they lie in several."""
    for folder in dict.fromkeys(Path(trace.path).parent for trace in traces if trace.path != STDIN):
        if (folder / name).is_file():
            return _json_object(folder / name)
    return None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object is expected")
    return value
