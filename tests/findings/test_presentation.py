"""What a reader sees of the findings: the terminal, the pages, the gate."""

import io

import pytest
from rich.console import Console

from z3trace.analyzers import analyze, open_run
from z3trace.cli import main
from z3trace.reporting.findings import known_findings, page_of
from z3trace.reporting.terminal import print_report


def shown(report):
    out = io.StringIO()
    print_report(Console(file=out, width=120), report)
    return out.getvalue()


@pytest.fixture
def runs(sim, tmp_path):
    return {
        "fragmented": sim.write_run(
            tmp_path / "a", sim.Plan(parts=6, hook=300_000, layer_elements=2_000_000)
        ),
        "healthy": sim.write_run(tmp_path / "b", sim.Plan()),
    }


def test_what_to_fix_follows_the_verdict(runs):
    text = shown(analyze(open_run([runs["fragmented"]])))
    verdict, what, anatomy = (text.index(t) for t in ("A step takes", "What to fix", "The step "))
    assert verdict < what < anatomy
    assert (
        "fragmented_all_gathers" in text and "fully_shard on whole layers" in text and " ms a step, " in text
    )


def test_silent_when_all_is_well(runs):
    text = shown(analyze(open_run([runs["healthy"]])))
    assert "What to fix" not in text and "incomplete_trace" not in text


def test_every_page_says_what_to_do_and_when_not():
    for name in known_findings():
        page = page_of(name)
        assert f"`{name}`" in page
        for heading in ("## How it looks", "## What it costs", "## What to do", "## When not"):
            assert heading in page, name


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["report", "--explain", "host_sync"], 0, "The host waits for the device"),
        (["report", "--explain", "host_sink"], 2, "did you mean host_sync?"),
        (["report"], 2, "Missing argument"),
        (["report", "{fragmented}", "--fail-on", "critical"], 1, "fragmented_all_gathers"),
        (["report", "{healthy}", "--fail-on", "warning"], 0, "A step takes"),
    ],
)
def test_explain_and_gate(runs, capfd, arguments, code, said):
    with pytest.raises(SystemExit) as exit_:
        main([a.format(**runs) for a in arguments])
    assert exit_.value.code == code
    captured = capfd.readouterr()
    assert said in captured.out + captured.err
