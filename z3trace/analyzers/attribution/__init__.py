"""Which module, parameters and layer each collective belongs to, by whatever the trace and the run offer."""

from collections.abc import Mapping
from typing import Any

from z3trace.analyzers.attribution import deepspeed, fsdp, fsdp1, labelled, repetition, stacks
from z3trace.analyzers.attribution.base import Attribution, Owner, Placement, place
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.phases import Phases
from z3trace.analyzers.steps import Steps
from z3trace.analyzers.trace import Trace

__all__ = ["Attribution", "Owner", "Placement", "attribute", "framework_of", "place"]


def framework_of(trace: Trace) -> str:
    """z3trace, deepspeed, fsdp2, fsdp1, ddp or unknown, by what the trace shows."""
    if labelled.has_labels(trace):
        return "z3trace"
    version = fsdp.version_of(trace)
    if version is not None:
        return version
    names = [n for n in trace.values("name") if isinstance(n, str)]
    if any(n.startswith("PreBackwardFunctionForModule") or "ForZeroStage3" in n for n in names):
        return "deepspeed"
    if any(
        n.startswith(("DistributedDataParallel.", "torch.distributed.ddp", "torch::distributed::reducer"))
        for n in names
    ):
        return "ddp"
    return "unknown"


def attribute(
    trace: Trace,
    collectives: Collectives,
    placement: Placement,
    steps: Steps,
    phases: Phases,
    description: Mapping[str, Any] | None,
) -> tuple[Attribution, Placement]:
    """Owners of the collectives, and their placement corrected by what the framework's events say."""
    framework = framework_of(trace)
    if framework == "z3trace":
        return labelled.attribute(trace, labelled.chains(trace, collectives), placement, description)
    if framework == "fsdp2":
        return fsdp.attribute_fsdp2(trace, collectives, placement)
    if framework == "fsdp1":
        return fsdp1.attribute(trace, collectives, placement, description), placement
    if framework == "deepspeed":
        return deepspeed.attribute(trace, collectives, placement, steps, phases, description), placement
    found = stacks.attribute(framework, trace, collectives, placement)
    return found or repetition.attribute(framework, collectives, placement), placement
