"""Small traces written event by event."""

import json
from collections.abc import Callable

import pytest

from z3trace.analyzers.load import load
from z3trace.analyzers.trace import Trace

MAIN, AUTOGRAD, GLOO = 100, 101, 102


class TraceWriter:
    """Collects events (times in ns) and loads them as a trace."""

    def __init__(self, path):
        self._path = path
        self._events: list[dict] = []
        self.metadata: dict = {}
        self._correlation = 0

    def host(self, name, start, end, *, cat="cpu_op", tid=MAIN, **args):
        return self._add(name, start, end, cat, 7, tid, args)

    def mark(self, number, start, end):
        return self.host(f"ProfilerStep#{number}", start, end, cat="user_annotation")

    def kernel(
        self, name, launch, start, end, *, stream=7, cat="kernel", call="cudaLaunchKernel", tid=MAIN, **args
    ):
        """A device activity and, unless `launch` is None, the call that launched it (1 us long)."""
        self._correlation += 1
        ids = {"correlation": self._correlation}
        if launch is not None:
            self._add(call, launch, launch + 1000, "cuda_runtime", 7, tid, ids)
        return self._add(name, start, end, cat, 0, stream, {"device": 0, "stream": stream, **ids, **args})

    def gloo(self, name, start, end, **args):
        return self._add(name, start, end, "user_annotation", 7, GLOO, args)

    def _add(self, name, start, end, cat, pid, tid, args):
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start / 1000,
                 "dur": (end - start) / 1000, "args": args}  # fmt: skip
        self._events.append(event)
        return event

    def load(self) -> Trace:
        document = {"schemaVersion": 1, **self.metadata, "traceEvents": self._events}
        self._path.write_text(json.dumps(document))
        return load(self._path)


@pytest.fixture
def writer(tmp_path) -> TraceWriter:
    return TraceWriter(tmp_path / "trace.json")


@pytest.fixture
def new_writer(tmp_path) -> Callable[[str], TraceWriter]:
    return lambda name: TraceWriter(tmp_path / name)
