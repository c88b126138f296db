"""Every collective of gloo, recorded here and now: each is one row, as what it is, with its size and its time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from z3trace.analyzers.host import nearest_ancestor
from z3trace.analyzers.load import load
from z3trace.analyzers.pipeline import analyze_trace
from z3trace.analyzers.trace import NULL

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("gloo_calls.py")
WORLD = 2
FLOAT = 4
EXPECTED = {
    "coalesced all_gather": ("all_gather", 24 * WORLD * FLOAT),
    "coalesced reduce_scatter": ("reduce_scatter", 24 * WORLD * FLOAT),
    "coalesced all_reduce": ("all_reduce", 24 * FLOAT),
    "all_gather": ("all_gather", 4 * WORLD * FLOAT),
    "reduce_scatter": ("reduce_scatter", 4 * WORLD * FLOAT),
    "list all_gather": ("all_gather", 4 * WORLD * FLOAT),
    "list reduce_scatter": ("reduce_scatter", 4 * WORLD * FLOAT),
    "functional all_gather": ("all_gather", 4 * WORLD * FLOAT),
    "functional coalesced all_gather": ("all_gather", 24 * WORLD * FLOAT),
    "functional reduce_scatter": ("reduce_scatter", 4 * WORLD * FLOAT),
    "functional coalesced reduce_scatter": ("reduce_scatter", 24 * WORLD * FLOAT),
    "functional all_reduce": ("all_reduce", 4 * FLOAT),
    "all_to_all": ("all_to_all", 4 * WORLD * FLOAT),
    "list all_to_all": ("all_to_all", 4 * WORLD * FLOAT),
    "broadcast": ("broadcast", 8 * FLOAT),
    "barrier": ("barrier", 0),
    "monitored barrier": ("barrier", 0),
    "message": ("send_recv", 4 * FLOAT),
    "reduce": ("other", 4 * FLOAT),
    "gather": ("other", 4 * FLOAT),
    "scatter": ("other", 4 * FLOAT),
    "all_reduce": ("all_reduce", 12 * WORLD * FLOAT),
}


def record(folder, **environment):
    command = [sys.executable, str(SCRIPT)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(folder / "store"), str(folder / f"rank{rank}.json")],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    return analyze_trace(load(folder / "rank0.json"), 0)


def by_call(analysis):
    """Call -> the collectives that were issued in it, by index."""
    trace, issued = analysis.trace, analysis.collectives.issue_row
    around = nearest_ancestor(trace, issued, trace.named(lambda name: name.startswith("call ")))
    found = {}
    for k, row in enumerate(around.tolist()):
        found.setdefault(trace.name_of(row).removeprefix("call ") if issued[k] >= 0 else None, []).append(k)
    return found


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_each_call_is_one_collective(tmp_path, level):
    analysis = record(tmp_path, TORCH_DISTRIBUTED_DEBUG=level)
    found = by_call(analysis)
    assert {call: len(members) for call, members in found.items()} == dict.fromkeys(EXPECTED, 1)
    collectives = analysis.collectives
    assert {
        call: (collectives.kind[k], int(collectives.bytes[k])) for call, (k,) in found.items()
    } == EXPECTED
    untimed = {call for call, (k,) in found.items() if collectives.start[k] == NULL}
    assert untimed == {"message", "monitored barrier"}
    assert all((collectives.end[k] > collectives.start[k] >= collectives.issue_ns[k]) == (call not in untimed)
               for call, (k,) in found.items())  # fmt: skip
    assert (collectives.world == WORLD).all()
    said = [note for note in analysis.notes if "TORCH_DISTRIBUTED_DEBUG" in note]
    assert len(said) == (level == "DETAIL")
