"""FSDP2 (`fully_shard`): its own ranges name the units; their parameters and policies are told beside them."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

FRAMEWORK = "fsdp2"
_MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"


def distributes(model: "nn.Module") -> bool:
    return next(_states(model), None) is not None


def describe(model: "nn.Module") -> dict[str, Any]:
    """`units`: what one all-gather fetches, under the name that FSDP2's ranges carry, with the policies.

    The names are complete from the first forward on.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units, seen = [], set()
    for path, state in _states(model):
        for group in _groups(state):
            if id(group) in seen:  # modules that are one unit share their state
                continue
            seen.add(id(group))
            policy = group.mp_policy
            units.append({
                "name": group._module_fqn if group._module_fqn is not None else path,
                "parameters": [_name(parameter, names) for parameter in group.fsdp_params],
                "numel": sum(_numel(parameter) for parameter in group.fsdp_params),
                "reshard_after_forward": group.post_forward_mesh_info is not None,
                "param_dtype": _text(policy.param_dtype),
                "reduce_dtype": _text(policy.reduce_dtype),
                "offload": type(group.offload_policy).__name__,
                "forward_prefetch": len(getattr(state, "_states_to_forward_prefetch", ())),
                "backward_prefetch": len(getattr(state, "_states_to_backward_prefetch", ())),
            })  # fmt: skip
    return {"units": units}


def _states(model: "nn.Module") -> Iterator[tuple[str, Any]]:
    kind = getattr(sys.modules.get(_MODULE), "FSDPModule", None)
    if kind is not None:
        for path, module in model.named_modules():
            if isinstance(module, kind):
                yield path, module._get_fsdp_state()


def _groups(state: Any) -> list[Any]:
    """Recent versions may have several groups of parameters in one state."""
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if several is None else list(several)
    return [group for group in groups if group is not None]


def _name(parameter: Any, names: dict[int, str]) -> str:
    if parameter._param_fqn is not None:
        return str(parameter._param_fqn)
    return names.get(id(parameter.sharded_param)) or str(parameter._module_info.param_name)


def _numel(parameter: Any) -> int:
    return int(parameter._orig_size.numel())


def _text(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
