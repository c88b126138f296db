"""A short run of the fuzzer of all analyses (the long one is a script: tests/analyzers/fuzz.py)."""

import importlib.util
import json
from pathlib import Path

import pytest

CASES = ("deepspeed/r0_p0_pf0_ckpt", "fsdp/fsdp1_w2", "fsdp/fsdp2_w2", "synthetic/ds_leaf_per_layer",
         "synthetic/fsdp2_healthy", "gpu/mi300_rccl_generic_ddp", "gpu/h100_python_stacks")  # fmt: skip


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("analyses_fuzz", Path(__file__).with_name("fuzz.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_damaged_traces_give_a_report_or_a_sentence(fuzz, shared_traces, tmp_path, case):
    """Whatever loads is analysed without a crash, and in every step the parts and the idle time add up."""
    path = next((shared_traces / case).glob("rank0*.json*"))
    model = shared_traces / case / "model.json"
    document = fuzz.read(path)
    description = json.loads(model.read_text()) if model.exists() else None
    crashes = [fuzz.run(document, description, seed, tmp_path) for seed in range(25)]
    assert [crash for crash in crashes if crash is not None] == []


def test_the_fuzzer_sees_a_crash(fuzz, shared_traces, tmp_path, monkeypatch):
    document = fuzz.read(shared_traces / "fsdp/fsdp2_w2/rank0.json.gz")
    monkeypatch.setattr(fuzz, "open_run", lambda paths: 1 / 0)
    assert "ZeroDivisionError" in fuzz.run(document, None, 1, tmp_path)
