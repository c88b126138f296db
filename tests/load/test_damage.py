"""Damaged files: every other event is kept, and each kind of damage is told once, with a count."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from z3trace.analyzers.errors import TraceError
from z3trace.analyzers.load import load
from z3trace.analyzers.trace import NULL, Trace

Loaded = Callable[..., Trace]


def event(number: int, name: str | None = None, **more: object) -> bytes:
    fields = {
        "ph": "X",
        "cat": "cpu_op",
        "name": name or f"op{number}",
        "pid": 1,
        "tid": 2,
        "ts": number + 0.5,
        "dur": 1,
    }
    return json.dumps(fields | more).encode()


def trace_of(*events: bytes, separator: bytes = b",\n  ") -> bytes:
    return b'{"schemaVersion": 1,\n"traceEvents": [\n' + separator.join(events) + b'\n],\n"traceName": "t"}'


SOUND = [event(number) for number in range(9)]


def with_fifth(text: bytes) -> bytes:
    return trace_of(*SOUND[:4], text, *SOUND[5:])


def kept(trace: Trace) -> list[str]:
    return [trace.name_of(row) for row in range(len(trace))]


OTHERS = ["op0", "op1", "op2", "op3", "op5", "op6", "op7", "op8"]
ALL = [f"op{number}" for number in range(9)]


@pytest.mark.parametrize("block_bytes", [1 << 20, 200])
@pytest.mark.parametrize(
    ("fifth", "kind", "name"),
    [
        (SOUND[4].replace(b"op4", b"o\xffp4"), "invalid_utf8", "o�p4"),
        (SOUND[4].replace(b"op4", b"op\x014"), "mended", "op\x014"),
        (SOUND[4].replace(b"op4", b"op\n4"), "mended", "op\n4"),
        (SOUND[4].replace(b"op4", rb"op\q4"), "mended", "op\\q4"),
        (SOUND[4].replace(b"op4", rb"op\ud8004"), "mended", "op�4"),
        (SOUND[4].replace(b"op4", b'op "4" of 5'), "mended", 'op "4" of 5'),
        (SOUND[4].replace(b"op4", b'f("a", 1)'), "mended", 'f("a", 1)'),
        (SOUND[4].replace(b'"cpu_op", ', b'"cpu_op" '), "mended", "op4"),
        (SOUND[4].replace(b"4.5", b"NaN"), "mended", "op4"),
        (SOUND[4].replace(b"4.5", b"-Infinity"), "mended", "op4"),
        (SOUND[4].replace(b"4.5", b"1e999"), "bad_ts", "op4"),
        (SOUND[4].replace(b"1}", b"[" * 10_000 + b"]" * 10_000 + b"}"), "mended", "op4"),
        (event(4, ts="soon"), "bad_ts", "op4"),
        (event(4, ts=[1]), "bad_ts", "op4"),
        (event(4, ts=10**40), "bad_ts", "op4"),
        (event(4, id=2**64), "bad_id", "op4"),
        (event(4, args=[1, 2]), "strange_args", "op4"),
        (event(4, args="text"), "strange_args", "op4"),
        (event(4, args={"correlation": 2**63}), "bad_correlation", "op4"),
    ],
)
def test_a_damaged_event_is_kept_as_far_as_it_can_be_read(
    loaded: Loaded, fifth: bytes, kind: str, name: str, block_bytes: int
) -> None:
    trace = loaded(with_fifth(fifth), block_bytes=block_bytes)
    assert kept(trace) == [*ALL[:4], name, *ALL[5:]]
    assert (kind, 1) in [(w.kind, w.count) for w in trace.warnings]
    times = trace.ts.tolist()
    assert times[:4] + times[5:] == [number * 1000 + 500 for number in range(9) if number != 4]
    assert times[4] in (4500, NULL)
    assert trace.metadata == {"schemaVersion": 1, "traceName": "t"}


@pytest.mark.parametrize("block_bytes", [1 << 20, 200])
@pytest.mark.parametrize(
    ("fifth", "kind"),
    [
        (b"17", "not_an_event"),
        (b"null", "not_an_event"),
        (SOUND[4][:30], "unreadable"),
        (b'{"ph": "X", "name": "op4', "unreadable"),
        (b"\x00" * 50, "unreadable"),
    ],
)
def test_what_cannot_be_read_is_left_out_alone(
    loaded: Loaded, fifth: bytes, kind: str, block_bytes: int
) -> None:
    trace = loaded(with_fifth(fifth), block_bytes=block_bytes)
    assert kept(trace) == OTHERS
    assert [(w.kind, w.count) for w in trace.warnings] == [(kind, 1)]


@pytest.mark.parametrize(
    "separator", [b" ", b",,", b", ,\n", b";"], ids=["missing comma", "two", "two apart", "another character"]
)
def test_commas_between_events_may_be_wrong(loaded: Loaded, separator: bytes) -> None:
    text = trace_of(*SOUND).replace(b",\n  " + SOUND[4], separator + SOUND[4])
    trace = loaded(text)
    assert kept(trace) == ALL
    assert len(trace.warnings) == 1


@pytest.mark.parametrize("block_bytes", [1 << 20, 200])
def test_a_file_that_is_cut_off_keeps_its_complete_events(loaded: Loaded, block_bytes: int) -> None:
    text = trace_of(*SOUND)
    for end in range(text.index(SOUND[0]) + 1, len(text)):
        complete = sum(text.index(sound) + len(sound) <= end for sound in SOUND)
        trace = loaded(text[:end], block_bytes=block_bytes)
        assert kept(trace)[:complete] == ALL[:complete], end
        assert len(trace) == complete, end
        if complete < 9:
            assert [w.kind for w in trace.warnings] == ["cut_off"], end


def test_a_gzip_that_is_cut_off_keeps_what_came_before(tmp_path: Path) -> None:
    text = trace_of(*(event(number) for number in range(50_000)))
    packed = gzip.compress(text)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed[: len(packed) * 2 // 3])
    trace = load(path)
    assert 25_000 < len(trace) < 40_000
    assert kept(trace) == [f"op{number}" for number in range(len(trace))]
    assert {w.kind for w in trace.warnings} == {"compression", "cut_off"}


def test_damaged_gzip_data_keeps_what_came_before(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(trace_of(*(event(number) for number in range(50_000)))))
    packed[len(packed) // 2 : len(packed) // 2 + 200] = bytes(200)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed)
    trace = load(path)
    assert len(trace) > 10_000
    assert kept(trace)[:10_000] == [f"op{number}" for number in range(10_000)]


def test_of_duplicate_keys_the_last_counts_as_everywhere(loaded: Loaded) -> None:
    trace = loaded(with_fifth(SOUND[4].replace(b'"dur": 1', b'"dur": 1, "dur": 2, "name": "last"')))
    assert kept(trace)[4] == "last"
    assert trace.dur[4] == 2000


def test_events_without_a_time_are_kept(loaded: Loaded) -> None:
    trace = loaded(with_fifth(b'{"ph": "X", "name": "op4", "pid": 1, "tid": 2}'))
    assert kept(trace) == ALL
    assert (trace.ts[4], trace.dur[4], trace.end[4], trace.parents[4]) == (NULL, NULL, NULL, -1)
    assert [(w.kind, w.count) for w in trace.warnings] == [("no_ts", 1)]


def test_the_list_may_end_too_early(loaded: Loaded) -> None:
    text = trace_of(*SOUND).replace(SOUND[4], SOUND[4] + b'], "x": 1}')
    for block_bytes in (1 << 20, 100):
        trace = loaded(text, block_bytes=block_bytes)
        assert kept(trace) == ALL
        assert "stray_end" in [w.kind for w in trace.warnings]


def test_a_bracket_that_never_closes_costs_one_event(loaded: Loaded) -> None:
    events = [event(number) for number in range(5000)]
    open_ = events[2000].replace(b'"dur": 1}', b'"dur": 1, "args": {"a": [1, 2')
    trace = loaded(trace_of(*events[:2000], open_, *events[2001:]), block_bytes=1 << 16)
    names = kept(trace)
    assert names == [f"op{number}" for number in range(5000) if number != 2000]


@pytest.mark.parametrize("opened", [b'"args": ', b'"args": {"a": [', b'"args": {"a": [[1, 2], [', b'"bp":  '])
def test_the_rest_of_an_event_may_be_gone(loaded: Loaded, opened: bytes) -> None:
    """The next event then seems to lie inside the damaged one."""
    text = trace_of(*SOUND).replace(SOUND[4] + b",\n  ", b'{"ph": "X", "name": "op4", ' + opened)
    for block_bytes in (1 << 20, 200):
        trace = loaded(text, block_bytes=block_bytes)
        assert kept(trace) == OTHERS
        assert [(w.kind, w.count) for w in trace.warnings] == [("unreadable", 1)]


@pytest.mark.parametrize(
    "junk", [b"]", b"}", b"]]", b"x", b'"', b"[", b"{", b"\x0c", b":", b"null, ", b"NaN,"]
)
def test_junk_between_events_costs_nothing(loaded: Loaded, junk: bytes) -> None:
    for text in (
        trace_of(*SOUND).replace(SOUND[5], junk + SOUND[5]),
        trace_of(*SOUND).replace(SOUND[5], SOUND[5] + junk),
        trace_of(*SOUND).replace(SOUND[8], SOUND[8] + junk),
        trace_of(*SOUND).replace(SOUND[0], junk + SOUND[0]),
    ):
        for block_bytes in (1 << 20, 200):
            trace = loaded(text, block_bytes=block_bytes)
            assert kept(trace) == ALL, text
            assert trace.metadata["schemaVersion"] == 1


@pytest.mark.parametrize("damage", [(b'"traceEvents"', b'"trac'), (b'{"schema', b'"schema'), (b"[", b" ")])
def test_a_damaged_start_hides_no_event(loaded: Loaded, damage: tuple[bytes, bytes]) -> None:
    trace = loaded(trace_of(*SOUND).replace(*damage, 1))
    assert kept(trace) == ALL


def test_nested_data_that_looks_like_events_is_no_event(loaded: Loaded) -> None:
    inner = [{"ph": "X", "name": f"inner{i}", "ts": i} for i in range(500)]
    tricky = event(4, args={"stack": inner, "text": '}, {"ph": "X", "name": "text"}'})
    for block_bytes in (100, 1000, 1 << 20):
        trace = loaded(with_fifth(tricky), block_bytes=block_bytes)
        assert kept(trace) == ALL
        assert trace.warnings == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b" \n\t ", "empty"),
        (trace_of(*SOUND).decode().encode("utf-16"), "UTF-16"),
        (trace_of(*SOUND).decode().encode("utf-16-le"), "UTF-16"),
        (b'{"traceEvents": null}', "traceEvents is not a list"),
        (b'{"traceEvents": {"a": 1}}', "traceEvents is not a list"),
        (b'{"schema": "z3trace.report/1", "steps": []}', "JSON without traceEvents"),
        (b"[1, 2, 3]", "JSON without traceEvents"),
        (b'[{"a": 1}]', "no events"),
        (b"[]", "no events"),
        (b"rank: 0\nworld: 2\n", "no list of events"),
        (b'{"schemaVersion": 1, "deviceProp', "no list of events"),
        (b"\x1f\x8b\x08\x00garbage", "empty"),
        (b"PK\x03\x04 garbage", "zip"),
        (b"\x28\xb5\x2f\xfd zstd", "no list of events"),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as error:
        load(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_an_empty_list_of_events_is_a_trace(loaded: Loaded) -> None:
    trace = loaded(b'{"traceEvents": [], "distributedInfo": {"rank": 3}}')
    assert (len(trace), trace.rank, trace.lanes, trace.parents.tolist()) == (0, 3, (), [])


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.json", "no such file"), (tmp_path, "directory")):
        with pytest.raises(TraceError, match=words):
            load(path)
    if os.geteuid():
        locked = tmp_path / "locked.json"
        locked.write_bytes(trace_of(*SOUND))
        locked.chmod(0)
        with pytest.raises(TraceError, match="no permission"):
            load(locked)
