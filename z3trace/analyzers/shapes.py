"""How much a collective moves, from the shapes that its operator or its span recorded."""

import json
import math
from functools import lru_cache

from z3trace.analyzers.trace import Trace


def shapes_of(trace: Trace, event: int) -> tuple[list[object], list[str]]:
    """(shape of each argument, element type of each argument); empty where none are recorded.

    A list of tensors has a list of shapes and the type TensorList.
    """
    shapes, dtypes = _parsed(trace.text("input_dims", event)), _parsed(trace.text("input_types", event))
    if not isinstance(shapes, list) or not isinstance(dtypes, list):
        return [], []
    return shapes, [str(dtype) for dtype in dtypes]


@lru_cache(maxsize=4096)
def _parsed(text: str | None) -> object:
    try:
        return json.loads(text or "[]")
    except (ValueError, RecursionError):
        return None


def elements(shape: object) -> int | None:
    """Elements of a tensor's shape or, for a list of tensors, of all of them."""
    if not isinstance(shape, list):
        return None
    if all(isinstance(n, int) for n in shape):
        return math.prod(shape)
    parts = [elements(s) for s in shape]
    return None if any(p is None for p in parts) else sum(p for p in parts if p is not None)


def each(shape: object) -> list[int]:
    """Elements of each tensor of a list of tensors."""
    parts = [elements(s) for s in shape] if isinstance(shape, list) else []
    return [p for p in parts if p is not None]


def message(name: str, kind: str, shapes: list[object], world: int | None) -> tuple[int | None, int | None]:
    """(elements of the whole message, argument whose type is theirs) of an operator with these shapes.

    The whole message is the output of an all-gather and the input of a reduce-scatter; c10d's operators take
    output and input, the functional ones only the input. Lists of lists of tensors record no shapes.
    """

    def of(position: int) -> int | None:
        if position >= len(shapes) or shapes[position] == []:
            # A scalar's shape is empty, too, but then its list of one tensor is not: [[]].
            return None
        return elements(shapes[position])

    functional = not name.startswith("c10d::")
    own, other = (of(0), None) if functional else (of(0), of(1))
    if kind == "all_gather":
        if own is not None and not functional:
            return own, 0
        shard, position = (own, 0) if functional else (other, 1)
        return (shard * world, position) if shard is not None and world is not None else (None, position)
    if kind == "reduce_scatter" and not functional:
        if other is not None:
            return other, 1
        return (own * world, 0) if own is not None and world is not None else (None, 0)
    if kind == "all_to_all" and other is not None:
        return other, 1
    return (own, 0) if own is not None else (other, 1)


def ranks_sharing(name: str, kind: str, shapes: list[object]) -> int | None:
    """Members of the group, as the ratio of the whole and the shard that a c10d operator takes."""
    if kind not in ("all_gather", "reduce_scatter") or not name.startswith("c10d::") or len(shapes) < 2:
        return None
    sizes = [n for n in (elements(shapes[0]), elements(shapes[1])) if n]
    if len(sizes) < 2 or [] in shapes[:2]:
        return None
    large, small = max(sizes), min(sizes)
    return large // small if large % small == 0 else None


def gloo_spans(name: str, kind: str, shapes: list[object], world: int | None) -> list[tuple[str, int | None]]:
    """(name, elements or None) of each span that gloo runs for an operator, None where they are not told."""
    verb = _GLOO_VERB.get(name) or _GLOO_VERB.get(kind)
    if verb is None or name == "c10d::monitored_barrier_":
        return []
    span = "gloo:" + verb
    if verb in ("barrier", "scatter"):
        return [(span, None)]
    if not shapes:
        return [(span, None)]
    given = shapes[1] if len(shapes) > 1 and shapes[1] != [] else shapes[0]
    if name == "c10d::reduce_scatter_tensor_coalesced_":
        return [(span, n) for n in each(given)] or [(span, None)]
    if name == "c10d::reduce_scatter_":
        return [(span, elements(shapes[0]))] * (world or 1)
    return [(span, elements(given))]


# gloo has no reduce-scatter: it runs an all-reduce of the whole.
_GLOO_VERB = {
    "all_gather": "all_gather",
    "reduce_scatter": "all_reduce",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "c10d::reduce_": "reduce",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
}


def span_elements(trace: Trace, span: int) -> int | None:
    """Elements that a gloo span shows, None where it shows none or they do not identify it."""
    shapes, _ = shapes_of(trace, span)
    if not shapes or trace.name_of(span) in ("gloo:scatter", "gloo:barrier"):
        return None
    return elements(shapes)
