"""Every shared trace loads, with its rank, its links and no warning."""

from pathlib import Path

import pytest

from z3trace.analyzers.inputs import open_run
from z3trace.analyzers.trace import NULL

FOLDERS = ("deepspeed/default", "fsdp/fsdp2_w4", "gpu/a100_megatron_tp8", "synthetic/fsdp1_old_format")


@pytest.mark.parametrize(("folder", "ranks"), zip(FOLDERS, (2, 4, 8, 2), strict=True))
def test_a_folder_of_ranks_is_a_run(shared_traces: Path, folder: str, ranks: int) -> None:
    run = open_run([shared_traces / folder])
    assert run.ranks == tuple(range(ranks))
    assert run.notes == []
    assert all((trace.ts[trace.is_phase("X")] != NULL).all() for trace in run.traces)
