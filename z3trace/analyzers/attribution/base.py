"""What attribution says of each collective: whose parameters, issued where, used where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.phases import BACKWARD, NAMES, Phases
from z3trace.analyzers.spans import ModuleSpans
from z3trace.analyzers.steps import Steps


@dataclass(frozen=True)
class Owner:
    """Attribution of one collective. None: not known. `unit` and modules are paths, "" the model itself."""

    unit: str | None = None
    issued_in: str | None = None
    used_in: str | None = None
    used_phase: str | None = None
    reason: str | None = None
    parameters: tuple[str, ...] | None = None
    layer: str | None = None  # set where the layer is known although no name is: "repeat 3 of 6"


@dataclass(frozen=True)
class Attribution:
    """Owners of a trace's collectives, in their order, and how sure: notes name the method."""

    framework: str
    owners: tuple[Owner, ...]
    notes: tuple[str, ...] = ()
    spans: ModuleSpans | None = None  # when which module ran on the host, where the trace shows it


@dataclass(frozen=True)
class Placement:
    """When and where in the step each collective was issued: parallel to the collectives.

    `step`: index into the steps (-1 outside); `phase`: name; `micro_batch`: index in the step.
    """

    step: NDArray[np.int64]
    phase: tuple[str, ...]
    micro_batch: NDArray[np.int64]
    notes: tuple[str, ...] = field(default=())

    def with_phase(self, phases: tuple[str, ...]) -> "Placement":
        return replace(self, phase=phases)


def place(collectives: Collectives, steps: Steps, phases: Phases) -> Placement:
    """Step, phase and micro-batch of each collective by the time of its issue.

    Frameworks finish a backward after its last autograd node: a reduce-scatter between that node and what
    follows (the optimizer's own step, the next forward's first operator) is still backward's.
    """
    codes, micro = phases.at(collectives.issue_ns)
    names = [NAMES[code] for code in codes]
    if len(phases.starts):
        segment = np.searchsorted(phases.starts, collectives.issue_ns, side="right") - 1
        left_over = (segment > 0) & (collectives.issue_ns < phases.settled[np.maximum(segment, 0)])
        for k in np.flatnonzero(left_over & collectives.is_kind("reduce_scatter")).tolist():
            names[k] = BACKWARD
            micro[k] = phases.micro_batches[segment[k] - 1]
    return Placement(steps.index_at(collectives.issue_ns), tuple(names), micro)


def common_module(parameters: Sequence[str]) -> str:
    """The path of the innermost module that holds all of the parameters."""
    split = [name.split(".")[:-1] for name in parameters]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def parameters_of_units(description: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """What each unit holds, where the run's description lists its units."""
    listed = description.get("units") if description is not None else None
    return {u["name"]: tuple(u["parameters"]) for u in listed} if isinstance(listed, list) else {}
