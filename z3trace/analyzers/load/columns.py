"""Typed events -> numpy columns, block by block.

Columns of args are kept sparse, as (row, value) for the events that carry them, in the narrowest integer type that
holds them: a trace of 4 million events then takes a third of what dense int64 columns take.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from z3trace.analyzers.load import decode, fields
from z3trace.analyzers.load.fields import NULL
from z3trace.analyzers.load.notes import Notes
from z3trace.analyzers.load.times import numbers_to_ns, texts_to_ns

Int64 = npt.NDArray[np.int64]
Ints = npt.NDArray[np.signedinteger[Any]]
Rows = npt.NDArray[np.intp]


class Codes(dict[Any, int]):
    """Value -> code; a value met for the first time gets the next code."""

    def __missing__(self, value: Any) -> int:
        code = self[value] = len(self)
        return code

    def of(self, values: Sequence[Any]) -> npt.NDArray[np.int32]:
        try:
            return np.fromiter(map(self.__getitem__, values), np.int32, len(values))
        except TypeError:  # a list or an object stands where a string or a number belongs
            hashable = [json.dumps(v) if isinstance(v, list | dict) else v for v in values]
            return np.fromiter(map(self.__getitem__, hashable), np.int32, len(values))


@dataclass(frozen=True)
class Piece:
    """Part of a sparse column: values at `rows`, or at the `count` rows from `base` on where rows is None."""

    rows: npt.NDArray[np.uint32] | None
    base: int
    count: int
    values: Ints


class SparseColumn:
    """An integer column most of whose rows are absent."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def append(self, base: int, size: int, rows: Rows | None, values: Ints, absent: int) -> None:
        """Add values of the block of `size` events that starts at row `base`; `rows` are rows in that block."""
        present = values != absent
        count = int(np.count_nonzero(present))
        if not count:
            return
        if rows is None and count * 2 >= size:
            self.pieces.append(Piece(None, base, size, _narrow(values, absent)))
            return
        if count < len(values):
            values = values[present]
            rows = np.flatnonzero(present) if rows is None else rows[present]
        if rows is None:
            rows = np.arange(size)
        self.pieces.append(Piece((rows + base).astype(np.uint32), base, len(rows), _narrow(values, absent)))

    def dense(self, size: int, absent: int, dtype: type[np.signedinteger[Any]] = np.int64) -> Ints:
        """The column as one array of `size` values."""
        column = np.full(size, absent, dtype)
        for piece in self.pieces:
            values: Ints = piece.values
            if piece.rows is not None:
                column[piece.rows] = values
                continue
            target = column[piece.base : piece.base + piece.count]
            if values.dtype == np.int32 and absent == NULL:
                np.copyto(target, values)
                target[values == _NULL32] = NULL
            else:
                np.copyto(target, values)
        return column


_NULL32 = -(2**31)


def _narrow(values: Ints, absent: int) -> Ints:
    if values.dtype != np.int64 or absent != NULL:
        return values
    present = values[values != NULL]
    if len(present) and (present.min() <= _NULL32 or present.max() >= 2**31):
        return values
    return np.where(values == NULL, _NULL32, values).astype(np.int32)


def to_int(value: Any) -> int | None:
    """An integer as the dialects write it (number, text, hexadecimal text); None if it is none, NULL if absent."""
    if value is None:
        return NULL
    if isinstance(value, str):
        try:
            value = int(value, 16) if value[:2].lower() == "0x" else int(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    return None


_LEADERS = tuple(fields.FOLLOWERS)


class ColumnBuilder:
    """Collects the columns of one file while its blocks are decoded."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.size = 0
        self.times: dict[str, list[Int64]] = {"ts": [], "dur": []}
        self.top: dict[str, list[npt.NDArray[np.int32]]] = {column: [] for column in fields.TOP}
        self.codes: dict[str, Codes] = {column: Codes() for column in fields.CODED_COLUMNS}
        for column in fields.CODED_COLUMNS[len(fields.TOP) :]:
            self.codes[column][None] = 0
        self.sparse: dict[str, SparseColumn] = {}
        self.labels: list[tuple[int, Any, Any]] = []
        self._top = [(column, decode.getter(column)) for column in ("ts", "dur", *fields.TOP, "id", "args")]
        self._ints = [
            (column, [decode.getter(f"{column}_{i}") for i in range(len(keys))])
            for column, keys in fields.INTS.items()
        ]
        self._coded = [(column, decode.getter(column)) for column in fields.CODED]
        self._raw = [(column, decode.getter(column)) for column in fields.RAW]
        self._collective_ints = [(column, decode.getter(column)) for column in fields.COLLECTIVE_INTS]
        self._collective_coded = [(column, decode.getter(column)) for column in fields.COLLECTIVE_CODED]
        self._other = [(column, decode.getter(column)) for column in fields.OTHER_INTS]
        self._followers = {
            leader: [(column, decode.getter(column)) for column in group]
            for leader, group in fields.FOLLOWERS.items()
        }

    def add(self, events: list[Any], texts: bool) -> None:
        """Append a block of decoded events; `texts` says whether their times are text.

        Raises NeedText, before anything is changed, where a time given as a number has lost digits.
        """
        struct_type = decode.TextEvent if texts else decode.NumberEvent
        usable = [event for event in events if type(event) is struct_type]
        if len(usable) < len(events):
            self.notes.add(
                "not_an_event",
                "{count} entries of traceEvents are no objects: left out",
                len(events) - len(usable),
            )
        if not usable:
            return
        read = {column: get(usable) for column, get in self._top}
        to_ns = texts_to_ns if texts else numbers_to_ns
        converted = {column: to_ns(read[column]) for column in ("ts", "dur")}
        for column, (ns, unusable) in converted.items():
            self.times[column].append(ns)
            if unusable:
                self.notes.add(
                    f"bad_{column}", f"{{count}} events with an unusable {column}: taken as absent", unusable
                )
        for column in fields.TOP:
            self.top[column].append(self.codes[column].of(read[column]))
        self._integers("id", read["id"], None, len(usable))
        self._args(read["args"], read["ph"])
        self.size += len(usable)

    def _args(self, args: list[Any], phases: list[Any]) -> None:
        size = len(args)
        is_args = [type(a) is decode.Args for a in args]
        rows: Rows | None = None
        if not all(is_args):
            rows = np.flatnonzero(np.fromiter(is_args, np.bool_, size))
            strange = size - args.count(None) - len(rows)
            if strange:
                self.notes.add(
                    "strange_args", "{count} events whose args are no object: args left out", strange
                )
            args = [a for a in args if type(a) is decode.Args]
        if not args:
            return
        present: Any = None
        for column, getters in self._ints:
            values = getters[0](args)
            for alternative in getters[1:]:
                others = alternative(args)
                if others.count(NULL) < len(others):
                    values = [b if a is NULL else a for a, b in zip(values, others, strict=True)]
            present = self._integers(column, values, rows, size)
            if present is not None and column in self._followers:
                chosen, chosen_rows = _choose(args, rows, present)
                for follower, get in self._followers[column]:
                    self._integers(follower, get(chosen), chosen_rows, size)
        self._collectives(args, rows, size)
        for column, get in self._raw:
            values = get(args)
            if values.count(decode.NO_TEXT) < len(values):
                texts = [bytes(v) or None for v in values]
                self._put(column, self.codes[column].of(texts), rows, size, 0)
        self._others(args, rows, phases, size)

    def _collectives(self, args: list[Any], rows: Rows | None, size: int) -> None:
        named = np.zeros(len(args), np.bool_)
        for column, get in self._coded:
            values = get(args)
            if values.count(None) < len(values):
                codes = self.codes[column].of(values)
                named |= codes != 0
                self._put(column, codes, rows, size, 0)
        if not named.any():
            return
        chosen, chosen_rows = _choose(args, rows, named)
        for column, get in self._collective_ints:
            self._integers(column, get(chosen), chosen_rows, size)
        for column, get in self._collective_coded:
            self._put(column, self.codes[column].of(get(chosen)), chosen_rows, size, 0)

    def _others(self, args: list[Any], rows: Rows | None, phases: list[Any], size: int) -> None:
        """The allocator's instants and the names of processes and threads: few events, read one by one."""
        if rows is not None:
            phases = [phases[i] for i in rows]
        other = [i for i, phase in enumerate(phases) if phase not in _FREQUENT]
        if not other:
            return
        chosen, chosen_rows = _choose(args, rows, np.array(other))
        for column, get in self._other:
            self._integers(column, get(chosen), chosen_rows, size)
        for a, row in zip(chosen, chosen_rows, strict=True):
            if a.label_name is not None or a.label_labels is not None:
                self.labels.append((self.size + int(row), a.label_name, a.label_labels))

    def _integers(
        self, column: str, values: list[Any], rows: Rows | None, size: int
    ) -> npt.NDArray[np.bool_] | None:
        """Append one integer column of the block; returns which values are present (None: none)."""
        if values.count(NULL) == len(values):
            return None
        try:
            packed: Int64 = np.frombuffer(struct.pack(f"{len(values)}q", *values), np.int64)
        except struct.error:
            read = [to_int(value) for value in values]
            unusable = read.count(None)
            if unusable:
                self.notes.add(
                    f"bad_{column}",
                    f"{{count}} values of {column} are no 64-bit integers: taken as absent",
                    unusable,
                )
            packed = np.array([NULL if value is None else value for value in read], np.int64)
        self._put(column, packed, rows, size, NULL)
        return np.asarray(packed != NULL)

    def _put(self, column: str, values: Ints, rows: Rows | None, size: int, absent: int) -> None:
        self.sparse.setdefault(column, SparseColumn()).append(self.size, size, rows, values, absent)


_FREQUENT = frozenset(fields.SPAN_OR_FLOW)


def _choose(args: list[Any], rows: Rows | None, chosen: npt.NDArray[Any]) -> tuple[list[Any], Rows]:
    """The args at `chosen` (mask or positions) and the rows of their events in the block."""
    positions = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
    return [args[i] for i in positions.tolist()], positions if rows is None else rows[positions]
