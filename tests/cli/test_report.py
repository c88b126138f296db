"""`z3trace report` as a user runs it."""

import gzip
import json
import os
import subprocess
import sys

import pytest


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "z3trace", "report", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, **options,
    )  # fmt: skip


@pytest.fixture
def bad_inputs(tmp_path):
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "other.json").write_text('{"hello": [1, 2]}')
    (tmp_path / "null.json").write_text('{"traceEvents": null}')
    (tmp_path / "utf16.json").write_text('{"traceEvents": []}', encoding="utf-16")
    (tmp_path / "nothing").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.json", "no such file"),
        ("missing/*.json", "nothing matches"),
        ("empty.json", "empty"),
        ("other.json", "not a trace"),
        ("null.json", "traceEvents"),
        ("utf16.json", "UTF-16"),
        ("nothing", "no traces"),
    ],
)
def test_unusable_input_is_one_line_and_exit_2(bad_inputs, name, says):
    result = run(bad_inputs / name)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert name in result.stderr
    assert says in result.stderr


def test_output_must_be_a_format_it_knows(shared_traces, tmp_path):
    trace = shared_traces / "fsdp" / "fsdp2_w2"
    result = run(trace, "-o", tmp_path / "report.docx")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert ".json" in result.stderr
    result = run(trace, "-o", tmp_path / "absent" / "report.json")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "does not exist" in result.stderr


@pytest.mark.parametrize(
    "option", [("--ranks", "0-"), ("--ranks", "7"), ("--comm-kernels", "("), ("--rank-regex", "x")]
)
def test_wrong_options_are_one_line_and_exit_2(shared_traces, option):
    result = run(shared_traces / "fsdp" / "fsdp2_w2", *option)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr


def test_json_has_the_schema(shared_traces, tmp_path):
    output = tmp_path / "report.json"
    result = run(shared_traces / "deepspeed" / "r0_p0_pf0", "-o", output)
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(output.read_text())
    assert report["schema"] == "z3trace.report/1"
    tables = ("whole_trace", "steps", "collectives", "layers", "gathers", "idle", "ranks", "findings",
              "recommendations", "notes")  # fmt: skip
    assert all(isinstance(report[name], list) for name in tables)
    assert report["trace"]["framework"] == "deepspeed"
    assert report["trace"]["steps_used"] == [5]
    rows = [r for r in report["collectives"] if (r["rank"], r["step"]) == (1, 5)]
    assert {(r["phase"], r["kind"]): (r["count"], r["bytes"]) for r in rows} == {
        ("forward", "all_gather"): (38, 10_501_120),
        ("backward", "all_gather"): (38, 10_501_120),
        ("backward", "reduce_scatter"): (1, 10_501_120),
        ("optimizer", "all_reduce"): (1, 8),
    }
    assert len(list(tmp_path.iterdir())) == 1, "temporary files left behind"


def test_terminal_report_fits_80_columns_when_piped(shared_traces):
    for case in (
        "deepspeed/r0_p0_pf0",
        "synthetic/ds_leaf_per_layer",
        "gpu/a100_megatron_tp8",
        "gpu/cuda_event_sync",
    ):
        result = run(shared_traces / case, env={**os.environ, "COLUMNS": "80"})
        assert (result.returncode, result.stderr) == (0, "")
        assert max(map(len, result.stdout.splitlines())) <= 80
        assert "\x1b" not in result.stdout


def test_a_trace_from_stdin_and_a_choice_of_ranks(shared_traces, tmp_path):
    folder = shared_traces / "fsdp" / "fsdp2_w2"
    output = tmp_path / "report.json"
    with gzip.open(folder / "rank1.json.gz", "rt") as text:
        assert run("-", "-o", output, input=text.read()).returncode == 0
    assert json.loads(output.read_text())["trace"]["ranks"] == [1]
    assert run(folder, "--ranks", "1", "-o", output).returncode == 0
    assert json.loads(output.read_text())["trace"]["ranks"] == [1]


def test_reporting_imports_neither_torch_nor_pandas(shared_traces):
    code = (
        "import sys; from z3trace.cli import main\n"
        "try: main(['report', sys.argv[1]])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sorted({'torch', 'pandas', 'plotly'} & sys.modules.keys()), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, str(shared_traces / "fsdp" / "fsdp2_w2")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "[]\n")
