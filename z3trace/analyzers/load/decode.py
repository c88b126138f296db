"""JSON text of a list of events -> typed events that hold only the wanted fields."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from z3trace.analyzers.load import fields
from z3trace.analyzers.load.fields import NULL
from z3trace.analyzers.load.times import ABSENT

NO_TEXT = Raw(b"")

Getter = Callable[[Sequence[Any]], list[Any]]


def _args_struct() -> type[msgspec.Struct]:
    members: list[tuple[str, Any, Any]] = []

    def member(name: str, key: str, type_: Any, default: Any) -> None:
        members.append((name, type_, msgspec.field(default=default, name=key)))

    for column, keys in fields.INTS.items():
        for number, key in enumerate(keys):
            member(f"{column}_{number}", key, Any, NULL)
    for group in (*fields.FOLLOWERS.values(), fields.COLLECTIVE_INTS, fields.SYNC_INTS, fields.OTHER_INTS):
        for column, key in group.items():
            member(column, key, Any, NULL)
    for group in (fields.CODED, fields.COLLECTIVE_CODED, fields.LABEL_KEYS):
        for column, key in group.items():
            member(column, key, Any, None)
    for column, key in fields.RAW.items():
        member(column, key, Raw, NO_TEXT)
    return msgspec.defstruct("Args", members, gc=False)


Args = _args_struct()


def _event_struct(time_type: Any, time_default: Any) -> type[msgspec.Struct]:
    # Whatever may stand where an object is expected is accepted here and dealt with in the columns.
    args_type = Args | list | str | int | float | bool | None
    return msgspec.defstruct(
        "Event",
        [
            *((name, Any, None) for name in fields.TOP),
            ("ts", time_type, time_default),
            ("dur", time_type, time_default),
            ("id", Any, NULL),
            ("args", args_type, None),
        ],
        gc=False,
    )


NumberEvent = _event_struct(Any, ABSENT)
TextEvent = _event_struct(Raw, NO_TEXT)
EVENT_TYPES = (NumberEvent, TextEvent)


def _list_of(event: type[msgspec.Struct]) -> Any:
    other = event | list | str | int | float | bool | None
    return list[other]  # type: ignore[valid-type]


numbers = msgspec.json.Decoder(_list_of(NumberEvent))
"""Decodes times as numbers."""
texts = msgspec.json.Decoder(_list_of(TextEvent))
"""Decodes times as the text that stands in the file."""


def getter(name: str) -> Getter:
    """A function that reads one member from each struct of a list; compiled, so that the lookup is cached."""
    function: Getter = eval(f"lambda structs: [s.{name} for s in structs]")
    return function
