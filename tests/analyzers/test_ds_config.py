"""`report --ds-config`: the settings of a run that the description of its model lacks."""

import json

import pytest

from z3trace.analyzers import analyze, open_run
from z3trace.errors import UserError


@pytest.fixture
def case(shared_traces, tmp_path):
    """(trace, model.json without settings, DeepSpeed configuration) of a recorded training."""
    folder = shared_traces / "deepspeed" / "gas4_r0_p1e4_pf8e5"
    model = json.loads((folder / "model.json").read_text())
    settings = {
        "zero_optimization": model.pop("zero_optimization"), "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True},
    }  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps(model))
    (tmp_path / "ds_config.json").write_text(json.dumps(settings))
    (tmp_path / "trace.json.gz").symlink_to(folder / "rank0.json.gz")
    return tmp_path / "trace.json.gz", tmp_path / "model.json", tmp_path / "ds_config.json"


def test_settings_complete_the_description(case):
    trace, model, config = case
    without = analyze(open_run([trace], model=model))
    assert any("not those that the schedule predicts" in note for note in without.notes)
    report = analyze(open_run([trace], model=model, config=config))
    assert any("match one for one" in note for note in report.notes)
    forward = report["gathers"].where(step=5, issued_phase="forward")
    assert len(forward) == 24
    assert all(row["parameters"] for row in forward)


def test_settings_alone_are_said_to_be_of_no_use(case):
    trace, model, config = case
    model.unlink()
    report = analyze(open_run([trace], config=config))
    assert any("of no use without a description" in note for note in report.notes)


def test_another_file_is_refused(case):
    trace, model, _ = case
    with pytest.raises(UserError, match="a zero_optimization section is expected"):
        open_run([trace], config=model)
