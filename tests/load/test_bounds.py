"""Memory and time stay bounded whatever a file holds; each case runs in a process of its own."""

import gzip
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MB = 1 << 20
CODE = r"""
import re, sys, time
from z3trace.analyzers.errors import TraceError
from z3trace.analyzers.load import load
try:
    trace = load(sys.argv[1], max_bytes=int(sys.argv[2]) or None)
    _ = trace.parents, trace.launches
    print(len(trace), *(w.kind for w in trace.warnings))
except TraceError as error:
    print(error)
print(int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read()).group(1)) / 1024)
print(time.process_time())
"""


def events(count: int, name: bytes = b"op") -> bytes:
    one = b'{"ph":"X","cat":"cpu_op","name":"%s%d","pid":1,"tid":1,"ts":%d.5,"dur":1.25,"args":{"External id":%d}}'
    return b",".join(one % (name, i, i * 10, i) for i in range(count))


def long_string() -> Iterator[bytes]:
    yield b'{"traceEvents":[' + events(1000) + b',{"ph":"X","name":"'
    yield from [b"a" * MB] * 2048
    yield b'","pid":1,"tid":1,"ts":1,"dur":2},' + events(1000) + b"]}"


def string_of_20_mb() -> Iterator[bytes]:
    yield b'{"traceEvents":[' + events(10) + b',{"ph":"X","name":"'
    yield from [b"a" * MB] * 20
    yield b'","pid":1,"tid":1,"ts":1,"dur":2},' + events(10) + b"]}"


def distinct_names() -> Iterator[bytes]:
    yield b'{"traceEvents":['
    yield from (events(1000, b"name %d of many " % i) + b"," for i in range(1000))
    yield events(1) + b"]}"


def deep_values() -> Iterator[bytes]:
    deep = (
        b'{"ph":"X","name":"n","pid":1,"tid":1,"ts":1,"dur":1,"args":{"x":'
        + b"[" * 10_000
        + b"]" * 10_000
        + b"}}"
    )
    yield b'{"traceEvents":[' + b",".join([deep] * 20) + b"," + events(10) + b"]}"


def deep_spans() -> Iterator[bytes]:
    span = b'{"ph":"X","name":"n","pid":1,"tid":1,"ts":%d,"dur":%d}'
    yield b"[" + b",".join(span % (i, 100_000 - 2 * i) for i in range(10_000)) + b"]"


def spaces() -> Iterator[bytes]:
    yield b'{"traceEvents":['
    yield from [b" " * MB] * 4096
    yield b"]}"


def long_metadata() -> Iterator[bytes]:
    yield b'{"x":"'
    yield from [b"a" * MB] * 300
    yield b'","traceEvents":[' + events(10) + b'],"y":"'
    yield from [b"a" * MB] * 300
    yield b'"}'


def all_damaged() -> Iterator[bytes]:
    yield b'{"traceEvents":[' + events(20_000, b'o"p\xff') + b"]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "max_bytes", "rss_mb", "said"),
    [
        (long_string, 0, 250, "1001 long_event"),
        (string_of_20_mb, 0, 250, "21"),
        (distinct_names, 0, 500, "1000001"),
        (deep_values, 0, 150, "30 mended"),
        (deep_spans, 0, 150, "10000"),
        (spaces, 10**9, 250, "larger than the limit of 1,000,000,000 bytes"),
        (spaces, 0, 250, "0 long_event"),
        (long_metadata, 0, 450, "10 long_metadata"),
        (all_damaged, 0, 250, "20000 invalid_utf8 mended"),
    ],
)
def test_bounds(tmp_path: Path, parts: object, max_bytes: int, rss_mb: int, said: str) -> None:
    assert callable(parts)
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part in parts():
            file.write(part)
    process = subprocess.run(
        [sys.executable, "-c", CODE, str(path), str(max_bytes)],
        stdout=subprocess.PIPE, text=True, check=True, timeout=100,
    )  # fmt: skip
    *output, used_mb, cpu_s = process.stdout.split("\n")[:-1]
    assert said.split()[0] in output[0] and all(word in output[0] for word in said.split()[1:])
    assert float(used_mb) < rss_mb
    assert float(cpu_s) < 30


def test_loading_imports_neither_pandas_nor_torch(shared_traces: Path) -> None:
    code = (
        "import sys; from z3trace.analyzers.inputs import open_run; run = open_run([sys.argv[1]]);"
        "_ = [(t.parents, t.launches, t.lanes) for t in run.traces];"
        "sys.exit(bool({'pandas', 'torch', 'multiprocessing', 'concurrent.futures'} & set(sys.modules)))"
    )
    folder = shared_traces / "gpu/amd_mi250"
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False, timeout=60).returncode == 0
