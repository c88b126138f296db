"""Mutates traces and checks what is loaded: only our own error, no hang, and every event outside the damage.

    python tests/load/fuzz.py FOLDER_OF_TRACES [--count 10000] [--seed 0]

A case is reproduced by its seed and number alone, given the same traces.
"""

import argparse
import collections
import gzip
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from z3trace.analyzers.errors import TraceError
from z3trace.analyzers.load import load
from z3trace.analyzers.load.fields import CODED_COLUMNS, INT_COLUMNS
from z3trace.analyzers.trace import Trace

LONGEST_S = 5
VALUES = [
    b"null", b"true", b"[]", b"{}", b'"text"', b"-1", b"0.5", b"1e5", b"1e999", b"-0", b"NaN", b"Infinity", b"9" * 19,
    b"9" * 400, b"123456789012345678901234567890.5", b'"0x1f"', b'"\\ud800"', b'"\xff\xfe"', b'"a\x01b"', b'"a"b"',
    b"[" * 50 + b"]" * 50, b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 3000,
    b'{"ph": "X", "name": "inner", "ts": 1}', b'[{"ph": "X", "name": "a"}, {"ph": "X", "name": "b"}]',
]  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A sound trace: its text, where each event lies in it, and what is loaded from it."""

    name: str
    text: bytes
    spans: list[tuple[int, int]]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Damage:
    """A mutated text; the damaged range of the original's text, None where the damage is everywhere."""

    kind: str
    text: bytes
    span: tuple[int, int] | None


class Hang(Exception):
    pass


def rows_of(trace: Trace) -> list[tuple[Any, ...]]:
    """Every column of every event, as comparable tuples."""
    columns: list[list[Any]] = [trace.ts.tolist(), trace.dur.tolist()]
    columns += [trace.ints(column).tolist() for column in INT_COLUMNS]
    for column in CODED_COLUMNS:
        values = trace.values(column)
        columns.append([values[code] for code in trace.codes(column).tolist()])
    return list(zip(*columns, strict=True))


def base(name: str, text: bytes) -> Base:
    """Find the events of a sound text and load it."""
    characters = text.decode("latin-1")  # one character for each byte
    start = re.search(r'"traceEvents"\s*:\s*\[', characters) or re.match(r"\s*\[", characters)
    assert start
    decoder, spans, at = json.JSONDecoder(strict=False), [], start.end()
    while True:
        separator = re.compile(r"[\s,]*").match(characters, at)
        assert separator
        at = separator.end()
        if characters[at] == "]":
            break
        _, end = decoder.raw_decode(characters, at)
        spans.append((at, end))
        at = end
    rows = rows_of(_load(text))
    assert len(rows) == len(spans)
    return Base(name, text, spans, rows)


def bases(folder: Path) -> list[Base]:
    """A few small traces of different writers, and rewrites of them."""
    found = []
    for file in ("gpu/amd_mi250", "gpu/cuda_event_sync", "gpu/cpu_only_rank34"):
        text = gzip.decompress((folder / file / "rank0.json.gz").read_bytes())
        found.append(base(file, text))
        document = json.loads(text)
        metadata = {key: value for key, value in document.items() if key != "traceEvents"}
        events = document["traceEvents"][:150]
        found.append(base(f"{file}, one line", json.dumps({**metadata, "traceEvents": events}).encode()))
        last = {"traceEvents": events, **metadata}
        found.append(base(f"{file}, indented", json.dumps(last, indent=1).encode()))
        compact = json.dumps(events, separators=(",", ":")).encode()
        found.append(base(f"{file}, bare list", compact))
    for file in ("deepspeed/default", "gpu/mi300_rccl_generic_ddp", "synthetic/fsdp2_healthy"):
        text = gzip.decompress((folder / file / "rank0.json.gz").read_bytes())
        whole = base(file, text)
        first = whole.spans[min(40, len(whole.spans) // 2)][0]
        ends = whole.spans[min(300, len(whole.spans) - 1)][1], whole.spans[-1][1]
        start = whole.spans[0][0]
        found.append(base(f"{file}, part", text[:start] + text[first : ends[0]] + text[ends[1] :]))
    return found


def mutate(original: Base, random_: random.Random) -> Damage:
    """One mutation, drawn at random."""
    kind = random_.choice(list(MUTATIONS))
    return MUTATIONS[kind](original, random_)


def _span(text: bytes, random_: random.Random, longest: int) -> tuple[int, int]:
    start = random_.randrange(len(text))
    return start, min(len(text), start + random_.randrange(1, longest + 1))


def _replaced(kind: str, text: bytes, start: int, end: int, new: bytes) -> Damage:
    return Damage(kind, text[:start] + new + text[end:], (start, end))


def bit_flips(original: Base, random_: random.Random) -> Damage:
    start, end = _span(original.text, random_, random_.choice((1, 1, 8)))
    new = bytes(byte ^ (1 << random_.randrange(8)) for byte in original.text[start:end])
    return _replaced("bit flips", original.text, start, end, new)


def noise(original: Base, random_: random.Random) -> Damage:
    start, end = _span(original.text, random_, 40)
    return _replaced("noise", original.text, start, end, random_.randbytes(random_.randrange(40)))


def structure(original: Base, random_: random.Random) -> Damage:
    start, end = _span(original.text, random_, 2)
    new = bytes(random_.choices(b'{}[]",:\\ \n', k=random_.randrange(4)))
    return _replaced("structure", original.text, start, end, new)


def cut(original: Base, random_: random.Random) -> Damage:
    start, end = _span(original.text, random_, random_.choice((1, 30, 3000, 30000)))
    return _replaced("cut", original.text, start, end, b"")


def cut_off(original: Base, random_: random.Random) -> Damage:
    start = random_.randrange(len(original.text))
    return _replaced("cut off", original.text, start, len(original.text), b"")


def splice(original: Base, random_: random.Random) -> Damage:
    taken = _span(original.text, random_, random_.choice((30, 1000, 10000)))
    start, end = _span(original.text, random_, random_.choice((1, 1000)))
    return _replaced("splice", original.text, start, end, original.text[slice(*taken)])


def swapped_value(original: Base, random_: random.Random) -> Damage:
    at, until = random_.choice(original.spans)
    values = list(re.finditer(rb':\s*("(?:[^"\\]|\\.)*"|-?[\d.]+)', original.text[at:until]))
    if not values:
        return bit_flips(original, random_)
    start, end = (at + position for position in random_.choice(values).span(1))
    return _replaced("swapped value", original.text, start, end, random_.choice(VALUES))


def swapped_args(original: Base, random_: random.Random) -> Damage:
    at, until = random_.choice(original.spans)
    args = re.search(rb'"args":\s*(\{[^{}]*\})', original.text[at:until])
    if not args:
        return bit_flips(original, random_)
    start, end = (at + position for position in args.span(1))
    return _replaced("swapped args", original.text, start, end, random_.choice(VALUES))


def swapped_event(original: Base, random_: random.Random) -> Damage:
    start, end = random_.choice(original.spans)
    return _replaced("swapped event", original.text, start, end, random_.choice(VALUES))


def encoding(original: Base, random_: random.Random) -> Damage:
    encoded = original.text.decode("utf-8", "replace").encode(
        random_.choice(("utf-16", "utf-32", "utf-7", "cp037"))
    )
    return Damage("encoding", encoded, None)


def shuffled(original: Base, random_: random.Random) -> Damage:
    events = [original.text[start:end] for start, end in original.spans]
    random_.shuffle(events)
    text = (
        original.text[: original.spans[0][0]] + b",\n".join(events) + original.text[original.spans[-1][1] :]
    )
    return Damage("shuffled", text, None)


Mutation = Callable[[Base, random.Random], Damage]
MUTATIONS: dict[str, Mutation] = {
    function.__name__: function
    for function in (
        bit_flips, noise, structure, cut, cut_off, splice, swapped_value, swapped_args, swapped_event,
        encoding, shuffled,
    )
}  # fmt: skip


def check(original: Base, damage: Damage, block_bytes: int, packed: bool) -> str | None:
    """What is wrong with the way a damaged trace is loaded; None if nothing."""
    began = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        trace = _load(damage.text, block_bytes, packed)
        _ = trace.parents, trace.launches, trace.forward_of, trace.lanes, trace.rank, trace.device
        rows = rows_of(trace)
    except TraceError as error:
        if "\n" in str(error):
            return f"an error of several lines: {error}"
        undamaged = _untouched(original, damage)
        return f"refused: {error}" if undamaged is None or sum(undamaged) else None
    except Hang:
        return f"more than {LONGEST_S} s"
    except Exception as error:
        return f"{type(error).__name__}: {error} after {time.perf_counter() - began:.1f} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if damage.kind == "shuffled":
        same = collections.Counter(rows) == collections.Counter(original.rows)
        return None if same else "shuffled events differ"
    undamaged = _untouched(original, damage)
    if undamaged is None:
        return None
    before, after = undamaged
    if rows[:before] != original.rows[:before]:
        return f"of {before} events before the damage one is lost or changed"
    if after and rows[-after:] != original.rows[-after:]:
        return f"of {after} events behind the damage one is lost or changed"
    return None


def _untouched(original: Base, damage: Damage) -> tuple[int, int] | None:
    """How many events lie before and behind the damage; None where it is everywhere."""
    if damage.span is None:
        return (0, 0) if damage.kind == "encoding" else None
    if damage.text.count(b'"traceEvents"') > original.text.count(b'"traceEvents"'):
        return 0, 0  # a second list: the first may then lie inside one of its events, in perfectly good JSON
    start, end = damage.span
    before = sum(1 for _, until in original.spans if until <= start)
    return before, sum(1 for since, _ in original.spans if since >= end)


_FOLDER = Path(
    tempfile.mkdtemp(prefix="z3trace-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
)


def _load(text: bytes, block_bytes: int = 1 << 20, packed: bool = False) -> Trace:
    path = _FOLDER / f"{os.getpid()}.json"
    path.write_bytes(gzip.compress(text, 1) if packed else text)
    try:
        return load(path, block_bytes=block_bytes)
    finally:
        path.unlink()


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise Hang


def run(originals: list[Base], count: int, seed: int, first: int = 0) -> list[str]:
    """Check `count` mutations; returns what went wrong, one line for each."""
    before = signal.signal(signal.SIGALRM, _alarm)
    failures = []
    try:
        for number in range(first, first + count):
            random_ = random.Random(f"{seed}-{number}")
            original = random_.choice(originals)
            damage = mutate(original, random_)
            block_bytes = random_.choice((1 << 20, 1 << 14, 1 << 12))
            wrong = check(original, damage, block_bytes, random_.random() < 0.1)
            if wrong:
                failures.append(f"{seed}-{number} {original.name}: {damage.kind} {damage.span}: {wrong}")
    finally:
        signal.signal(signal.SIGALRM, before)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    failures = run(bases(options.traces), options.count, options.seed, options.first)
    print(*failures, sep="\n")
    print(f"{options.count} cases, {len(failures)} failures, {time.perf_counter() - began:.0f} s")
    _FOLDER.rmdir()
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
