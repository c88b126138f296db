"""From module paths to layers: the repeated block of a model that a module lies in."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

ROOT = "root"
NONE = "none"


class LayerNames:
    """Knows the repeated blocks of a model from the paths of its modules or parameters.

    A layer is the shortest path that ends in a number and has a sibling: `model.layers.3`. What lies in no
    layer (embedding, final norm, head) is `root`.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        siblings: dict[str, set[str]] = defaultdict(set)
        for path in set(paths):
            parts = path.split(".")
            for k, part in enumerate(parts):
                if part.isdigit():
                    siblings[".".join(parts[:k])].add(part)
        self._stacks = {prefix for prefix, numbers in siblings.items() if len(numbers) > 1}

    def layer_of(self, path: str) -> str:
        """The layer of one module or parameter."""
        parts = path.split(".")
        for k, part in enumerate(parts):
            if part.isdigit() and ".".join(parts[:k]) in self._stacks:
                return ".".join(parts[: k + 1])
        return ROOT

    def layer_of_all(self, paths: Sequence[str]) -> str:
        """The layer of several modules or parameters: `a+b` when they lie in several, `none` without any."""
        if not paths:
            return NONE
        return "+".join(sorted({self.layer_of(p) for p in paths}, key=natural_key))


def natural_key(layer: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts `layers.10` after `layers.9`."""
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in layer.replace("+", ".").split(".")
    )
