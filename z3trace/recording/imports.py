"""Run something right after the script has imported a module, without ever importing it ourselves."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds the awaited modules as the other finders do, and adds to the end of their execution."""

    def __init__(self) -> None:
        self.awaited: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.awaited:
            return None
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        specs = (find(fullname, path, target) for find in others if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec)
        return spec

    def _extend(self, spec: ModuleSpec) -> None:
        execute = spec.loader.exec_module  # type: ignore[union-attr]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self.awaited.pop(module.__name__, ()):
                action(module)

        try:
            spec.loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]
        except AttributeError:  # a loader that is not an ordinary object: its module passes unseen
            return


_finder = _Finder()


def after_import(name: str, action: Action) -> None:
    """Call `action(module)` once the module `name` has been executed; at once when it already was.

    The action must not raise: it would look like a failed import.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        action(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.awaited.setdefault(name, []).append(action)
