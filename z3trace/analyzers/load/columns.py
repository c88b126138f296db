"""Typed events -> numpy columns, block by block.

Columns of args are kept sparse, as (row, value) for the events that carry them, in the narrowest integer
type that holds them: a trace of 4 million events then takes a third of what dense int64 columns take.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
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

    def of(self, values: Sequence[Any]) -> npt.NDArray[np.int32]:
        count = len(values)
        try:
            found = itemgetter(*values)(self) if count > 1 else tuple(self[value] for value in values)
        except (KeyError, TypeError):
            found = tuple(map(self._code, values))
        return np.frombuffer(struct.pack(f"{count}i", *found), np.int32)

    def _code(self, value: Any) -> int:
        if isinstance(value, list | dict):  # where a string or a number belongs
            value = json.dumps(value)
        return self.setdefault(value, len(self))


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
        """Add values of the block of `size` events that starts at row `base`; `rows` count from there."""
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
    """An integer as the dialects write it (number, text, hexadecimal); None for another value, NULL for null."""
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


Getters = list[tuple[str, decode.Getter]]


def _getters(columns: Iterable[str]) -> Getters:
    return [(column, decode.getter(column)) for column in columns]


_TOP_GETTERS = _getters(("ts", "dur", *fields.TOP, "id", "args"))
_INT_GETTERS = [
    (column, [decode.getter(f"{column}_{number}") for number in range(len(keys))])
    for column, keys in fields.INTS.items()
]
_FOLLOWERS = {leader: _getters(group) for leader, group in fields.FOLLOWERS.items()}
_CODED_GETTERS = _getters(fields.CODED)
_RAW_GETTERS = _getters(fields.RAW)
_COLLECTIVE_INTS = _getters(fields.COLLECTIVE_INTS)
_COLLECTIVE_CODED = _getters(fields.COLLECTIVE_CODED)
_SYNC_INTS = _getters(fields.SYNC_INTS)
_OTHER_INTS = _getters(fields.OTHER_INTS)
_FIRST = _INT_GETTERS[0][0]
_SYNC = 0


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
        # Known from the start, so that a look at the code tells them from the rest.
        self.codes["ph"].update({phase: code for code, phase in enumerate(fields.SPAN_OR_FLOW)})
        self.codes["cat"]["cuda_sync"] = _SYNC
        self.sparse: dict[str, SparseColumn] = {}
        self.labels: list[tuple[int, Any, Any]] = []

    def add(self, events: list[Any], texts: bool) -> None:
        """Append a block of decoded events; `texts` says whether their times are text.

        Raises NeedText, before anything is changed, where a time given as a number has lost digits.
        """
        try:
            read = {column: get(events) for column, get in _TOP_GETTERS}
        except AttributeError:
            objects = [event for event in events if isinstance(event, decode.EVENT_TYPES)]
            self.notes.add(
                "not_an_event",
                "{count} entries of traceEvents are no objects: left out",
                len(events) - len(objects),
            )
            if objects:
                self.add(objects, texts)
            return
        size = len(events)
        if not size:
            return
        to_ns = texts_to_ns if texts else numbers_to_ns
        converted = {column: to_ns(read[column]) for column in ("ts", "dur")}
        for column, (ns, unusable) in converted.items():
            self.times[column].append(ns)
            if unusable:
                self.notes.add(
                    f"bad_{column}", f"{{count}} events with an unusable {column}: taken as absent", unusable
                )
        codes = {column: self.codes[column].of(read[column]) for column in fields.TOP}
        for column in fields.TOP:
            self.top[column].append(codes[column])
        self._integers("id", read["id"], None, size)
        self._args(read["args"], codes["ph"], codes["cat"])
        self.size += size

    def has_phases(self) -> bool:
        """Whether any event so far names its phase, as every real one does."""
        absent = self.codes["ph"].get(None, -1)
        return any(bool((codes != absent).any()) for codes in self.top["ph"])

    def _args(
        self, given: list[Any], phases: npt.NDArray[np.int32], categories: npt.NDArray[np.int32]
    ) -> None:
        size = len(given)
        rows: Rows | None = None
        args = given
        if given.count(None):
            args = [a for a in given if a is not None]
            rows = np.array([row for row, a in enumerate(given) if a is not None], np.intp)
        try:
            first = _INT_GETTERS[0][1][0](args)
        except AttributeError:
            self.notes.add(
                "strange_args",
                "{count} events whose args are no object: args left out",
                sum(type(a) is not decode.Args for a in args),
            )
            self._args([a if type(a) is decode.Args else None for a in given], phases, categories)
            return
        if not args:
            return
        for column, getters in _INT_GETTERS:
            values = first if column == _FIRST else getters[0](args)
            for alternative in getters[1:]:
                others = alternative(args)
                if others.count(NULL) < len(others):
                    values = [b if a == NULL else a for a, b in zip(values, others, strict=True)]
            present = self._integers(column, values, rows, size)
            if present is not None and column in _FOLLOWERS:
                self._some_integers(_FOLLOWERS[column], *_choose(args, rows, present), size)
        self._collectives(args, rows, size)
        for column, get in _RAW_GETTERS:
            values = get(args)
            if values.count(decode.NO_TEXT) < len(values):
                texts = [bytes(v) or None for v in values]
                self._put(column, self.codes[column].of(texts), rows, size, 0)
        if rows is not None:
            phases, categories = phases[rows], categories[rows]
        self._rare(args, rows, phases >= len(fields.SPAN_OR_FLOW), categories == _SYNC, size)

    def _collectives(self, args: list[Any], rows: Rows | None, size: int) -> None:
        named = np.zeros(len(args), np.bool_)
        for column, get in _CODED_GETTERS:
            values = get(args)
            if values.count(None) < len(values):
                codes = self.codes[column].of(values)
                named |= codes != 0
                self._put(column, codes, rows, size, 0)
        if not named.any():
            return
        chosen, chosen_rows = _choose(args, rows, named)
        self._some_integers(_COLLECTIVE_INTS, chosen, chosen_rows, size)
        for column, get in _COLLECTIVE_CODED:
            self._put(column, self.codes[column].of(get(chosen)), chosen_rows, size, 0)

    def _rare(
        self,
        args: list[Any],
        rows: Rows | None,
        other: npt.NDArray[np.bool_],
        sync: npt.NDArray[np.bool_],
        size: int,
    ) -> None:
        """Rare kinds of events: waits on the device, the allocator's instants, names of processes and threads."""
        if sync.any():
            self._some_integers(_SYNC_INTS, *_choose(args, rows, sync), size)
        if other.any():
            chosen, chosen_rows = _choose(args, rows, other)
            self._some_integers(_OTHER_INTS, chosen, chosen_rows, size)
            for a, row in zip(chosen, chosen_rows.tolist(), strict=True):
                if a.label_name is not None or a.label_labels is not None:
                    self.labels.append((self.size + row, a.label_name, a.label_labels))

    def _some_integers(self, getters: Getters, args: list[Any], rows: Rows, size: int) -> None:
        for column, get in getters:
            self._integers(column, get(args), rows, size)

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


def _choose(args: list[Any], rows: Rows | None, chosen: npt.NDArray[Any]) -> tuple[list[Any], Rows]:
    """The args at `chosen` (mask or positions) and the rows of their events in the block."""
    positions = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
    return [args[i] for i in positions.tolist()], positions if rows is None else rows[positions]
