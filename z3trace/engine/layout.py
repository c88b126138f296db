"""Which parameters are sharded together, and which modules need them.

A *unit* is a module whose parameters one gather fetches: a repeated block, or every module that owns
parameters. What belongs to no unit, or to several, belongs to the model itself. Within a unit, trainable and
frozen parameters are sharded apart, so that gradients are reduced for nothing but the trainable.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from z3trace.engine.schedule import interface
from z3trace.errors import UserError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
FROZEN = "#frozen"


@dataclass(frozen=True)
class PartitionPlan:
    """One partition to make: its name, the unit (module path) it belongs to, and its parameters in order."""

    name: str
    unit: str
    parameters: tuple[str, ...]
    trainable: bool


@dataclass(frozen=True)
class Layout:
    """`needs` maps the path of each module to hook to the partitions that its forward reads."""

    partitions: tuple[PartitionPlan, ...]
    needs: Mapping[str, tuple[str, ...]]


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to shard by their first name, tied ones once, in registration order.

    Quantized weights and the like (no floating dtype) stay whole on every rank.
    """
    return {name: p for name, p in model.named_parameters() if p.is_floating_point()}


def block_paths(model: nn.Module, classes: Sequence[str] = ()) -> tuple[str, ...]:
    """The paths of the repeated blocks: modules of the given classes, or of the class of the children of the
    longest ModuleList or Sequential.

    Raises UserError when a given class is not in the model. Blocks inside blocks are not units of their own.
    """
    if classes:
        known = {name for module in model.modules() for name in _class_names(module)}
        for name in classes:
            if name not in known:
                raise UserError(f"z3trace.unit_classes: the model has no module of class {name!r}")
        wanted = [path for path, module in model.named_modules() if _class_names(module) & set(classes)]
    else:
        block = _block_class(model)
        wanted = [path for path, module in model.named_modules() if type(module) is block]
    return _outermost(path for path in wanted if path)


def module_paths(model: nn.Module) -> tuple[str, ...]:
    """The paths of the modules that own parameters; experts count as a part of the module that has their list,
    for which of them run differs from rank to rank."""
    paths: dict[str, None] = {}
    for path, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            parts = path.split(".")
            experts = [i for i, part in enumerate(parts[:-1]) if "expert" in part.lower()]
            paths[".".join(parts[: experts[0]]) if experts else path] = None
    return tuple(paths)


def plan_units(model: nn.Module, unit: str, classes: Sequence[str], group_of: Mapping[int, int]) -> Layout:
    """The layer-wise layout. `group_of` gives the optimizer's group of a parameter by its id: parameters of
    one group lie together within their unit, so that each group is one range of the flat shard."""
    units = block_paths(model, classes) if unit == "block" else module_paths(model)
    owner = _Owners(units)
    homes: dict[int, str] = {}
    readers: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=True):
        home = owner.unit(path)
        for parameter in module.parameters(recurse=False):
            known = homes.setdefault(id(parameter), home)
            if known != home and unit == "block":
                homes[id(parameter)] = ""
            readers.setdefault(id(parameter), []).append(home)

    members: dict[tuple[str, bool], list[tuple[int, str]]] = {}
    needs: dict[str, dict[str, None]] = {}
    for name, parameter in sharded_parameters(model).items():
        home = homes[id(parameter)]
        key = (home, parameter.requires_grad)
        members.setdefault(key, []).append((group_of.get(id(parameter), -1), name))
        for reader in readers[id(parameter)] if unit == "module" else (home,):
            needs.setdefault(reader, {})[_partition_name(*key)] = None
    partitions = tuple(
        PartitionPlan(
            _partition_name(*key), key[0], tuple(n for _, n in sorted(names, key=lambda m: m[0])), key[1]
        )
        for key, names in members.items()
    )
    order = [path for path, _ in model.named_modules()]
    return Layout(partitions, {path: tuple(needs[path]) for path in order if path in needs})


def plan_parameters(model: nn.Module) -> tuple[PartitionPlan, ...]:
    """One partition for each parameter, as DeepSpeed has it; its unit is the first module that owns it."""
    return tuple(
        PartitionPlan(name, name.rpartition(".")[0], (name,), parameter.requires_grad)
        for name, parameter in sharded_parameters(model).items()
    )


def describe_model(
    model: nn.Module, partitions: Sequence[PartitionPlan], dtype: torch.dtype
) -> interface.Model:
    """The model as a schedule sees it. `dtype` is the one in which parameters are gathered."""
    home = {name: plan.name for plan in partitions for name in plan.parameters}
    parameters = sharded_parameters(model)
    names = {id(p): name for name, p in parameters.items()}
    modules = []
    for path, module in model.named_modules():
        owned = (home[names[id(p)]] for p in module.parameters(recurse=False) if id(p) in names)
        children = (f"{path}.{name}" if path else name for name, _ in module.named_children())
        class_name = f"{type(module).__module__}.{type(module).__qualname__}"
        modules.append(interface.Module(path, class_name, tuple(dict.fromkeys(owned)), tuple(children)))
    return interface.Model(
        tuple(modules),
        tuple(
            interface.Partition(
                plan.name,
                plan.parameters,
                sum(parameters[name].numel() for name in plan.parameters),
                str(dtype).removeprefix("torch."),
                plan.trainable,
            )
            for plan in partitions
        ),
    )


def _partition_name(unit: str, trainable: bool) -> str:
    return unit if trainable else unit + FROZEN


def _class_names(module: nn.Module) -> set[str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _block_class(model: nn.Module) -> type[nn.Module] | None:
    """The class repeated most often in one list. Lists of bare layers (an MLP) count only where there is
    nothing else, and experts never do: which of them run differs from rank to rank."""
    best: tuple[bool, int] = (False, 0)
    found = None
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or "expert" in path.lower():
            continue
        counts: dict[type[nn.Module], tuple[bool, int]] = {}
        for child in module.children():
            if type(child) not in _CONTAINERS and any(True for _ in child.parameters()):
                composed = any(True for _ in child.children())
                counts[type(child)] = (composed, counts.get(type(child), (False, 0))[1] + 1)
        smallest = 1 if isinstance(module, nn.ModuleList) else 2
        for kind, score in counts.items():
            if score[1] >= smallest and score > best:
                best, found = score, kind
    return found


def _outermost(paths: Iterator[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for path in paths:
        if not any(path.startswith(other + ".") for other in kept):
            kept.append(path)
    return tuple(kept)


class _Owners:
    """The innermost unit around a module."""

    def __init__(self, units: Sequence[str]) -> None:
        self._units = set(units)

    def unit(self, path: str) -> str:
        while path and path not in self._units:
            path = path.rpartition(".")[0]
        return path
