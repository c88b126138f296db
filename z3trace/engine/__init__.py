"""An instrumented ZeRO-3 engine.

    import z3trace.engine as z3

    engine = z3.initialize(model, optimizer=torch.optim.AdamW, config={"bf16": {"enabled": True}})
    loss = engine(batch)
    engine.backward(loss)
    engine.step()

Importing this package does not import torch: `z3trace.engine.labels` and `z3trace.engine.schedule` are pure
Python and are used without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from z3trace.engine.config import ZeroConfig
    from z3trace.engine.engine import Engine, initialize
    from z3trace.engine.observe import Observer, add_observer, remove_observer
    from z3trace.engine.whole import full_gradients, gathered

__all__ = [
    "Engine",
    "Observer",
    "ZeroConfig",
    "add_observer",
    "full_gradients",
    "gathered",
    "initialize",
    "remove_observer",
]

_HOMES = {
    "Engine": "engine",
    "Observer": "observe",
    "ZeroConfig": "config",
    "add_observer": "observe",
    "full_gradients": "whole",
    "gathered": "whole",
    "initialize": "engine",
    "remove_observer": "observe",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
