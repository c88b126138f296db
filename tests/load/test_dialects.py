"""Every way of writing a trace that is in use gives the same columns."""

import io
import json
import sys
import zipfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from z3trace.analyzers.errors import TraceError
from z3trace.analyzers.load import load
from z3trace.analyzers.trace import NULL, Trace

Loaded = Callable[..., Trace]

EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "ts": 1.0, "pid": 7, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "thread_name", "ts": 1.0, "pid": 7, "tid": 8, "args": {"name": "thread 8 (python)"}},
    {
        "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 8, "ts": 4458676416.397, "dur": 12.001,
        "args": {"External id": 5, "Sequence number": 9, "Fwd thread id": 0, "Input Dims": [[2, 3], []]},
    },
    {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 8, "ts": 4458676417.5, "dur": 3,
        "args": {"External id": 5, "correlation": 11},
    },
    {
        "ph": "X", "cat": "kernel", "name": "gemm<float, \"é\">", "pid": 0, "tid": 7, "ts": 4458676430, "dur": 0.25,
        "args": {"device": 0, "stream": 7, "correlation": 11, "bytes": 64},
    },
    {"ph": "s", "id": 11, "pid": 7, "tid": 8, "ts": 4458676417.5, "cat": "ac2g", "name": "ac2g"},
]  # fmt: skip
METADATA = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}}


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    columns: list[list[Any]] = [trace.ts.tolist(), trace.dur.tolist()]
    columns += [
        trace.ints(c).tolist() for c in ("id", "external_id", "correlation", "stream", "device", "bytes")
    ]
    for column in ("ph", "cat", "name", "pid", "tid"):
        values = trace.values(column)
        columns.append([values[code] for code in trace.codes(column).tolist()])
    return list(zip(*columns, strict=True))


def expected() -> list[tuple[Any, ...]]:
    def ns(value: Any) -> int:
        return NULL if value is None else int(Decimal(str(value)) * 1000)

    found = []
    for event in EVENTS:
        args = event.get("args", {})
        integers = [event.get("id", NULL)]
        integers += [
            args.get(key, NULL) for key in ("External id", "correlation", "stream", "device", "bytes")
        ]
        texts = [event.get(key) for key in ("ph", "cat", "name", "pid", "tid")]
        found.append((ns(event["ts"]), ns(event.get("dur")), *integers, *texts))
    return found


def spread(text: bytes) -> bytes:
    """Blank lines and commas on lines of their own, as torch 2.13 writes."""
    return text.replace(b'", "', b'",\n    \n    "').replace(b"}, {", b"}\n  ,\n\n  {")


def writers() -> dict[str, bytes]:
    document = {**METADATA, "traceEvents": EVENTS}
    text = json.dumps(document).encode()
    lines = ",\n".join(json.dumps(event) for event in EVENTS).encode()
    return {
        "one line": text,
        "compact": json.dumps(document, separators=(",", ":")).encode(),
        "indented": json.dumps(document, indent=2).encode(),
        "tabs": json.dumps(document, indent="\t").encode(),
        "carriage returns": json.dumps(document, indent=1).encode().replace(b"\n", b"\r\n"),
        "not ascii": json.dumps(document, ensure_ascii=False).encode(),
        "byte order mark": b"\xef\xbb\xbf" + text,
        "sorted keys": json.dumps(document, sort_keys=True).encode(),
        "metadata behind": json.dumps({"traceEvents": EVENTS, **METADATA}).encode(),
        "metadata around": json.dumps({"a": [{"id": 1}], "traceEvents": EVENTS, **METADATA}).encode(),
        "an event each line": b'{"schemaVersion": 1, "distributedInfo": '
        + json.dumps(METADATA["distributedInfo"]).encode()
        + b', "traceEvents": [\n'
        + lines
        + b"\n]}\n",
        "blank lines": spread(text),
        "comma first": text.replace(b"}, {", b"}\n, {"),
        "trailing comma": text[:-1].replace(b'ac2g"}]', b'ac2g"},]') + b"}",
        "decimals": text.replace(b"4458676430,", b"4458676430.000,").replace(b'"dur": 3,', b'"dur": 3.000,'),
        "times as text": text.replace(b"4458676416.397", b'"4458676416.397"').replace(
            b" 12.001", b' "12.001"'
        ),
        "numbers as text": text.replace(b'"pid": 7', b'"pid": "7"').replace(
            b'"correlation": 11', b'"correlation": "11"'
        ),
        "hexadecimal": text.replace(b'"stream": 7', b'"stream": "0x7"').replace(b'"id": 11', b'"id": "0xb"'),
    }


@pytest.mark.parametrize("block_bytes", [1 << 20, 150])
@pytest.mark.parametrize("writer", writers())
def test_writers(loaded: Loaded, writer: str, block_bytes: int) -> None:
    trace = loaded(writers()[writer], block_bytes=block_bytes)
    assert rows(trace) == expected()
    assert (trace.rank, trace.world_size, trace.backend, trace.device) == (3, 8, "nccl", "cuda")
    assert trace.metadata["schemaVersion"] == 1
    assert [w.kind for w in trace.warnings if writer != "trailing comma"] == []


@pytest.mark.parametrize("end", [b"]", b"", b",", b",\n]\n"])
def test_a_bare_list_with_or_without_its_end(loaded: Loaded, end: bytes) -> None:
    trace = loaded(json.dumps(EVENTS).encode()[:-1] + end)
    assert rows(trace) == expected()
    assert trace.rank is None
    assert trace.metadata == {}


def test_gzip_of_several_members_zip_and_stdin(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = writers()["indented"]
    assert rows(loaded(text, "trace.json.gz")) == expected()
    assert rows(loaded(text, "trace.txt")) == expected()
    packed = tmp_path / "trace.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("deep/trace.json", text)
    assert rows(load(packed)) == expected()
    for data in (text, packed.read_bytes(), (tmp_path / "trace.json.gz").read_bytes()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))  # type: ignore[arg-type]
        assert rows(load("-")) == expected()
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("other.json", text)
    with pytest.raises(TraceError, match="a zip of 2 files"):
        load(packed)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1683564901540885", 1683564901540885000),
        ("1683564901540885.123", 1683564901540885123),
        ("1683564901540885.1", 1683564901540885100),
        ("1712867402348628.999", 1712867402348628999),
        ("8796093022207.999", 8796093022207999),
        ("8796093022208.001", 8796093022208001),
        ("4503599627370497.001", 4503599627370497001),
        ("0.0004", 0),
        ("0.0005", 0),
        ("0.0015", 2),
        ("1.0015", 1002),
        ("1234567.8915", 1234567892),
        ("1.5e3", 1500000),
        ("-3.25", -3250),
        ("9223372036854775.807", 2**63 - 1),
        ("-0", 0),
    ],
)
def test_times_are_exact(loaded: Loaded, text: str, ns: int) -> None:
    event = b'{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": %s, "dur": %s}' % (
        text.encode(),
        text.encode(),
    )
    trace = loaded(b'{"traceEvents": [' + b",".join([event] * 3) + b"]}")
    assert trace.ts.tolist() == [ns] * 3 == trace.dur.tolist()
    assert trace.warnings == ()


def test_a_large_time_among_small_ones_is_exact_too(loaded: Loaded) -> None:
    texts = ["12.345", "1683564901540885.123", "7", "null"]
    events = ",".join(
        f'{{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": {t}, "dur": 0.001}}' for t in texts
    )
    trace = loaded(f'{{"traceEvents": [{events}]}}'.encode(), block_bytes=64)
    assert trace.ts.tolist() == [12345, 1683564901540885123, 7000, NULL]


@pytest.mark.parametrize(
    ("written", "modern"),
    [
        ("Kernel", "kernel"), ("Memcpy", "gpu_memcpy"), ("Memset", "gpu_memset"), ("Runtime", "cuda_runtime"),
        ("Operator", "cpu_op"), ("async", "ac2g"), ("async_gpu", "ac2g"), ("async_cpu_to_gpu", "ac2g"),
        ("forward_backward", "fwdbwd"), ("KERNEL", "kernel"), ("Gpu_Memcpy", "gpu_memcpy"), ("other", "other"),
    ],
)  # fmt: skip
def test_categories_have_one_spelling(loaded: Loaded, written: str, modern: str) -> None:
    trace = loaded(
        json.dumps([{"ph": "X", "name": "a", "cat": written, "pid": 1, "tid": 1, "ts": 1, "dur": 1}]).encode()
    )
    assert trace.text("cat", 0) == modern
    assert trace.text("cat_raw", 0) == written
    assert trace.is_cat(modern).tolist() == [True]


@pytest.mark.parametrize(
    ("device", "cat", "name", "metadata"),
    [
        ("cuda", "kernel", "gemm", {}),
        ("rocm", "kernel", "gemm", {"deviceProperties": [{"name": "AMD Instinct MI300X"}]}),
        ("rocm", "cuda_runtime", "hipLaunchKernel", {}),
        ("rocm", "kernel", "gemm", {"hip_runtime_version": 60300000}),
        ("xpu", "xpu_runtime", "zeCommandListAppendLaunchKernel", {}),
        ("xpu", "kernel", "gemm", {"deviceProperties": [{"name": "Intel(R) Data Center GPU Max 1550"}]}),
        ("mtia", "mtia_runtime", "launch", {}),
        ("cpu", "cpu_op", "aten::mm", {"deviceProperties": [{"name": "NVIDIA A100"}]}),
    ],
)
def test_devices(loaded: Loaded, device: str, cat: str, name: str, metadata: dict[str, Any]) -> None:
    event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": 1, "dur": 1}
    assert loaded(json.dumps({**metadata, "traceEvents": [event]}).encode()).device == device


def test_the_frame_is_documented_and_free_to_change(loaded: Loaded) -> None:
    trace = loaded(writers()["one line"])
    frame = trace.events
    assert list(frame.columns[:8]) == ["ph", "cat", "name", "pid", "tid", "ts", "dur", "lane"]
    assert frame["ts"].tolist() == trace.ts.tolist()
    assert frame["dur"].isna().tolist() == [True, True, False, False, False, True]
    assert frame.loc[4, "name"] == 'gemm<float, "é">'
    assert frame.loc[frame["cat"] == "kernel", "correlation"].tolist() == [11]
    assert str(frame["ts"].dtype) == "Int64" and str(frame["name"].dtype) == "category"
    assert frame["input_dims"].tolist()[2] == "[[2, 3], []]"
    frame["ts"] = 0
    assert trace.ts[4] == 4458676430000
    with pytest.raises(ValueError, match="read-only"):
        trace.ts[0] = 1
