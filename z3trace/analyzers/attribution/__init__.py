"""Which module, parameters and layer each collective belongs to, by whatever the trace and the run offer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from z3trace.analyzers.attribution import deepspeed, fsdp, fsdp1, labelled, repetition, stacks
from z3trace.analyzers.attribution.base import Attribution, Owner, Placement, place
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.phases import Phases
from z3trace.analyzers.steps import Steps
from z3trace.analyzers.trace import Trace

__all__ = ["Attribution", "Owner", "Placement", "attribute", "framework_of", "place"]


FRAMEWORKS = ("z3trace", "deepspeed", "fsdp2", "fsdp1", "ddp")


def framework_of(trace: Trace) -> str:
    """z3trace, deepspeed, fsdp2, fsdp1, ddp or unknown, by what the recorder says or else the trace shows."""
    told = trace.metadata.get("z3trace")
    if isinstance(told, Mapping) and told.get("framework") in FRAMEWORKS:
        return str(told["framework"])
    version = fsdp.version_of(trace)
    if version is not None:
        return version
    names = [n for n in trace.values("name") if isinstance(n, str)]
    if any(n.startswith("PreBackwardFunctionForModule") or "ForZeroStage3" in n for n in names):
        return "deepspeed"
    if labelled.has_labels(trace):
        return "z3trace"
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
    """Owners of the collectives, and their placement corrected by what the framework's events say.

    The recorder's labels are believed first; what they leave open is asked of the framework's own events.
    """
    framework = framework_of(trace)
    if framework == "fsdp2":  # its own ranges say what labels would
        return fsdp.attribute_fsdp2(trace, collectives, placement, description)
    if not labelled.has_labels(trace):
        return _unlabelled(framework, trace, collectives, placement, steps, phases, description), placement
    labels = labelled.chains(trace, collectives)
    found, placed = labelled.attribute(trace, collectives, labels, placement, description, framework)
    gathers = np.flatnonzero(collectives.is_kind("all_gather")).tolist()
    if framework != "z3trace" and any(found.owners[k].unit is None for k in gathers):
        other = _unlabelled(framework, trace, collectives, placement, steps, phases, description)
        owners = tuple(
            owner if owner.unit is not None else instead
            for owner, instead in zip(found.owners, other.owners, strict=True)
        )
        found = replace(found, owners=owners, notes=(*found.notes, *other.notes), spans=other.spans)
    elif framework == "deepspeed":
        found = replace(found, spans=deepspeed.module_spans(trace, steps, phases, description))
    return found, placed


def _unlabelled(
    framework: str,
    trace: Trace,
    collectives: Collectives,
    placement: Placement,
    steps: Steps,
    phases: Phases,
    description: Mapping[str, Any] | None,
) -> Attribution:
    if framework == "deepspeed":
        return deepspeed.attribute(trace, collectives, placement, steps, phases, description)
    if framework == "fsdp1":
        return fsdp1.attribute(trace, collectives, placement, description)
    found = stacks.attribute(framework, trace, collectives, placement)
    return found or repetition.attribute(framework, collectives, placement)
