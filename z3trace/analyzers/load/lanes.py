"""Threads and streams: which events lie on which, and what they are called."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from z3trace.analyzers.load import categories
from z3trace.analyzers.load.fields import NULL

if TYPE_CHECKING:
    from z3trace.analyzers.trace import Lane, Trace

_INNER_NAME = re.compile(r"thread -?\w+ \((.*)\)\s*", re.DOTALL)
_GPU_LABEL = re.compile(r"(?:GPU|XPU|MTIA|HPU|device) ?\d+", re.IGNORECASE)


def find_lanes(
    trace: "Trace", labels: Sequence[tuple[int, Any, Any]]
) -> tuple[tuple["Lane", ...], npt.NDArray[np.int32]]:
    """The lanes in the order of their first event, and the lane of each event (-1: none)."""
    from z3trace.analyzers.trace import Lane

    pid, tid = trace.codes("pid").astype(np.int64), trace.codes("tid").astype(np.int64)
    pids, tids = trace.values("pid"), trace.values("tid")
    named = (
        np.array([p is not None for p in pids], np.bool_)[pid]
        & np.array([t is not None for t in tids], np.bool_)[tid]
    )
    metadata = trace.is_phase("M")
    key = pid * max(len(tids), 1) + tid
    placed = key[named & ~metadata]
    distinct, first = _distinct(placed, len(pids) * len(tids))
    distinct = distinct[np.argsort(first, kind="stable")]
    table = np.full(len(pids) * len(tids) + 1, -1, np.int32) if len(pids) * len(tids) < 1 << 24 else None
    if table is not None:
        table[distinct] = np.arange(len(distinct), dtype=np.int32)
        lane = np.where(named, table[key], np.int32(-1))
    else:
        order = np.argsort(distinct)
        at = np.searchsorted(distinct[order], key)
        at[at == len(distinct)] = 0
        lane = np.where(named & (distinct[order][at] == key), order[at], -1).astype(np.int32)

    on_device = trace.is_cat(*categories.ON_DEVICE) & (lane >= 0)
    device_rows = np.flatnonzero(on_device)
    is_device = np.zeros(len(distinct), np.bool_)
    is_device[lane[device_rows]] = True
    devices = _first_value(trace.ints("device"), lane, device_rows, len(distinct))
    streams = _first_value(trace.ints("stream"), lane, device_rows, len(distinct))

    thread_names: dict[int, dict[str, None]] = {}
    process_names: dict[int, str] = {}
    process_labels: dict[int, str] = {}
    for row, name, label in labels:
        kind = trace.name_of(row)
        if kind == "thread_name" and name is not None and lane[row] >= 0:
            thread_names.setdefault(int(lane[row]), {})[_inner_name(str(name))] = None
        elif kind == "process_name" and name is not None:
            process_names.setdefault(int(pid[row]), str(name))
        elif kind == "process_labels" and label is not None:
            process_labels.setdefault(int(pid[row]), str(label))
    lanes = []
    for number, code in enumerate(distinct.tolist()):
        p, t = divmod(code, max(len(tids), 1))
        label = process_labels.get(p)
        names = tuple(thread_names.get(number, ()))
        device_lane = bool(is_device[number]) or bool(
            label
            and _GPU_LABEL.fullmatch(label.strip())
            and any(name.startswith("stream ") for name in names)
        )
        lanes.append(
            Lane(
                process=pids[p],
                thread=tids[t],
                device=(_or(devices[number], pids[p]) if device_lane else None),
                stream=(_or(streams[number], tids[t]) if device_lane else None),
                names=names,
                is_device=device_lane,
                process_name=process_names.get(p),
                process_label=label,
            )
        )
    lane.flags.writeable = False
    return tuple(lanes), lane


def _distinct(keys: npt.NDArray[np.int64], span: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Distinct keys and the position of the first of each."""
    if span >= 1 << 24:
        distinct, first = np.unique(keys, return_index=True)
        return distinct, first
    positions = np.full(span, len(keys), np.intp)
    positions[keys[::-1]] = np.arange(len(keys) - 1, -1, -1)  # the last write is the first position
    found = np.flatnonzero(positions < len(keys))
    return found.astype(np.int64), positions[found]


def _first_value(
    column: npt.NDArray[np.int64], lane: npt.NDArray[np.int32], rows: npt.NDArray[np.intp], count: int
) -> list[int]:
    values = np.full(count, NULL, np.int64)
    rows = rows[column[rows] != NULL][::-1]
    values[lane[rows]] = column[rows]
    return [int(value) for value in values]


def _or(value: int, other: Any) -> int | None:
    if value != NULL:
        return value
    return other if isinstance(other, int) else None


def _inner_name(name: str) -> str:
    inner = _INNER_NAME.fullmatch(name)
    return (inner.group(1) if inner else name).strip()
