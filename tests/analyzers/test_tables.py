"""The tables that cross the borders between stages."""

import pytest

from z3trace.analyzers import schemas
from z3trace.analyzers.table import Column, Schema, Table

SCHEMA = Schema("things", (Column("n", "integer", "", "a number"), Column("name", "text", "", "a name")))


def test_rows_are_kept_in_order_and_copied():
    source = [{"name": "b", "n": 2}, {"name": "a", "n": None}]
    table = Table(SCHEMA, source)
    source[0]["n"] = 9
    assert table.records() == [{"n": 2, "name": "b"}, {"n": None, "name": "a"}]
    table.records()[0]["n"] = 9
    assert table.column("n") == [2, None]
    assert len(table) == 2
    assert [row["name"] for row in table] == ["b", "a"]


def test_where_filters_and_refuses_unknown_columns():
    table = Table(SCHEMA, [{"n": 1, "name": "a"}, {"n": 2, "name": "a"}, {"n": 2, "name": "b"}])
    assert table.where(n=2, name="a").records() == [{"n": 2, "name": "a"}]
    with pytest.raises(KeyError, match="no column 'm'"):
        table.where(m=1)
    with pytest.raises(KeyError, match="no column 'm'"):
        table.column("m")


def test_a_row_must_fit_the_schema():
    with pytest.raises(ValueError, match=r"missing \['name'\], unknown \['nam'\]"):
        Table(SCHEMA, [{"n": 1, "nam": "a"}])


def test_frames_have_nullable_types():
    frame = Table(SCHEMA, [{"n": 2**60 + 1, "name": "b"}, {"n": None, "name": None}]).to_frame()
    assert str(frame["n"].dtype) == "Int64"
    assert str(frame["name"].dtype).startswith("str")
    assert frame["n"].iloc[0] == 2**60 + 1
    assert frame["n"].isna().tolist() == [False, True]
    assert list(Table(SCHEMA).to_frame().columns) == ["n", "name"]


def test_every_column_is_documented():
    assert len({schema.name for schema in schemas.ALL}) == len(schemas.ALL)
    for schema in schemas.ALL:
        assert len(set(schema.names)) == len(schema.names)
        for column in schema.columns:
            assert column.meaning, f"{schema.name}.{column.name}"
            assert (column.unit == "ns") == column.name.endswith(("_ns", "_ns_per_step")), column.name
