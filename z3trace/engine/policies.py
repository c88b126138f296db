"""The two policies: what each shards together, decides with, and wants to hear of."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from z3trace.engine.config import ZeroConfig
from z3trace.engine.layout import PartitionPlan, describe_model, plan_parameters, plan_units
from z3trace.engine.schedule.deepspeed import DeepSpeedSchedule
from z3trace.engine.schedule.interface import Schedule
from z3trace.engine.schedule.layerwise import LayerwiseSchedule
from z3trace.engine.schedule.settings import LeafModules
from z3trace.engine.schedule.structure import leaf_modules


@dataclass(frozen=True)
class Policy:
    """`needs` maps each module to hook to the partitions that its forward reads.

    `exact` hooks put autograd nodes around modules, as DeepSpeed does, so that events come in its order.
    `persistent` partitions stay gathered between steps.
    """

    plans: tuple[PartitionPlan, ...]
    needs: Mapping[str, tuple[str, ...]]
    schedule: Schedule
    exact: bool
    persistent: frozenset[str] = frozenset()


def make_policy(
    model: nn.Module, config: ZeroConfig, group_of: Mapping[int, int], dtype: torch.dtype
) -> Policy:
    """The policy of the configuration. `group_of`: see `plan_units`."""
    return (_deepspeed if config.z3trace.schedule == "deepspeed" else _layerwise)(
        model, config, group_of, dtype
    )


def _layerwise(
    model: nn.Module, config: ZeroConfig, group_of: Mapping[int, int], dtype: torch.dtype
) -> Policy:
    own = config.z3trace
    layout = plan_units(model, own.unit, own.unit_classes, group_of)
    seen = describe_model(model, layout.partitions, dtype)
    schedule = LayerwiseSchedule(seen, layout.needs, own.prefetch)
    return Policy(layout.partitions, {"": (), **layout.needs}, schedule, exact=False)


def _deepspeed(
    model: nn.Module, config: ZeroConfig, group_of: Mapping[int, int], dtype: torch.dtype
) -> Policy:
    plans = plan_parameters(model)
    # Set by deepspeed.utils.set_z3_leaf_modules, which scripts for DeepSpeed call before initialize.
    leaves = [path for path, module in model.named_modules() if getattr(module, "_z3_leaf", False)]
    seen = describe_model(model, plans, dtype)
    leaves_after = leaf_modules(seen, LeafModules(classes=config.z3trace.leaf_classes_after))
    schedule = DeepSpeedSchedule(seen, config.zero_optimization, leaves=leaves, leaves_after=leaves_after)
    structure = schedule.structure
    needs = {
        path: structure.below(path) if path in structure.leaves else structure.direct(path)
        for path in structure.modules
        if path in structure.hooked
    }
    return Policy(plans, needs, schedule, exact=True, persistent=frozenset(structure.persistent))
