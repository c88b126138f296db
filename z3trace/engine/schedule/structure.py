"""The model as DeepSpeed's stage 3 sees it: modules with hooks, leaf modules, persistent parameters."""

from collections.abc import Collection, Iterable, Mapping

from .interface import Model, Module, Partition
from .settings import LeafModules, ZeroSettings

CONTAINERS = frozenset(
    {"Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}
)
MAX_LEAF_NUMEL = 1_000_000_000  # larger modules never become leaves by granularity


class Structure:
    """Lookups on a model that do not change during training.

    `hooked` are the modules whose calls DeepSpeed sees: all but those below a leaf that was set before the
    hooks. `leaves` are fetched with everything below them. `gradient_leaves` gives, for leaves set before
    the hooks, the trainable parameters whose gradients are reduced when the leaf's backward is done.
    """

    def __init__(
        self,
        model: Model,
        settings: ZeroSettings,
        leaves: Collection[str] = (),
        leaves_after: Collection[str] = (),
    ) -> None:
        self.partitions: Mapping[str, Partition] = {entry.name: entry for entry in model.partitions}
        self.modules: Mapping[str, Module] = {entry.path: entry for entry in model.modules}
        self._rank = {name: number for number, name in enumerate(self.partitions)}
        self._below: dict[str, tuple[str, ...]] = {}
        before = set(leaves) | leaf_modules(model, settings.leaf_module)
        before |= leaves_by_granularity(self, settings.stage3_module_granularity_threshold)
        self.leaves = frozenset(before | set(leaves_after))
        self.hooked: frozenset[str] = frozenset(self._walk(model.modules[0].path, frozenset(before)))
        trained = {
            leaf: tuple(name for name in self.below(leaf) if self.partitions[name].trainable)
            for leaf in self.modules
            if leaf in before and leaf in self.hooked
        }
        self.gradient_leaves: Mapping[str, tuple[str, ...]] = {
            leaf: names for leaf, names in trained.items() if names
        }
        self.persistent = persistent_partitions(model, self, settings)

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Without duplicates, in the order in which the partitions were sharded."""
        return tuple(sorted(set(names), key=self._rank.__getitem__))

    def direct(self, path: str) -> tuple[str, ...]:
        return self.modules[path].partitions

    def below(self, path: str) -> tuple[str, ...]:
        """A module's own partitions and those of all modules below it, each once."""
        if path not in self._below:
            names = [name for module in self._walk(path, frozenset()) for name in self.direct(module)]
            self._below[path] = tuple(dict.fromkeys(names))
        return self._below[path]

    def numel(self, names: Iterable[str]) -> int:
        return sum(self.partitions[name].numel for name in names)

    def _walk(self, path: str, stop: frozenset[str]) -> list[str]:
        """Modules from `path` down in registration order; nothing below those in `stop`."""
        found, pending = [], [path]
        while pending:
            module = pending.pop()
            found.append(module)
            if module not in stop:
                pending.extend(reversed(self.modules[module].children))
        return found


def leaf_modules(model: Model, wanted: LeafModules) -> set[str]:
    """Modules named by a `leaf_module` setting: class (short or full), exact name, or end of the name."""
    return {
        module.path
        for module in model.modules
        if (module.class_name and {module.class_name, short_name(module.class_name)} & set(wanted.classes))
        or module.path in wanted.names
        or any(module.path.endswith(suffix) for suffix in wanted.name_suffixes)
    }


def leaves_by_granularity(structure: Structure, threshold: int) -> set[str]:
    """`stage3_module_granularity_threshold`: outermost modules with few elements per module.

    A module's granularity is its elements divided by the number of modules with parameters in it, itself
    included. Modules without children, containers and modules of over 1e9 elements never qualify.
    """
    if threshold <= 0:
        return set()
    granularity: dict[str, int] = {}

    def measure(path: str) -> tuple[int, int]:
        module = structure.modules[path]
        if not structure.below(path):
            return 0, 0
        numel = structure.numel(structure.direct(path))
        if not module.children:
            return 1, numel
        parts = [measure(child) for child in module.children]
        count, numel = sum(part[0] for part in parts), numel + sum(part[1] for part in parts)
        if short_name(module.class_name) in CONTAINERS:
            return count, numel
        if numel <= MAX_LEAF_NUMEL:
            granularity[path] = numel // (count + 1)
        return count + 1, numel

    root = next(iter(structure.modules))
    measure(root)
    found, pending = set(), [root]
    while pending:
        path = pending.pop()
        if granularity.get(path, threshold + 1) <= threshold:
            found.add(path)
        else:
            pending.extend(structure.modules[path].children)
    return found


def persistent_partitions(model: Model, structure: Structure, settings: ZeroSettings) -> tuple[str, ...]:
    """Parameters kept gathered between steps, in the order of named_parameters()."""
    kept, total = [], 0
    for name in structure.below(model.modules[0].path):
        numel = structure.partitions[name].numel
        if (
            numel <= settings.stage3_param_persistence_threshold
            and total + numel <= settings.stage3_model_persistence_threshold
        ):
            kept.append(name)
            total += numel
    return tuple(kept)


def short_name(class_name: str) -> str:
    return class_name.rpartition(".")[2]
