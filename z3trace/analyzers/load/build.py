"""A file -> collected columns -> a Trace."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from z3trace.analyzers.load import categories
from z3trace.analyzers.load.columns import Codes, ColumnBuilder
from z3trace.analyzers.load.fields import CODED_COLUMNS, NULL, TOP
from z3trace.analyzers.load.notes import Notes
from z3trace.analyzers.load.read import Reader
from z3trace.analyzers.load.source import open_source
from z3trace.analyzers.trace import Columns, Trace, Value


def load_trace(path: str | Path, max_bytes: int | None, block_bytes: int) -> Trace:
    """See `z3trace.analyzers.load.load`."""
    name = os.fspath(path)
    notes = Notes()
    builder = ColumnBuilder(notes)
    collecting = gc.isenabled()
    gc.disable()  # a million small objects live for one block: the collector would walk them in vain
    try:
        with open_source(name, notes, max_bytes) as source:
            metadata = Reader(source, source.name, builder, notes, block_bytes).run()
        return _build(name, metadata, builder)
    finally:
        if collecting:
            gc.enable()


def _build(path: str, metadata: dict[str, Any], builder: ColumnBuilder) -> Trace:
    """Join the blocks and settle the spellings: categories, numbers that were written as text."""
    codes: dict[str, npt.NDArray[np.signedinteger[Any]]] = {}
    values: dict[str, list[Value]] = {}
    for column in TOP:
        joined = _joined(builder.top.pop(column), np.int32)
        given = list(builder.codes[column])
        if column == "cat":
            codes["cat_raw"], values["cat_raw"] = _settled(joined, given, _text)
            given, joined = values["cat_raw"], codes["cat_raw"]
            codes[column], values[column] = _settled(joined, given, _category)
        else:
            codes[column], values[column] = _settled(
                joined, given, _id if column in ("pid", "tid") else _text
            )
    for column in CODED_COLUMNS[len(TOP) :]:
        values[column] = [_text(value) for value in builder.codes[column]]
    ts = _joined(builder.times.pop("ts"), np.int64)
    dur = _joined(builder.times.pop("dur"), np.int64)
    columns = Columns(ts, dur, codes, builder.sparse, values, tuple(builder.labels))
    trace = Trace(path, metadata, columns, ())
    _note_untimed(trace, builder)
    return Trace(path, metadata, columns, builder.notes.warnings())


def _joined(parts: list[npt.NDArray[Any]], dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    joined = np.concatenate(parts) if parts else np.empty(0, dtype)
    parts.clear()
    return joined


def _settled(codes: npt.NDArray[Any], given: list[Any], settle: Any) -> tuple[npt.NDArray[Any], list[Value]]:
    """Codes and values after `settle` has been applied to each distinct value."""
    settled = Codes()
    table = np.zeros(len(given), np.int32)
    used = np.flatnonzero(np.bincount(codes, minlength=len(given)))
    table[used] = settled.of([settle(given[code]) for code in used.tolist()])
    dtype = np.int8 if len(settled) < 128 else np.int16 if len(settled) < 1 << 15 else np.int32
    return (table.astype(dtype)[codes] if len(given) else codes.astype(dtype)), list(settled)


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if value is None or isinstance(value, str) else str(value)


def _category(value: str | None) -> str | None:
    return None if value is None else categories.modern(value)


def _id(value: Any) -> Value:
    """A process or thread id; a number written as text is that number."""
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            return value
        return number if str(number) == value else value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, bool) else value


def _note_untimed(trace: Trace, builder: ColumnBuilder) -> None:
    untimed = int(np.count_nonzero((trace.ts == NULL) & ~trace.is_phase("M")))
    if untimed:
        builder.notes.add("no_ts", "{count} events without a time: kept, but on no timeline", untimed)
