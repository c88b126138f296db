"""What loading a large trace costs, beside json.load, plain gunzip and, where it is installed, HTA's loader.

    python benchmarks/load.py TRACE [--megabytes 200 1000] [--repeat 3] [--hta-python PYTHON]

TRACE, a real trace of Kineto's C++ writer, is replicated with later times and higher ids until the file is
large enough. Each figure is of a process of its own, start-up included: CPU is user + system seconds, the
median of the repeats, which take turns so that a busy machine hits all alike.
"""

import argparse
import gzip
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

COLUMNS = "from z3trace.analyzers.load import load; trace = load(PATH); print(len(trace))"
LINKS = COLUMNS + "; trace.parents, trace.launches, trace.forward_of, trace.by_external_id"
JSON = "import json; print(len(json.load(open(PATH))['traceEvents']))"
GUNZIP = """
import gzip
with gzip.open(PATH) as file:
    while file.read(1 << 20):
        pass
"""
HTA = """
import logging, os
logging.disable(logging.CRITICAL)
from hta.common.trace import Trace
trace = Trace(trace_files={0: os.path.abspath(PATH)}, trace_dir=os.path.dirname(os.path.abspath(PATH)))
trace.parse_traces(max_ranks=1, use_multiprocessing=False)
trace.decode_symbol_ids()
print(len(trace.get_trace(0)))
"""

_SHIFTED = re.compile(rb'"(ts|id|correlation|External id|Sequence number)":(\s*)(\d+)((?:\.\d+)?)')
_MARK = re.compile(rb"ProfilerStep#(\d+)")
_PERIOD_US = 10_000_000
_ID_STEP = 10_000_000


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    wall_s: float
    rss_mb: float


def replicate(source: Path, target: Path, megabytes: float) -> None:
    """Write `target` with the events of `source` repeated, each time later and with other ids."""
    text = (gzip.open if source.suffix == ".gz" else open)(source, "rb").read()
    start = re.search(rb'"traceEvents"\s*:\s*\[', text)
    closing = list(re.finditer(rb"\}\s*\](?=\s*[,}])", text))
    if start is None or not closing:
        raise SystemExit(f"{source}: no traceEvents")
    end = closing[-1].start() + 1
    events = text[start.end() : end].rstrip()
    with target.open("wb") as file:
        file.write(text[: start.end()])
        copy = 0
        while True:
            file.write(_shifted(events, copy))
            copy += 1
            if file.tell() + len(events) > megabytes * 1e6:
                break
            file.write(b",")
        file.write(text[end:])


def make_files(source: Path, plain: Path, packed: Path, megabytes: float) -> None:
    """Write the replicated trace, plain and compressed."""
    replicate(source, plain, megabytes)
    with plain.open("rb") as text, gzip.open(packed, "wb", compresslevel=1) as file:
        shutil.copyfileobj(text, file, 1 << 20)


def _shifted(events: bytes, copy: int) -> bytes:
    def replace(match: re.Match[bytes]) -> bytes:
        key, space, whole, rest = match.groups()
        step = _PERIOD_US if key == b"ts" else _ID_STEP
        return b'"%s":%s%d%s' % (key, space, int(whole) + copy * step, rest)

    if not copy:
        return events
    marked = _MARK.sub(lambda match: b"ProfilerStep#%d" % (int(match[1]) + 1000 * copy), events)
    return _SHIFTED.sub(replace, marked)


def measure(python: str, code: str, path: Path) -> Cost:
    """Run `code` on `path` in a process of its own."""
    before = time.perf_counter()
    process = subprocess.Popen(
        [python, "-c", f"PATH = {str(path)!r}\n{code}"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed on {path}: {code}")
    wall = time.perf_counter() - before
    return Cost(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[200, 1000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hta-python", help="an interpreter that has HTA 0.5.0", default=_python_with_hta())
    parser.add_argument("--hta-up-to", type=float, default=200, help="megabytes; beyond it HTA needs many GB")
    parser.add_argument("--json-up-to", type=float, default=200, help="megabytes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in options.megabytes:
            plain = Path(folder) / "trace.json"
            packed = plain.with_suffix(".json.gz")
            # In another process: what this one has ever held would count as memory of those it starts.
            maker = get_context("spawn").Process(
                target=make_files, args=(options.trace, plain, packed, megabytes)
            )
            maker.start()
            maker.join()
            if maker.exitcode:
                raise SystemExit(1)
            cases = {
                "z3trace, columns": (sys.executable, COLUMNS, plain),
                "z3trace, columns, .gz": (sys.executable, COLUMNS, packed),
                "z3trace, columns + nesting + links": (sys.executable, LINKS, plain),
                "gunzip (gzip module)": (sys.executable, GUNZIP, packed),
            }
            if megabytes <= options.json_up_to:
                cases["json.load"] = (sys.executable, JSON, plain)
            if options.hta_python and megabytes <= options.hta_up_to:
                cases["HTA 0.5.0"] = (options.hta_python, HTA, plain)
            costs: dict[str, list[Cost]] = {name: [] for name in cases}
            for _ in range(options.repeat):
                for name, (python, code, path) in cases.items():
                    costs[name].append(measure(python, code, path))
            print(f"\n{plain.stat().st_size / 1e6:.0f} MB, .gz {packed.stat().st_size / 1e6:.0f} MB")
            print(f"{'':36}{'CPU s':>8}{'wall s':>8}{'RSS MB':>8}{'CPU, of ours':>14}")
            ours = statistics.median(cost.cpu_s for cost in costs["z3trace, columns"])
            for name, runs in costs.items():
                cpu = statistics.median(cost.cpu_s for cost in runs)
                wall = statistics.median(cost.wall_s for cost in runs)
                print(f"{name:36}{cpu:8.2f}{wall:8.2f}{max(c.rss_mb for c in runs):8.0f}{cpu / ours:13.2f}x")


def _python_with_hta() -> str | None:
    try:
        import hta  # noqa: F401
    except ImportError:
        return None
    return sys.executable


if __name__ == "__main__":
    main()
