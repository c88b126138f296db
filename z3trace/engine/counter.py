"""What the engine really sent, counted where it is sent and without the profiler."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from z3trace.engine.schedule.interface import Phase

KEPT_STEPS = 256
"""Steps whose rows are kept; older ones are dropped so that long trainings stay small."""


@dataclass
class Progress:
    """Where the training is. `step` counts optimizer steps, `micro_batch` backwards since the last one."""

    step: int = 0
    micro_batch: int = 0
    phase: Phase = Phase.OTHER


class _Key(NamedTuple):
    step: int
    micro_batch: int
    phase: str
    kind: str
    unit: str
    module: str
    reason: str


class CollectiveCounter:
    """Counts collectives by step, micro-batch, phase, kind, unit, issuing module and reason.

    Bytes of an all-gather are those of its output, of a reduce-scatter those of its input, both with the
    padding as really sent.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rows: dict[_Key, list[int]] = {}
        self._first_kept = 0

    def add(self, kind: str, size: int, *, phase: Phase, unit: str, module: str, reason: str) -> None:
        at = self._progress
        key = _Key(at.step, at.micro_batch, phase.value, kind, unit, module, reason)
        row = self._rows.get(key)
        if row is None:
            if at.step >= self._first_kept + 2 * KEPT_STEPS:
                self._first_kept = at.step - KEPT_STEPS
                self._rows = {k: v for k, v in self._rows.items() if k.step >= self._first_kept}
            self._rows[key] = [1, size]
        else:
            row[0] += 1
            row[1] += size

    def rows(self) -> list[dict[str, Any]]:
        """One row per distinct combination in order of first appearance, with `count` and `bytes`."""
        return [{**key._asdict(), "count": row[0], "bytes": row[1]} for key, row in self._rows.items()]

    def totals(self, step: int | None = None) -> dict[tuple[str, str], dict[str, int]]:
        """`count` and `bytes` by (phase, kind), of one step or of all that are kept."""
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for key, (count, size) in self._rows.items():
            if step is None or key.step == step:
                counts[key.phase, key.kind] += count
                sizes[key.phase, key.kind] += size
        return {key: {"count": counts[key], "bytes": sizes[key]} for key in counts}
