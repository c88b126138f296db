"""Coverage-guided fuzzing of the loader with atheris (pip install atheris, in an environment of its own).

    python tests/load/coverage_fuzz.py CORPUS_FOLDER [-max_total_time=600] [-max_len=20000]

Only our own error may come out of `load`, within 5 s and 1 GB. The folder starts with small sound and damaged traces
and then collects the inputs that reach new code; the last argument and further ones are libFuzzer's.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["z3trace.analyzers"]):
    from z3trace.analyzers.errors import TraceError
    from z3trace.analyzers.load import build, load

assert build  # imported here to be instrumented: `load` imports it when called

SEEDS = [
    b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2,'
    b' "ts": 1.5, "dur": 2.001, "args": {"External id": 1, "Input Dims": [[1, 2], []]}},\n'
    b' {"ph": "s", "id": 3, "pid": 1, "tid": 2, "ts": 2, "cat": "ac2g", "name": "ac2g"}], "traceName": "a"}',
    b'[{"name": "a", "ph": "X", "ts": 1700000000000000.123, "dur": "0x5", "pid": "1", "tid": [], "args": {"a": [1]}},'
    b' {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "thread 2 (python)"}}, ',
    b'{"traceEvents":[{"ph":"X","name":"a"b","ts":NaN},{"ph":"X" "name":"\x01\xff","ts":1e999}]}',
    b'{"distributedInfo": {"rank": 0}, "traceEvents": null}',
]

_PATH = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)) / "trace.json"


def test_one_input(data: bytes) -> None:
    """What atheris calls with each input."""
    _PATH.write_bytes(data)
    for block_bytes in (64, 1 << 20):
        try:
            trace = load(_PATH, block_bytes=block_bytes, max_bytes=1 << 24)
            _ = trace.lanes, trace.parents, trace.launches, trace.forward_of, trace.device, trace.rank
        except TraceError as error:
            assert "\n" not in str(error)


def main() -> None:
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS):
        (corpus / f"seed{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], "-timeout=5", "-rss_limit_mb=1024", *sys.argv[1:]], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
