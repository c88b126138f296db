"""A stream of JSON text -> columns and metadata, block by block: memory follows the block, not the file."""

import re
from typing import Any

import msgspec

from z3trace.analyzers.errors import NotATraceError, TraceError
from z3trace.analyzers.load import decode
from z3trace.analyzers.load.columns import ColumnBuilder
from z3trace.analyzers.load.events import (
    FAILURES,
    Recovered,
    Recovery,
    first_event,
    last_boundary,
    list_end,
)
from z3trace.analyzers.load.mend import mend
from z3trace.analyzers.load.notes import Notes
from z3trace.analyzers.load.source import Source
from z3trace.analyzers.load.times import NeedText

MAX_METADATA = 64 << 20
"""Bytes before, and bytes behind, the events that are kept."""
MAX_EVENT = 32 << 20
"""A longer event is left out."""
MAX_NESTED = 16 << 20
"""An event with data that looks like events inside may be this long."""

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"\[\s*(?:[{\]]|\Z)")


class Reader:
    """Reads one source into a ColumnBuilder."""

    def __init__(
        self, source: Source, name: str, builder: ColumnBuilder, notes: Notes, block_bytes: int
    ) -> None:
        self._source = source
        self._name = name
        self._builder = builder
        self._notes = notes
        self._block = block_bytes
        self._texts = False

    def run(self) -> dict[str, Any]:
        """Read everything; returns the metadata: every top-level key except traceEvents."""
        head, rest, bare = self._head()
        metadata = _metadata(head, self._notes) if head else {}
        tail = self._events(b"[" + rest)
        if bare and not self._builder.has_phases():
            raise NotATraceError(f"{self._name}: not a trace: a JSON list with no events in it")
        if tail.strip() and not bare:
            metadata.update(_metadata(b"{" + tail.lstrip(b" \r\n\t,"), self._notes))
        return metadata

    # The head: everything up to the first event.

    def _head(self) -> tuple[bytes, bytes, bool]:
        """The text before the events, the text from the first event on, and whether it is a bare list."""
        text = self._source.read(self._block)
        while text and not text.strip():
            text = self._source.read(self._block)
        if not text:
            raise TraceError(f"{self._name}: empty: no trace in it")
        if text[:2] in (b"\xff\xfe", b"\xfe\xff") or text[:64].count(0) >= 16:
            raise TraceError(f"{self._name}: UTF-16 or binary data where UTF-8 is expected: convert it first")
        text = text.removeprefix(b"\xef\xbb\xbf").lstrip()
        if _BARE_LIST.match(text):
            return b"", text[1:], True
        searched = 0
        while True:
            match = _EVENTS_KEY.search(text, searched)
            if match:
                head = b"" if "long_metadata" in self._notes else text[: match.start()]
                return head, text[match.end() :], False
            if len(text) > MAX_METADATA:
                self._too_long("before")
                text = text[-64:]
            searched = max(0, len(text) - 64)
            more = self._source.read(max(self._block, len(text)))
            if not more:
                return self._guess(text)
            text += more

    def _guess(self, text: bytes) -> tuple[bytes, bytes, bool]:
        """Without a sound key traceEvents: find the events by their looks, or say what the file is."""
        try:
            value = msgspec.json.decode(text)
        except FAILURES:
            value = None
        if isinstance(value, dict) and "traceEvents" in value:
            raise TraceError(f"{self._name}: not a trace: traceEvents is not a list")
        at = first_event(text, self._decode)
        if at is not None:
            self._notes.add(
                "no_events_key", "the start of the events is damaged: they were found by their looks"
            )
            return text[:at], text[at:], False
        if value is not None:
            raise NotATraceError(f"{self._name}: not a trace: JSON without traceEvents")
        raise TraceError(f"{self._name}: not a trace: there is no list of events in it")

    # The events.

    def _events(self, start: bytes) -> bytes:
        """Read all events; returns the text behind the list."""
        text = bytearray(start)
        stuck = 0  # bytes at the start of `text` in which no event was completed
        while True:
            more = self._source.read(min(max(self._block, stuck), MAX_EVENT))
            tail: bytes | None
            if not more:
                tail = self._last(text)
            else:
                text += more
                cut = last_boundary(text, max(0, stuck - 512))
                if cut < 0:
                    tail = self._ended(text)
                    if tail is None:
                        stuck = len(text)
                        if stuck > MAX_EVENT:
                            text, stuck = self._skip_event(), 0
                        continue
                else:
                    before = len(text)
                    rest, tail = self._consume(text, cut)
                    text = bytearray(rest)
                    stuck = before if len(text) >= before else 0
                    if tail is None:
                        continue
            if len(tail) < self._block:
                tail += self._source.read(self._block)
            resumed = first_event(tail[: self._block], self._decode)
            if resumed is None:
                return self._rest(tail)
            self._notes.add(
                "stray_end", "{count} places where the list of events ends too early: read on behind"
            )
            text, stuck = bytearray(b"[" + tail[resumed:]), 0

    def _consume(self, text: bytearray, cut: int) -> tuple[bytes, bytes | None]:
        """Add the events before the boundary; returns what is left and, once the list has ended, its tail."""
        behind = bytes(text[cut:])
        text[cut:] = b"]"
        try:
            self._add(text)
        except FAILURES as error:
            end = list_end(text, error)
        else:
            return b"[" + behind[1:], None
        del text[-1:]
        if end is not None and end < len(text):
            self._add(text[:end])
            return b"", bytes(text[end:]) + behind
        found = self._recover(bytes(text), final=len(text) > MAX_NESTED)
        if found.tail is not None:
            return b"", found.tail + behind
        return b"[" + (found.rest + behind)[1:], None

    def _ended(self, text: bytearray) -> bytes | None:
        """What stands behind the list of events if it ends in `text`; its events are added then."""
        try:
            self._add(text)
        except FAILURES as error:
            end = list_end(text, error)
        else:
            return b""
        if end is None:
            return None
        self._add(text[:end])
        return bytes(text[end:])

    def _last(self, text: bytearray) -> bytes:
        """The end of the file, with what is left of the events in front of it."""
        tail = self._ended(text)
        if tail is None:
            body = bytes(text).rstrip().rstrip(b",")
            tail = None if body == b"[" else self._recover(body, final=True).tail
        if tail is None and "cut_off" not in self._notes:
            self._notes.add("cut_off", "the file ends within the list of events")
        return tail or b""

    def _rest(self, tail: bytes) -> bytes:
        """The whole text behind the events."""
        while len(tail) <= MAX_METADATA:
            more = self._source.read(max(self._block, len(tail)))
            if not more:
                return tail
            tail += more
        self._too_long("behind")
        return b""

    def _too_long(self, where: str) -> None:
        if "long_metadata" not in self._notes:
            self._notes.add(
                "long_metadata", f"more than {MAX_METADATA >> 20} MB {where} the events: left out"
            )

    def _skip_event(self) -> bytearray:
        self._notes.add("long_event", f"{{count}} events longer than {MAX_EVENT >> 20} MB: left out")
        text = b""
        while True:
            more = self._source.read(self._block)
            if not more:
                return bytearray(b"[")
            text = text[-512:] + more
            cut = last_boundary(text)
            if cut >= 0:
                return bytearray(b"[" + text[cut + 1 :])

    def _decode(self, text: Any) -> list[Any]:
        events: list[Any] = (decode.texts if self._texts else decode.numbers).decode(text)
        return events

    def _add(self, text: bytes | bytearray) -> None:
        events = self._decode(text)
        try:
            self._builder.add(events, self._texts)
        except NeedText:
            self._texts = True
            self._builder.add(self._decode(text), True)

    def _recover(self, text: bytes, final: bool) -> Recovered:
        found = Recovery(self._notes, decode.texts.decode, text, final).recover()
        self._builder.add([event for events in found.lists for event in events], True)
        return found


def _metadata(text: bytes, notes: Notes) -> dict[str, Any]:
    """The members of an object whose closing brace may be missing."""
    body = text.strip().rstrip(b",")
    for candidate in (body + b"}", body):
        try:
            found = msgspec.json.decode(candidate)
        except FAILURES:
            continue
        return found if isinstance(found, dict) else {}
    notes.add("metadata", "the metadata around the events is damaged: kept as far as it can be read")
    mended = mend(body.decode("utf-8", "replace").encode() + b"}")
    if mended is None:
        return {}
    value = msgspec.json.decode(mended[0])
    return value if isinstance(value, dict) else {}
