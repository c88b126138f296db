"""What a finding is, and how it is weighed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from z3trace.analyzers.findings import thresholds as th

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or that the reader should know.

    `cost_ns`: what a step would be shorter by without it (None: it has no cost that can be told). `severity`
    None: by cost. `settings`: what to change, each a setting with its value or a line of code.
    """

    id: str
    title: str
    cost_ns: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[str] = ()
    severity: Severity | None = None

    def row(self, step_ns: float) -> dict[str, Any]:
        """The finding's row in the findings table."""
        return {
            "id": self.id,
            "severity": self.severity or severity_of(self.cost_ns, step_ns),
            "title": self.title,
            "evidence": dict(self.evidence),
            "cost_ns_per_step": None if self.cost_ns is None else round(self.cost_ns),
            "settings": list(self.settings),
        }


def severity_of(cost_ns: float | None, step_ns: float) -> Severity:
    """Severity by cost against the step; without a cost or a step it is info."""
    if not cost_ns or step_ns <= 0:
        return "info"
    fraction = cost_ns / step_ns
    if fraction >= th.CRITICAL_FRACTION:
        return "critical"
    return "warning" if fraction >= th.WARNING_FRACTION else "info"


@dataclass(frozen=True)
class Settings:
    """The same advice in each framework's words."""

    deepspeed: tuple[str, ...] = ()
    fsdp2: tuple[str, ...] = ()
    fsdp1: tuple[str, ...] = ()
    z3trace: tuple[str, ...] | None = None

    def of(self, framework: str) -> tuple[str, ...]:
        """In one framework's words; in all of them where it is not known. z3trace takes DeepSpeed's keys."""
        own = self.deepspeed if self.z3trace is None else self.z3trace
        words = {"deepspeed": self.deepspeed, "fsdp2": self.fsdp2, "fsdp1": self.fsdp1, "z3trace": own}
        if framework in words:
            return words[framework]
        return tuple(dict.fromkeys((*self.deepspeed, *self.fsdp2, *self.fsdp1)))
