"""Small tables that cross the border between stages: named columns with a documented dtype and unit.

A report on many small traces must start fast, so pandas (0.3 s, 100 MB) is imported only when somebody asks
for a DataFrame.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["integer", "number", "text", "flag", "list", "mapping"]
_FRAME_DTYPES: dict[str, str] = {"integer": "Int64", "number": "Float64", "text": "string", "flag": "boolean"}


@dataclass(frozen=True)
class Column:
    """A column: its name, kind, unit ("" when it has none) and meaning. Any value may be None: not known."""

    name: str
    kind: Kind
    unit: str
    meaning: str


@dataclass(frozen=True)
class Schema:
    """A table's name and columns, in their order."""

    name: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns)


class Table:
    """Rows of one schema, immutable: a row is a mapping from column name to a plain Python value."""

    def __init__(self, schema: Schema, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        names = schema.names
        for row in rows:
            if row.keys() != set(names):
                missing, unknown = set(names) - row.keys(), row.keys() - set(names)
                raise ValueError(f"{schema.name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        self.schema = schema
        self._rows = tuple({name: row[name] for name in names} for row in rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records())

    def __repr__(self) -> str:
        return f"<Table {self.schema.name}: {len(self)} rows>"

    def records(self) -> list[dict[str, Any]]:
        """The rows as fresh dictionaries."""
        return [dict(row) for row in self._rows]

    def column(self, name: str) -> list[Any]:
        """One column's values."""
        if name not in self.schema.names:
            raise KeyError(f"{self.schema.name} has no column {name!r}")
        return [row[name] for row in self._rows]

    def where(self, **wanted: Any) -> "Table":
        """The rows whose columns equal the given values."""
        unknown = wanted.keys() - set(self.schema.names)
        if unknown:
            raise KeyError(f"{self.schema.name} has no column {sorted(unknown)[0]!r}")
        rows = [r for r in self._rows if all(r[k] == v for k, v in wanted.items())]
        return Table(self.schema, rows)

    def to_frame(self) -> "pd.DataFrame":
        """The table as a DataFrame; unknown values are <NA>."""
        import pandas as pd

        frame = pd.DataFrame(
            {c.name: pd.Series(self.column(c.name), dtype=object) for c in self.schema.columns}
        )
        dtypes = {c.name: _FRAME_DTYPES[c.kind] for c in self.schema.columns if c.kind in _FRAME_DTYPES}
        typed: pd.DataFrame = frame.astype(dtypes)
        return typed
