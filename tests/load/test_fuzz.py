"""A short run of the fuzzer (the long one is a script: tests/load/fuzz.py)."""

from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.slow
def test_mutated_traces(shared_traces: Path, fuzz: ModuleType) -> None:
    assert fuzz.run(fuzz.bases(shared_traces), count=600, seed=20) == []


def test_the_fuzzer_sees_a_lost_event(shared_traces: Path, fuzz: ModuleType) -> None:
    text = b'{"traceEvents": [{"ph": "X", "ts": 1}, {"ph": "X", "ts": 2}, {"ph": "X", "ts": 3}]}'
    original = fuzz.base("small", text)
    assert len(original.rows) == 3
    start, end = original.spans[1]
    two_lost = fuzz.Damage("test", text[:start] + text[original.spans[2][1] :], (start, end))
    assert (
        fuzz.check(original, two_lost, 1 << 20, False)
        == "of 1 events behind the damage one is lost or changed"
    )
    changed = fuzz.Damage("test", text.replace(b'"ts": 1', b'"ts": 5'), (start, end))
    assert (
        fuzz.check(original, changed, 1 << 20, False)
        == "of 1 events before the damage one is lost or changed"
    )
