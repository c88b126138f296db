"""Attribution of DeepSpeed ZeRO-3's gathers, in any trace that it leaves.

With a description of the model and its settings, the schedule predicts every gather; where the predicted
sizes are those of the trace, in their order, the prediction names the gathers. What a description need not
say (activation checkpointing, leaf modules set by the script) is tried in turn. Otherwise, and without a
description, the autograd functions that DeepSpeed's hooks run tell in which call a gather was issued.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers.attribution import brackets, repetition
from z3trace.analyzers.attribution.base import Attribution, Owner, Placement, common_module
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.layers import LayerNames
from z3trace.analyzers.phases import Phases
from z3trace.analyzers.spans import ModuleSpans
from z3trace.analyzers.steps import Steps
from z3trace.analyzers.trace import NULL, Trace
from z3trace.engine.schedule.calls import CallFacts
from z3trace.engine.schedule.deepspeed import DeepSpeedSchedule
from z3trace.engine.schedule.interface import Gather, Model, Wait
from z3trace.engine.schedule.model_file import Description, dtype_name, parse_description
from z3trace.engine.schedule.predict import drive, predict, training_of
from z3trace.engine.schedule.recorder import ScheduleError
from z3trace.errors import UserError

# Enough steps for the schedule to be past recording: the last one is like every later one.
_STEPS = 3
_GATHER_PHASES = ("forward", "backward", "optimizer")
Integers = NDArray[np.int64]
Slot = tuple[int, str]  # micro-batch, phase


@dataclass(frozen=True)
class _Predicted:
    size: int
    owner: Owner


def attribute(
    trace: Trace,
    collectives: Collectives,
    placement: Placement,
    steps: Steps,
    phases: Phases,
    data: Mapping[str, Any] | None,
) -> Attribution:
    """Owners of the collectives of a DeepSpeed trace; `data` is a model.json's content."""
    gathers = _of_parameters(trace, collectives)
    hooks = brackets.find_hooks(trace, steps, phases)
    notes: list[str] = []
    if data is not None and "modules" in data and "parameters" in data:
        try:
            description = _completed(parse_description(data), data, collectives, placement)
        except UserError as error:
            notes.append(f"the description of the model cannot be used: {error}")
        else:
            found = _by_schedule(collectives, placement, gathers, hooks, description)
            if found is not None:
                calls = brackets.find_calls(hooks, description)
                return replace(
                    found, spans=brackets.module_spans(hooks, calls) if calls and calls.named else None
                )
            levels = [members for _, members in _repeated_levels(description.model)]
            found = brackets.attribute(trace, collectives, placement, hooks, description, levels)
            if found is not None:
                return replace(found, notes=(*found.notes, _MISMATCH))
            notes.append(_MISMATCH)
    found = brackets.attribute(trace, collectives, placement, hooks, None, ())
    if found is None:
        found = repetition.attribute("deepspeed", collectives, placement)
    return replace(found, notes=(*notes, *found.notes))


def module_spans(
    trace: Trace, steps: Steps, phases: Phases, data: Mapping[str, Any] | None
) -> ModuleSpans | None:
    """When which module of the described model ran; None where the description does not do."""
    try:
        description = parse_description(data or {})
    except UserError:
        return None
    hooks = brackets.find_hooks(trace, steps, phases)
    calls = brackets.find_calls(hooks, description)
    return brackets.module_spans(hooks, calls) if calls and calls.named else None


_MISMATCH = "the gathers are not those that the schedule predicts from the described model and settings"


def _of_parameters(trace: Trace, collectives: Collectives) -> Integers:
    """All-gathers that may fetch parameters. Those of lists are a script's own: metrics, objects, losses."""
    gathers = np.flatnonzero(collectives.is_kind("all_gather"))
    lists = trace.named({"c10d::allgather_"})
    rows = collectives.issue_row[gathers]
    of_list = (rows >= 0) & lists[np.maximum(rows, 0)]
    return gathers if of_list.all() else gathers[~of_list]


def _gathers_by_step(gathers: Integers, placement: Placement) -> dict[int, dict[Slot, list[int]]]:
    """Step index -> (micro-batch, phase) -> the gathers issued there, in order."""
    steps: dict[int, dict[Slot, list[int]]] = defaultdict(lambda: defaultdict(list))
    for k in gathers.tolist():
        if placement.step[k] >= 0 and placement.phase[k] in _GATHER_PHASES:
            steps[int(placement.step[k])][int(placement.micro_batch[k]), placement.phase[k]].append(k)
    return steps


def _completed(
    description: Description, data: Mapping[str, Any], collectives: Collectives, placement: Placement
) -> Description:
    """What the description leaves open, taken from the trace: element type and accumulation steps."""
    if "gradient_accumulation_steps" not in data:
        micro_batches = [
            int(m) for m, s, p in zip(placement.micro_batch, placement.step, placement.phase, strict=True)
            if s >= 0 and p in ("forward", "backward")
        ]  # fmt: skip
        description = replace(description, gradient_accumulation_steps=max(micro_batches, default=0) + 1)
    dtypes = {
        d for d, kind in zip(collectives.dtype, collectives.kind, strict=True) if d and kind == "all_gather"
    }
    if "dtype" not in data and len(dtypes) == 1:
        name = dtype_name(dtypes.pop().removeprefix("c10::"), "trace")
        parts = tuple(replace(part, dtype=name) for part in description.model.partitions)
        description = replace(description, model=replace(description.model, partitions=parts))
    return description


def _by_schedule(
    collectives: Collectives,
    placement: Placement,
    gathers: Integers,
    hooks: brackets.Hooks,
    base: Description,
) -> Attribution | None:
    steps = _gathers_by_step(gathers, placement)
    if not steps:
        return None
    owners = [Owner()] * len(collectives)
    left = dict(steps)
    assumptions: list[str] = []
    for assumption, description in _variants(base, hooks):
        predicted = _predicted(description)
        if predicted is None:
            continue
        for step, slots in list(left.items()):
            if _matches(collectives, slots, predicted):
                for slot, members in slots.items():
                    for k, expected in zip(members, predicted[slot], strict=True):
                        owners[k] = expected.owner
                del left[step]
                assumptions.append(assumption)
        if not left:
            break
    if left:
        return None
    said = "".join(f" ({a})" for a in dict.fromkeys(assumptions) if a)
    note = f"gathers are named by DeepSpeed's schedule, whose prediction they match one for one{said}"
    return Attribution("deepspeed", tuple(owners), (note,))


def _matches(
    collectives: Collectives, slots: Mapping[Slot, list[int]], predicted: Mapping[Slot, list[_Predicted]]
) -> bool:
    if {slot for slot, members in slots.items() if members} != {slot for slot, p in predicted.items() if p}:
        return False
    return all(
        len(members) == len(predicted[slot])
        and all(
            collectives.bytes[k] in (expected.size, NULL)
            for k, expected in zip(members, predicted[slot], strict=True)
        )
        for slot, members in slots.items()
    )


def _variants(base: Description, hooks: brackets.Hooks) -> Iterator[tuple[str, Description]]:
    """The description, and the same with what scripts do to a model without saying so, likeliest first."""
    checkpointing: list[tuple[str, CallFacts]] = [("", base.facts)]
    levels = _repeated_levels(base.model)
    if hooks.recomputed and not (base.facts.checkpointed or base.facts.checkpointed_bodies):
        facts = replace(base.facts, reentrant=hooks.reentrant)
        checkpointing = [
            (f"activation checkpointing of {name}", variant)
            for name, members in levels
            for variant in (
                replace(facts, checkpointed=frozenset(members)),
                replace(facts, checkpointed_bodies=frozenset(members)),
            )
        ]
    leaves: list[tuple[str, tuple[str, ...], bool]] = [("", (), False)]
    leaves += [(f"{name} are leaves, set after initialize", members, True) for name, members in levels]
    leaves += [(f"{name} are leaves", members, False) for name, members in levels]
    for leaf_note, members, after in leaves:
        for facts_note, facts in checkpointing:
            description = replace(base, facts=facts)
            if members and after:
                description = replace(description, leaves_after=members)
            elif members:
                description = replace(description, leaves=members)
            yield ", ".join(note for note in (facts_note, leaf_note) if note), description


def _repeated_levels(model: Model) -> list[tuple[str, tuple[str, ...]]]:
    """The model's repeated modules that have modules inside, by level: `blocks.*`, `blocks.*.mlp`, …"""
    names = LayerNames(module.path for module in model.modules)
    levels: dict[str, list[str]] = defaultdict(list)
    for module in model.modules:
        layer = names.layer_of(module.path)
        if module.children and module.path and layer != "root":
            stack = layer.rpartition(".")[0]
            levels[f"{stack}.*{module.path[len(layer) :]}"].append(module.path)
    return [(name, tuple(members)) for name, members in levels.items() if len(members) > 1]


def _predicted(description: Description) -> dict[Slot, list[_Predicted]] | None:
    """The gathers of a step in the steady state, by micro-batch and phase; None when it cannot be driven."""
    last = _STEPS - 1
    try:
        sizes = [p for p in predict(description, _STEPS) if p.kind.value == "all_gather" and p.step == last]
        uses = [(g, at) for g, at, step in _first_uses(description) if step == last]
    except ScheduleError:
        return None
    slots: dict[Slot, list[_Predicted]] = defaultdict(list)
    for prediction, (_, use) in zip(sizes, uses, strict=True):
        owner = Owner(
            unit=common_module(prediction.partitions),
            issued_in=prediction.module,
            used_in=use[0] if use else None,
            used_phase=use[1] if use else None,
            reason=prediction.reason,
            parameters=prediction.partitions,
        )
        phase = prediction.phase.value
        micro_batch = 0 if phase == "optimizer" else prediction.micro_batch
        slots[micro_batch, phase].append(_Predicted(prediction.bytes, owner))
    return slots


def _first_uses(description: Description) -> list[tuple[Gather, tuple[str, str] | None, int]]:
    """Each gather with the (module, phase) that first waits for it, and its step."""
    schedule = DeepSpeedSchedule(
        description.model, description.settings, leaves=description.leaves,
        leaves_after=description.leaves_after, autocast_dtypes=description.autocast_dtypes,
    )  # fmt: skip
    gathers: list[tuple[Gather, tuple[str, str] | None, int]] = []
    open_for: dict[str, list[int]] = defaultdict(list)
    for answer in drive(schedule, training_of(description, _STEPS)):
        if isinstance(answer.action, Gather) and answer.action.collective.value == "all_gather":
            for name in answer.action.partitions:
                open_for[name].append(len(gathers))
            gathers.append((answer.action, None, answer.step))
        elif isinstance(answer.action, Wait):
            for name in answer.action.partitions:
                for k in open_for.pop(name, ()):
                    gather, use, step = gathers[k]
                    gathers[k] = (gather, use or (answer.action.module, answer.phase.value), step)
    return gathers
