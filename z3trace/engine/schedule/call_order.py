"""In which order a model's modules are called, guessed from names and classes where nothing better is known.

Registration order is call order, but for some habits of model code: lists of blocks are not called
themselves; activations are registered last and called after the first layer; rotary embeddings are registered
last and called before the blocks, or in attention before the output layer; decoder layers register their norms
last, under names that tell where they are called; attention leaves its dropout to a fused kernel. Other
modules without parameters may still be misplaced by a call or two: `CallFacts.order` says how it is.
"""

import re

from .interface import Model, Module
from .structure import short_name

_UNCALLED = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})
_FUSED = re.compile(r"^att(n|ention)_drop(out)?$")
_ACTIVATION = re.compile(r"^(.*_)?act(_fn|ivation.*)?$|^(gelu|relu|silu|swish|tanh)$|(gelu|relu|silu)")

# A norm's name, the sibling it is called next to, and whether before (0) or after (1) it.
_NORMS = (
    (re.compile(r"^input_(layer)?norm$"), re.compile(r"attn|attention|mixer"), 0),
    (re.compile(r"^post_attention_(layer)?norm$"), re.compile(r"attn|attention|mixer"), 1),
    (re.compile(r"^pre_(feedforward|mlp|ffn?)_(layer)?norm$"), re.compile(r"mlp|feed_?forward|ffn|moe"), 0),
)


def inferred_order(model: Model) -> tuple[str, ...]:
    """Paths of the modules that are called, once each, in the order in which their calls begin."""
    return tuple(_Order(model).visit(model.modules[0].path))


def is_rotary(module: Module) -> bool:
    """Rotary embeddings compute from positions alone: nothing of theirs requires a gradient."""
    return "rotary" in _words(module) and not module.partitions


class _Order:
    def __init__(self, model: Model) -> None:
        self._modules = {module.path: module for module in model.modules}
        self._weighted: set[str] = set()  # modules with parameters in or below them
        for module in reversed(model.modules):
            if module.partitions or any(child in self._weighted for child in module.children):
                self._weighted.add(module.path)

    def visit(self, path: str) -> list[str]:
        if _FUSED.match(path.rpartition(".")[2]):
            return []
        inner = [called for child in self._ordered(path) for called in self.visit(child)]
        return inner if self._is_list(path) else [path, *inner]

    def _ordered(self, path: str) -> list[str]:
        children = list(self._modules[path].children)
        weighted = [child for child in children if child in self._weighted]
        if len(weighted) < 2:
            return children
        blocks = [child for child in weighted if self._is_list(child)]
        for child in children[children.index(weighted[-1]) + 1 :]:
            if is_rotary(self._modules[child]):
                children.remove(child)
                children.insert(children.index(blocks[0] if blocks else weighted[-1]), child)
            elif self._is_activation(child):
                children.remove(child)
                children.insert(children.index(weighted[0]) + 1, child)
        self._place_norms(children)
        return children

    @staticmethod
    def _place_norms(children: list[str]) -> None:
        names = {child.rpartition(".")[2]: child for child in children}
        for norm, anchor, after in _NORMS:
            moved = next((child for name, child in names.items() if norm.match(name)), None)
            beside = next((c for n, c in names.items() if anchor.search(n) and "norm" not in n), None)
            if moved is not None and beside is not None and children.index(moved) > children.index(beside):
                children.remove(moved)
                children.insert(children.index(beside) + after, moved)

    def _is_activation(self, path: str) -> bool:
        module = self._modules[path]
        name = path.rpartition(".")[2].lower()
        named = not name.isdigit() and (
            _ACTIVATION.match(name) or _ACTIVATION.search(short_name(module.class_name).lower())
        )
        return bool(named) and not module.children and path not in self._weighted

    def _is_list(self, path: str) -> bool:
        module = self._modules[path]
        if module.class_name:
            return short_name(module.class_name) in _UNCALLED
        names = [child.rpartition(".")[2] for child in module.children]
        numbered = bool(names) and names == [str(number) for number in range(len(names))]
        if not numbered or module.partitions:
            return False
        # A Sequential is called and looks the same, but is seldom made of alike blocks with inner modules.
        shapes = {self._shape(child) for child in module.children}
        return len(shapes) == 1 and shapes != {()}

    def _shape(self, path: str) -> tuple[object, ...]:
        """The tree of names below a module: alike for the repeated blocks of a list."""
        children = self._modules[path].children
        return tuple((child[len(path) :], self._shape(child)) for child in children)


def _words(module: Module) -> str:
    return f"{short_name(module.class_name)} {module.path.rpartition('.')[2]}".lower()
