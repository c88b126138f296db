"""On traces with whole microseconds HTA parses the same events (where it is installed)."""

import collections
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from z3trace.analyzers.load import load
from z3trace.analyzers.trace import NULL, Trace

WHOLE_MICROSECONDS = (
    "gpu/a100_megatron_tp8/rank0",
    "gpu/cuda_event_sync/rank0",
    "gpu/h800_deepep/rank0",
    "gpu/old_category_names_2of128/rank0",
    "gpu/old_category_names_2of128/rank1",
    "gpu/v100_dlrm_8rank/rank3",
    "synthetic/fsdp1_old_format/rank0",
)


@pytest.mark.parametrize("file", WHOLE_MICROSECONDS)
def test_hta_reads_the_same_spans(shared_traces: Path, file: str) -> None:
    parser = pytest.importorskip("hta.common.trace_parser", reason="HTA is not installed")
    from hta.configs.parser_config import ParserConfig

    path = shared_traces / f"{file}.json.gz"
    logging.disable(logging.CRITICAL)
    try:
        _, frame, symbols = parser.parse_trace_dataframe(str(path), ParserConfig.get_default_cfg())
    finally:
        logging.disable(logging.NOTSET)
    names = symbols.get_sym_table()
    theirs = collections.Counter(
        (names[name], names[cat], str(pid), str(tid), ts, dur, stream, correlation)
        for name, cat, pid, tid, ts, dur, stream, correlation in zip(
            *(frame[c] for c in ("name", "cat", "pid", "tid", "ts", "dur", "stream", "correlation")),
            strict=True,
        )
    )
    assert len(frame) > 40
    assert theirs == _spans(load(path))


def _spans(trace: Trace) -> "collections.Counter[tuple[Any, ...]]":
    """What HTA keeps: spans with a category, but not the one of the profiler itself; µs, -1 for absent."""
    rows = np.flatnonzero(trace.is_phase("X") & (trace.dur != NULL) & ~trace.is_cat("trace"))
    assert not (trace.ts[rows] % 1000).any() and not (trace.dur[rows] % 1000).any()
    stream, correlation = (
        np.where(v == NULL, -1, v) for v in (trace.ints("stream"), trace.ints("correlation"))
    )
    return collections.Counter(
        (
            trace.name_of(row),
            trace.text("cat_raw", row),
            trace.text("pid", row),
            trace.text("tid", row),
            trace.ts[row] // 1000,
            math.floor(trace.dur[row] / 1000),
            stream[row],
            correlation[row],
        )
        for row in rows.tolist()
    )
