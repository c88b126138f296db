"""One rank's trace as immutable columns, with lanes, nesting and links."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from z3trace.analyzers.load import categories, links
from z3trace.analyzers.load.fields import CODED_COLUMNS, INT_COLUMNS, NULL
from z3trace.analyzers.load.nesting import enclosing
from z3trace.analyzers.load.notes import LoadWarning

if TYPE_CHECKING:
    import pandas as pd

    from z3trace.analyzers.load.columns import SparseColumn

__all__ = ["NULL", "Lane", "LoadWarning", "Trace"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]
Value = str | int | float | None
_Array = TypeVar("_Array", bound=npt.NDArray[Any])


@dataclass(frozen=True)
class Lane:
    """A thread of a process or a stream of a device.

    `device` and `stream` are set on device lanes. `names` are all names given to it, innermost text only
    ("thread 7090 (pt_gloo_runloop)" is "pt_gloo_runloop"); the system reuses thread ids, so there may be
    several.
    """

    process: Value
    thread: Value
    device: int | None
    stream: int | None
    names: tuple[str, ...]
    is_device: bool
    process_name: str | None
    process_label: str | None


@dataclass(frozen=True)
class Columns:
    """What was read from a file: the events' columns in file order."""

    ts: Int64
    dur: Int64
    codes: Mapping[str, npt.NDArray[np.signedinteger[Any]]]
    sparse: Mapping[str, "SparseColumn"]
    values: Mapping[str, list[Value]]
    labels: tuple[tuple[int, Any, Any], ...]
    """Of metadata events: row, `name` and `labels` among the args."""


class Trace:
    """The events of one file, in file order: row numbers are stable ids.

    Times are int64 ns as in the file (from `baseTimeNanoseconds` on, where the metadata has it); NULL where
    absent. All arrays are read-only. Lanes, nesting and links are computed when first asked for, once.
    """

    def __init__(
        self,
        path: str,
        metadata: Mapping[str, Any],
        columns: Columns,
        warnings: tuple[LoadWarning, ...],
        rank: int | None = None,
    ) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(metadata))
        self.warnings = warnings
        self._columns = columns
        self._rank = rank
        self._dense: dict[str, npt.NDArray[Any]] = {}
        for codes in columns.codes.values():
            _locked(codes)
        self.ts = _locked(columns.ts)
        self.dur = _locked(columns.dur)

    def __len__(self) -> int:
        return len(self.ts)

    def __reduce__(self) -> Any:
        return Trace, (self.path, dict(self.metadata), self._columns, self.warnings, self._rank)

    def __repr__(self) -> str:
        return f"<Trace {self.path}: {len(self):,} events, rank {self.rank}>"

    @cached_property
    def end(self) -> Int64:
        """ts + dur; ts where dur is absent, NULL where ts is."""
        has_dur = (self.dur != NULL) & (self.ts != NULL)
        return _locked(np.where(has_dur, self.ts + np.where(has_dur, self.dur, 0), self.ts))

    # Columns.

    def has(self, column: str) -> bool:
        """Whether any event carries this column."""
        if column in self._columns.codes:
            return any(value is not None for value in self._columns.values[column])
        return column in self._columns.sparse

    def ints(self, column: str) -> Int64:
        """An integer column, dense, NULL where absent. Unknown names raise KeyError."""
        if column not in INT_COLUMNS:
            raise KeyError(f"no integer column {column!r}: there are {', '.join(INT_COLUMNS)}")
        dense: Int64 = self._densely(column, NULL, np.int64)
        return dense

    def codes(self, column: str) -> npt.NDArray[np.signedinteger[Any]]:
        """The codes of a coded column, one for each event; `values` says what they stand for."""
        if column in self._columns.codes:
            return self._columns.codes[column]
        if column not in CODED_COLUMNS:
            raise KeyError(f"no coded column {column!r}: there are {', '.join(CODED_COLUMNS)}, cat_raw")
        dense: Int32 = self._densely(column, 0, np.int32)
        return dense

    def values(self, column: str) -> list[Value]:
        """What the codes of a column stand for; None stands for absent."""
        return list(self._columns.values[column])

    def text(self, column: str, row: int) -> str | None:
        """The value of a coded column in one event."""
        value = self._columns.values[column][int(self.codes(column)[row])]
        return None if value is None else str(value)

    def name_of(self, row: int) -> str:
        """The name of one event; empty if it has none."""
        return self.text("name", row) or ""

    def is_cat(self, *cats: str) -> Bool:
        """Mask of the events of any of these categories (modern spelling, lower case)."""
        return self._mask("cat", lambda value: value in cats)

    def is_phase(self, *phases: str) -> Bool:
        """Mask of the events of any of these phases ("X", "i", "s", "f", "M", …)."""
        return self._mask("ph", lambda value: value in phases)

    def named(self, wanted: Callable[[str], bool] | Collection[str]) -> Bool:
        """Mask of the events whose name is wanted; a predicate is asked once for each distinct name."""
        if callable(wanted):
            predicate = wanted
            return self._mask("name", lambda value: value is not None and bool(predicate(str(value))))
        names = frozenset((wanted,) if isinstance(wanted, str) else wanted)
        return self._mask("name", lambda value: value in names)

    def _mask(self, column: str, wanted: Callable[[Value], bool]) -> Bool:
        values = self._columns.values[column]
        table = np.fromiter((wanted(value) for value in values), np.bool_, len(values))
        return np.asarray(table[self.codes(column)]) if len(values) else np.zeros(len(self), np.bool_)

    def _densely(self, column: str, absent: int, dtype: type[np.signedinteger[Any]]) -> Any:
        if column not in self._dense:
            sparse = self._columns.sparse.get(column)
            dense = (
                np.full(len(self), absent, dtype)
                if sparse is None
                else sparse.dense(len(self), absent, dtype)
            )
            self._dense[column] = _locked(dense)
        return self._dense[column]

    # Lanes.

    @cached_property
    def _lanes(self) -> tuple[tuple[Lane, ...], Int32]:
        from z3trace.analyzers.load.lanes import find_lanes

        return find_lanes(self, self._columns.labels)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Threads and streams, in the order of their first event."""
        return self._lanes[0]

    @property
    def lane(self) -> Int32:
        """The index in `lanes` of each event, -1 for none."""
        return self._lanes[1]

    @cached_property
    def on_device(self) -> Bool:
        """Mask of the events that lie on a device's lanes."""
        table = np.array([lane.is_device for lane in self.lanes] + [False])
        return _locked(table[self.lane])

    # Nesting and links.

    @cached_property
    def parents(self) -> Int32:
        """For each span or instant on a host lane the row of the innermost span that encloses it, else -1.

        A span encloses another event of its lane if it starts no later and ends no earlier; see `enclosing`.
        """
        spans = self.is_phase("X") & (self.dur != NULL)
        rows = np.flatnonzero(
            (spans | self.is_phase("i", "I", "n")) & (self.lane >= 0) & ~self.on_device & (self.ts != NULL)
        )
        parents = np.full(len(self), -1, np.int32)
        inner = enclosing(self.lane[rows], self.ts[rows], self.end[rows], spans[rows])
        parents[rows] = np.where(inner >= 0, rows[inner], -1)
        return _locked(parents)

    @cached_property
    def _work(self) -> Rows:
        return np.flatnonzero(self.is_cat(*categories.DEVICE_WORK) & self.is_phase("X"))

    @cached_property
    def _calls(self) -> Rows:
        return np.flatnonzero(self.is_cat(*categories.RUNTIME) & self.is_phase("X"))

    @cached_property
    def process_scope(self) -> Int32:
        """The host process of each event, as a code of `pid`: device work belongs to who launched it."""
        pid = self.codes("pid").astype(np.int32)
        return _locked(
            links.process_scopes(
                pid, self.on_device, self._calls, self._work, self.ints("correlation"), self.ts
            )
        )

    @cached_property
    def launches(self) -> Int32:
        """For device work (kernels, copies, sets) the row of the runtime call that launched it, else -1."""
        return _locked(
            links.launches(self.process_scope, self.ints("correlation"), self._calls, self._work, len(self))
        )

    @cached_property
    def forward_of(self) -> Int32:
        """For a backward operator the row of its forward operator, else -1."""
        ops = np.flatnonzero(self.is_cat("cpu_op") & self.is_phase("X"))
        return _locked(
            links.forward_ops(
                self.process_scope, self.ints("sequence"), self.ints("fwd_thread"), self.ts, ops, len(self)
            )
        )

    @cached_property
    def by_external_id(self) -> Int32:
        """For runtime calls and device work the row of the operator with the same External id, else -1."""
        external = self.ints("external_id")
        ops = np.flatnonzero(
            self.is_cat("cpu_op", "user_annotation") & (external != NULL) & self.is_phase("X")
        )
        users = np.concatenate((self._calls, self._work))
        users = users[(external[users] != NULL) & (external[users] != 0)]
        return _locked(links.by_key(self.process_scope, external, ops, users, len(self)))

    # Oddities: kept, and counted here.

    @property
    def work_without_launch(self) -> int:
        """Device activities whose launch is not in the trace: launched before it began, or not recorded."""
        return int(np.count_nonzero(self.launches[self._work] < 0))

    @property
    def launches_without_work(self) -> int:
        """Runtime calls that launch by their name (launch, memcpy, memset) but without work in the trace."""
        launching = self.named(lambda name: bool(_LAUNCHING.search(name)))
        calls = self._calls[launching[self._calls]]
        launched = np.zeros(len(self), np.bool_)
        launched[self.launches[self._work][self.launches[self._work] >= 0]] = True
        return int(np.count_nonzero(~launched[calls]))

    @property
    def negative_launch_delays(self) -> int:
        """Device activities that start before the call that launched them: the clocks disagree."""
        launch = self.launches[self._work]
        linked = launch >= 0
        return int(np.count_nonzero(self.ts[self._work[linked]] < self.ts[launch[linked]]))

    # Identity.

    @property
    def rank(self) -> int | None:
        """The rank: given by `with_rank`, else what the file names in distributedInfo or our metadata."""
        return self._identity("rank") if self._rank is None else self._rank

    def with_rank(self, rank: int) -> "Trace":
        """The same events as the trace of this rank; the columns are shared."""
        return Trace(self.path, self.metadata, self._columns, self.warnings, rank)

    @property
    def world_size(self) -> int | None:
        return self._identity("world_size")

    @property
    def backend(self) -> str | None:
        info = self.metadata.get("distributedInfo")
        backend = info.get("backend") if isinstance(info, Mapping) else None
        return backend if isinstance(backend, str) else None

    def _identity(self, key: str) -> int | None:
        for place in ("distributedInfo", "z3trace"):
            info = self.metadata.get(place)
            if isinstance(info, Mapping):
                value = info.get(key)
                if isinstance(value, str) and value.isdecimal():
                    value = int(value)
                if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                    return value
        return None

    @cached_property
    def device(self) -> str:
        """Where the work ran: "cuda", "rocm", "xpu", "mtia" or "cpu"."""
        from z3trace.analyzers.load.identity import device_kind

        return device_kind(self)

    @cached_property
    def events(self) -> "pd.DataFrame":
        """All events as a DataFrame; see `z3trace.analyzers.load.frame` for its columns and units."""
        from z3trace.analyzers.load.frame import to_frame

        return to_frame(self)


_LAUNCHING = re.compile(r"launch|memcpy|memset", re.IGNORECASE)


def _locked(array: _Array) -> _Array:
    array.flags.writeable = False
    return array
