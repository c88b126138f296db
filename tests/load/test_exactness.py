"""Every column of every shared trace equals the slow reference, whatever the block size."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from z3trace.analyzers.load import load

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
FILES = sorted(str(path.relative_to(SHARED)) for path in SHARED.glob("*/*/rank*.json.gz"))
QUICK = {
    "deepspeed/default/rank0.json.gz",
    "gpu/amd_mi250/rank0.json.gz",
    "gpu/cuda_event_sync/rank0.json.gz",
    "gpu/old_category_names_2of128/rank1.json.gz",
    "synthetic/fsdp1_old_format/rank0.json.gz",
}


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=() if file in QUICK else pytest.mark.slow) for file in FILES]
)
def test_every_column_equals_the_reference(shared_traces: Path, slow: ModuleType, file: str) -> None:
    columns, metadata = slow.reference(slow.unpacked(shared_traces / file))
    for block_bytes in (1 << 16, 1 << 20):
        trace = load(shared_traces / file, block_bytes=block_bytes)
        assert slow.differences(trace, columns, metadata) == []
        assert trace.warnings == ()


def test_a_rounding_that_is_nearly_right_would_be_caught(shared_traces: Path, slow: ModuleType) -> None:
    """Times of this file are so large that rounding the double itself is wrong for many events."""
    file = shared_traces / "gpu/a100_ddp_nccl_metadata/rank0.json.gz"
    events = json.loads(slow.unpacked(file))["traceEvents"]
    naive = np.rint(np.array([event["ts"] for event in events]) * 1000)
    assert np.count_nonzero(naive != load(file).ts) > 1000
