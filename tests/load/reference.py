"""A slow reader of sound traces, made to be obviously right: json, Decimal and a loop over the events."""

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from z3trace.analyzers.trace import NULL, Trace

INTEGERS = {
    "external_id": ("External id", "external id"),
    "correlation": ("correlation",),
    "stream": ("stream",),
    "device": ("device",),
    "sequence": ("Sequence number",),
    "fwd_thread": ("Fwd thread id",),
    "bytes": ("bytes",),
    "python_id": ("Python id",),
    "python_parent": ("Python parent id",),
    "python_module": ("Python module id",),
    "record_function_id": ("Record function id",),
    "in_nelems": ("In msg nelems",),
    "out_nelems": ("Out msg nelems",),
    "group_size": ("Group size",),
    "seq": ("Seq",),
    "wait_stream": ("wait_on_stream",),
    "wait_correlation": ("wait_on_cuda_event_record_corr_id",),
    "wait_event": ("wait_on_cuda_event_id",),
    "alloc_bytes": ("Bytes",),
    "alloc_device": ("Device Id",),
    "total_allocated": ("Total Allocated",),
    "total_reserved": ("Total Reserved",),
}
TEXTS = {
    "collective": "Collective name",
    "group_name": "Process Group Name",
    "dtype": "dtype",
    "group_ranks": "Process Group Ranks",
    "group_desc": "Process Group Description",
}
RAW = {"input_dims": "Input Dims", "input_types": "Input type", "concrete_inputs": "Concrete Inputs"}
MODERN = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "async_cpu_to_gpu": "ac2g",
    "forward_backward": "fwdbwd",
}


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def reference(text: bytes) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Columns (None for absent, raw arguments as parsed JSON) and metadata of a sound trace."""
    document = json.loads(text, parse_float=Decimal)
    if isinstance(document, list):
        document = {"traceEvents": document}
    events = document.pop("traceEvents")
    columns: dict[str, list[Any]] = {
        column: [] for column in ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id")
    }
    for event in events:
        for column in ("ph", "name"):
            columns[column].append(event.get(column))
        category = event.get("cat")
        folded = None if category is None else category.lower()
        columns["cat"].append(MODERN.get(folded, folded))
        for column in ("pid", "tid"):
            columns[column].append(_id(event.get(column)))
        columns["ts"].append(_ns(event.get("ts")))
        columns["dur"].append(_ns(event.get("dur")))
        columns["id"].append(_integer(event.get("id")))
    every_args = [event.get("args") or {} for event in events]
    for column, keys in INTEGERS.items():
        columns[column] = [
            _integer(next((args[key] for key in keys if key in args), None)) for args in every_args
        ]
    for column, key in (TEXTS | RAW).items():
        columns[column] = [args.get(key) for args in every_args]
    return columns, document


def _ns(value: Any) -> int | None:
    return None if value is None else int((Decimal(value) * 1000).to_integral_value())


def _id(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip("-").isdecimal() and str(int(value)) == value:
        return int(value)
    return value


def _integer(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value, 16 if value.lower().startswith("0x") else 10)
    return None if value is None else int(value)


def differences(trace: Trace, columns: dict[str, list[Any]], metadata: dict[str, Any]) -> list[str]:
    """In words, where a trace differs from the reference; empty if nowhere."""
    found = []
    for column, expected in columns.items():
        if column in ("ts", "dur"):
            got: Any = getattr(trace, column)
        elif column == "id" or column in INTEGERS:
            got = trace.ints(column)
        else:
            texts = [json.loads(v) if v is not None and column in RAW else v for v in trace.values(column)]
            got = [texts[code] for code in trace.codes(column).tolist()]
            rows = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
            found += [f"{column}[{i}]: {got[i]!r}, not {expected[i]!r}" for i in rows[:3]]
            continue
        wanted = np.array([NULL if value is None else value for value in expected], np.int64)
        rows = np.flatnonzero(got != wanted).tolist()
        found += [f"{column}[{i}]: {got[i]}, not {wanted[i]}" for i in rows[:3]]
    for key, value in metadata.items():
        if json.loads(json.dumps(trace.metadata.get(key))) != json.loads(json.dumps(value, default=float)):
            found.append(f"metadata {key!r}")
    if set(trace.metadata) != set(metadata):
        found.append(f"metadata keys {set(trace.metadata) ^ set(metadata)}")
    return found
