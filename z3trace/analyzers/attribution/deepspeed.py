"""Attribution of DeepSpeed ZeRO-3's gathers by the autograd functions that its hooks leave in any trace."""

from collections.abc import Mapping
from typing import Any

from z3trace.analyzers.attribution import repetition
from z3trace.analyzers.attribution.base import Attribution, Placement
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.phases import Phases
from z3trace.analyzers.trace import Trace


def attribute(
    trace: Trace,
    collectives: Collectives,
    placement: Placement,
    phases: Phases,
    description: Mapping[str, Any] | None,
) -> tuple[Attribution, Placement]:
    return repetition.attribute("deepspeed", collectives, placement), placement
