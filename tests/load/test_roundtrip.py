"""Random events in random layouts are read exactly, and damage to one of them leaves the others alone."""

import json
import re
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from z3trace.analyzers.load import load
from z3trace.analyzers.trace import Trace

ns = st.one_of(st.integers(0, 10**7), st.integers(10**15, 9 * 10**15), st.integers(16 * 10**17, 18 * 10**17))
text = st.text(st.characters(codec="utf-8"), max_size=20)
integer = st.integers(-(2**63) + 1, 2**63 - 1)
identifier = st.one_of(st.integers(0, 9), st.sampled_from(["Spans", "", "GPU 0"]))
args = st.fixed_dictionaries(
    {},
    optional={
        "External id": integer, "correlation": integer, "stream": integer, "device": integer, "bytes": integer,
        "Sequence number": integer, "Collective name": text, "dtype": text, "unknown": text,
        "Input Dims": st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
        "nested": st.dictionaries(text, st.lists(st.dictionaries(text, text, max_size=2), max_size=2), max_size=2),
    },
)  # fmt: skip
events = st.lists(
    st.fixed_dictionaries(
        {"ph": st.sampled_from("XXXisfM"), "name": text, "pid": identifier, "tid": identifier, "ts": ns},
        optional={
            "cat": st.sampled_from(["cpu_op", "kernel", "Runtime"]),
            "dur": ns,
            "id": integer,
            "args": args,
        },
    ),
    max_size=12,
)
layouts = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 1, 2, "\t"]),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : "), (",\r\n\r\n", ":\t")]),
        "ensure_ascii": st.booleans(),
        "sort_keys": st.booleans(),
    }
)
metadata = st.dictionaries(
    text.filter(lambda key: key != "traceEvents"), st.one_of(text, st.lists(args, max_size=2)), max_size=3
)


def written(document: dict[str, Any], layout: dict[str, Any], decimals: bool) -> bytes:
    """JSON text; the times, given in ns, become microseconds with all their digits."""

    def microseconds(match: re.Match[str]) -> str:
        whole, rest = divmod(int(match.group(2)), 1000)
        return match.group(1) + (f"{whole}.{rest:03}" if rest or decimals else str(whole))

    marked = [
        {key: f"{value} ns" if key in ("ts", "dur") else value for key, value in event.items()}
        for event in document["traceEvents"]
    ]
    text = json.dumps({**document, "traceEvents": marked}, **layout)
    return re.sub(r'("(?:ts|dur)"\s*:\s*)"(\d+) ns"', microseconds, text).encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events, layouts, metadata, st.booleans(), st.sampled_from([30, 100, 1 << 20]), st.booleans())
def test_random_events_in_random_layouts(
    tmp_path: Path,
    slow: ModuleType,
    events: Any,
    layout: Any,
    metadata: Any,
    decimals: bool,
    block: int,
    before: bool,
) -> None:
    document = {**metadata, "traceEvents": events} if before else {"traceEvents": events, **metadata}
    path = tmp_path / "trace.json"
    path.write_bytes(written(document, layout, decimals))
    trace = load(path, block_bytes=block)
    columns, expected_metadata = slow.reference(path.read_bytes())
    assert columns["ts"] == [event["ts"] for event in events]
    # The reference decodes these two everywhere; the loader only where an event names a collective.
    named = [name is not None for name in columns["collective"]]
    columns["dtype"] = [
        value if is_named else None for value, is_named in zip(columns["dtype"], named, strict=True)
    ]
    assert slow.differences(trace, columns, expected_metadata) == []
    assert trace.warnings == ()
    assert lanes_are_right(trace, events)


def lanes_are_right(trace: Trace, events: list[dict[str, Any]]) -> bool:
    places = [(lane.process, lane.thread) for lane in trace.lanes]
    return all(
        lane < 0 or places[lane] == (event["pid"], event["tid"])
        for lane, event in zip(trace.lane.tolist(), events, strict=True)
    )


@pytest.mark.parametrize("number", [0, 1, 999, 10**9 + 1, 8796093022207999, 8796093022208001, 2**63 - 1])
def test_the_layouts_really_hold_the_digits(number: int) -> None:
    layout = {"indent": None, "separators": (",", ":"), "ensure_ascii": True, "sort_keys": False}
    text = written({"traceEvents": [{"ts": number}]}, layout, True)
    assert Decimal(json.loads(text, parse_float=str)["traceEvents"][0]["ts"]) * 1000 == number
