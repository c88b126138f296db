"""The grammar of the labels in traces: `z3::<verb> key=value key=value`.

The engine and the recorder write them as record_function names; the analyzers read them. A label carries
no quotes, backslashes, or control characters, because Kineto writes names into JSON and not every version
of it escapes them; such characters, and the grammar's own (space, `=`, `%`, parentheses), are
percent-encoded as UTF-8 bytes in values. The model itself, whose module path is the empty string, is
written `(root)` so that a person reading the trace sees something.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

PREFIX = "z3::"
ROOT = "(root)"

VERBS = frozenset({
    "fetch", "prefetch", "gather", "wait", "release", "reduce", "reduce_wait", "post_step_gather",
    "forward", "backward", "optimizer", "copy_in", "copy_out",
})  # fmt: skip
# set: which entry of the description's `gathered_together` holds the parameters; seq: a gather and its wait.
INTEGER_KEYS = frozenset({"bytes", "params", "world", "seq", "set"})
# unit: whose parameters; module: in whose hook it happens (a prefetch happens elsewhere than it is used).
TEXT_KEYS = frozenset({"unit", "module", "phase", "reason", "group"})
KEYS = INTEGER_KEYS | TEXT_KEYS

_UNSAFE = re.compile(r"[^A-Za-z0-9_.,:;/@+*#~!?<>\[\]{}|$&^-]")
_LABEL = re.compile(rf"{PREFIX}([a-z_]+)((?: [a-z_]+=[^ ]*)*)\Z")


@dataclass(frozen=True)
class Label:
    """A parsed label. `values` holds int for the integer keys and str for the others."""

    verb: str
    values: Mapping[str, int | str] = field(default_factory=dict)

    def text(self, key: str) -> str | None:
        """The value of a text key, None when the label does not carry it."""
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """The value of an integer key, None when the label does not carry it."""
        value = self.values.get(key)
        return value if isinstance(value, int) else None


def _encode(value: int | str) -> str:
    if isinstance(value, int):
        return str(value)
    if value == "":
        return ROOT
    return _UNSAFE.sub(lambda m: "".join(f"%{b:02X}" for b in m.group().encode("utf-8", "replace")), value)


def _decode(key: str, value: str) -> int | str:
    if key in INTEGER_KEYS:
        return int(value)
    return "" if value == ROOT else unquote(value)


def format_label(verb: str, **values: int | str) -> str:
    """The label as text. Keys keep the order in which they are given.

    Raises ValueError for a verb or key the grammar does not have, or a value of the wrong type.
    """
    if verb not in VERBS:
        raise ValueError(f"unknown label verb {verb!r}")
    for key, value in values.items():
        if key not in KEYS:
            raise ValueError(f"unknown label key {key!r}")
        if isinstance(value, int) != (key in INTEGER_KEYS) or isinstance(value, bool):
            raise ValueError(f"label key {key!r} cannot hold {value!r}")
    return " ".join([PREFIX + verb, *(f"{k}={_encode(v)}" for k, v in values.items())])


def parse_label(name: str) -> Label | None:
    """The label in an event's name; None when the name is not one (also for a damaged label)."""
    match = _LABEL.match(name)
    if match is None or match[1] not in VERBS:
        return None
    values: dict[str, int | str] = {}
    for pair in match[2].split():
        key, _, value = pair.partition("=")
        if key not in KEYS:
            return None
        try:
            values[key] = _decode(key, value)
        except ValueError:
            return None
    return Label(match[1], values)
