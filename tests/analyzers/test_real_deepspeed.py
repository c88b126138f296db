"""Real DeepSpeed trainings of a Llama: each gather's issuing module beside what DeepSpeed itself was called for."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from z3trace.analyzers.load import load
from z3trace.analyzers.pipeline import analyze_trace

SCRIPT = Path(__file__).with_name("deepspeed_run.py")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("deepspeed", "transformers")),
        reason="DeepSpeed and transformers are not installed",
    ),
]
# Settings that predict other gathers, so that only the hooks in the trace can tell.
OTHER = {"stage": 3, "stage3_prefetch_bucket_size": 123, "stage3_max_reuse_distance": 777,
         "stage3_max_live_parameters": 1}  # fmt: skip


@pytest.fixture(scope="module", params=["plain", "prefetch", "checkpoint", "checkpoint-reentrant"])
def run(request, tmp_path_factory):
    """(mode, trace, description, issuing modules of the last step's gathers)."""
    folder = tmp_path_factory.mktemp(request.param)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port), str(folder), request.param],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=280)  # the first run compiles DeepSpeed's own collectives
            assert process.returncode == 0, errors[-2000:]
    finally:
        for process in ranks:
            process.kill()
    log = json.loads((folder / "truth.json").read_text())
    description = json.loads((folder / "model.json").read_text())
    last = [module for step, module in log if step == log[-1][0]]
    return request.param, load(folder / "rank0.json"), description, last


def gathers_of_last_step(trace, description):
    analysis = analyze_trace(trace, 0, description=description)
    number = analysis.steps.steps[-1].number
    owners = [
        analysis.attribution.owners[k]
        for k in range(len(analysis.collectives))
        if analysis.step_number(k) == number
        and analysis.collectives.kind[k] == "all_gather"
        and analysis.placement.phase[k] in ("forward", "backward")
    ]
    return analysis, owners


def test_the_schedule_names_every_gather(run):
    mode, trace, description, wanted = run
    analysis, owners = gathers_of_last_step(trace, description)
    assert "match one for one" in analysis.attribution.notes[0]
    assert [owner.issued_in for owner in owners] == wanted
    recomputed = [owner.reason for owner in owners].count("recompute")
    # All that a layer owns is in nine modules; the last one is still there when it is computed again.
    assert recomputed == {"checkpoint": 3 * 8, "checkpoint-reentrant": 3 * 9}.get(mode, 0)


def test_the_hooks_place_every_gather(run):
    mode, trace, description, wanted = run
    _, owners = gathers_of_last_step(trace, description | {"zero_optimization": OTHER})
    placed = [owner.issued_in for owner in owners]
    if mode == "prefetch":
        # Calls with keyword arguments only leave no entry: their gathers are given to the call that follows.
        inside = {"": "model.embed_tokens", "model": "model.embed_tokens"}
        wanted = [
            inside.get(path, path + ".q_proj" if path.endswith("self_attn") else path) for path in wanted
        ]
    assert placed == wanted
