"""A stream of JSON text -> columns and metadata, in blocks, so that memory follows the block and not the file."""

import json
import re
from typing import Any

import msgspec

from z3trace.analyzers.errors import NotATraceError, TraceError
from z3trace.analyzers.load import decode
from z3trace.analyzers.load.columns import ColumnBuilder
from z3trace.analyzers.load.events import Recovery, last_boundary, list_end
from z3trace.analyzers.load.mend import mend
from z3trace.analyzers.load.notes import Notes
from z3trace.analyzers.load.source import Source
from z3trace.analyzers.load.times import NeedText

MAX_METADATA = 128 << 20
"""Bytes before, and bytes behind, the events that are kept."""
MAX_EVENT = 64 << 20
"""A longer event is left out."""
MAX_NESTED = 16 << 20
"""An event with data that looks like events inside may be this long."""

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENTS_GUESS = re.compile(
    rb'[:{\[]\s*[\[{]?\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|args)"\s*:[^{}]{0,400}?"ph"\s*:)'
)
_FAILURES = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


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
        metadata = {} if bare else _metadata(head, self._notes)
        tail = self._events(b"[" + rest)
        if tail.strip() and not bare:
            metadata.update(_metadata(b"{" + tail.lstrip(b" \r\n\t,"), self._notes))
        return metadata

    # The head: everything up to the first event.

    def _head(self) -> tuple[bytes, bytes, bool]:
        text = self._source.read(self._block)
        while text and not text.strip():
            more = self._source.read(self._block)
            text = more if more else b""
        if not text:
            raise TraceError(f"{self._name}: empty: no trace in it")
        if text[:2] in (b"\xff\xfe", b"\xfe\xff") or (b"\x00" in text[:4] and text[:64].count(0) >= 1):
            raise TraceError(f"{self._name}: UTF-16 or binary text where UTF-8 is expected: convert it first")
        text = text.removeprefix(b"\xef\xbb\xbf").lstrip()
        if text[:1] == b"[":
            return b"", text[1:], True
        if text[:1] != b"{":
            raise TraceError(f"{self._name}: not a trace: neither a JSON object nor a list of events")
        searched = 0
        while True:
            match = _EVENTS_KEY.search(text, searched)
            if match:
                return text[: match.start()], text[match.end() :], False
            searched = max(0, len(text) - 64)
            more = self._source.read(max(self._block, len(text)))
            if not more or len(text) > MAX_METADATA:
                return self._guess(text)
            text += more

    def _guess(self, text: bytes) -> tuple[bytes, bytes, bool]:
        """The key traceEvents is missing or damaged: find the events by their looks, or say what the file is."""
        try:
            value = msgspec.json.decode(text)
        except _FAILURES:
            match = _EVENTS_GUESS.search(text)
            if match is None:
                raise TraceError(f"{self._name}: not a trace: no list traceEvents in it") from None
            self._notes.add(
                "no_events_key", "the key traceEvents is damaged: the events were found by their looks"
            )
            return text[: match.start()], text[match.end() :], False
        if "traceEvents" in value:
            raise TraceError(f"{self._name}: not a trace: traceEvents is not a list")
        raise NotATraceError(f"{self._name}: not a trace: a JSON object without traceEvents")

    # The events.

    def _events(self, text: bytes) -> bytes:
        """Read all events; returns the text behind the list."""
        want = 0
        searched = 0
        while True:
            more = self._source.read(max(self._block, want))
            if not more:
                return self._last(text)
            text += more
            cut = last_boundary(text, searched)
            if cut < 0:
                searched = max(0, len(text) - 512)
                want = len(text)
                if len(text) > MAX_EVENT:
                    text = self._skip_event()
                    searched = want = 0
                continue
            block = text[:cut] + b"]"
            try:
                self._add(self._decode(block), block)
            except _FAILURES as error:
                end = list_end(block, error)
                if end is not None and end != len(block) - 1:
                    return self._finish(block[:end], text[end:])
                rest = self._recover(text[:cut], final=len(text) > MAX_NESTED)
                if rest == 0:
                    searched, want = 0, len(text)
                    continue
                cut = cut if rest is None else rest
            text = b"[" + text[cut + 1 :]
            searched = want = 0

    def _finish(self, events: bytes, tail: bytes) -> bytes:
        try:
            self._add(self._decode(events), events)
        except _FAILURES:
            self._recover(events[:-1], final=True)
        while len(tail) <= MAX_METADATA:
            more = self._source.read(max(self._block, len(tail)))
            if not more:
                return tail
            tail += more
        self._notes.add("long_metadata", "more than 128 MB behind the events: left out")
        return b""

    def _last(self, text: bytes) -> bytes:
        """The end of the file, with what is left of the events in front of it."""
        try:
            self._add(self._decode(text), text)
            return b""
        except _FAILURES as error:
            end = list_end(text, error)
        if end is not None:
            return self._finish(text[:end], text[end:])
        body = text.rstrip()
        if body in (b"[", b"[,"):
            self._notes.add("cut_off", "the file ends within the list of events")
            return b""
        # Either the end is missing, or the damage lies before it.
        closing = re.search(rb"\}\s*,?\s*\](?=\s*(?:,\s*\"|\}|\Z)[^{]*\Z)", body)
        if closing is None:
            self._recover(body.rstrip(b","), final=True)
            if "cut_off" not in self._notes:
                self._notes.add("cut_off", "the file ends within the list of events")
            return b""
        self._recover(body[: closing.start() + 1], final=True)
        return body[closing.end() :]

    def _skip_event(self) -> bytes:
        self._notes.add("long_event", "{count} events longer than 64 MB: left out")
        text = b""
        while True:
            more = self._source.read(self._block)
            if not more:
                return b"["
            text = text[-512:] + more
            cut = last_boundary(text)
            if cut >= 0:
                return b"[" + text[cut + 1 :]

    def _decode(self, text: Any) -> list[Any]:
        events: list[Any] = (decode.texts if self._texts else decode.numbers).decode(text)
        return events

    def _add(self, events: list[Any], text: bytes) -> None:
        try:
            self._builder.add(events, self._texts)
        except NeedText:
            self._texts = True
            self._builder.add(self._decode(text), True)

    def _recover(self, text: bytes, final: bool) -> int | None:
        recovered = Recovery(self._notes, decode.texts.decode).recover(text, final)
        for events in recovered.lists:
            self._builder.add(events, True)
        return recovered.rest


def _metadata(text: bytes, notes: Notes) -> dict[str, Any]:
    """The members of an object whose closing brace may be missing."""
    body = text.strip().rstrip(b",")
    for candidate in (body + b"}", body):
        try:
            found = msgspec.json.decode(candidate)
        except _FAILURES:
            continue
        return found if isinstance(found, dict) else {}
    notes.add("metadata", "the metadata around the events is damaged: kept as far as it can be read")
    mended = mend(body.decode("utf-8", "replace").encode() + b"}")
    if mended is None:
        return {}
    value = json.loads(mended)
    return value if isinstance(value, dict) else {}
