"""The text of a list of events -> decoded events, whole where it is sound, event by event where it is
damaged.

Event boundaries are found in the text: `},` then `{` and the quoted key that an event starts with. Such a
match cannot lie inside a sound string, because there the quote before the key would end it.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from z3trace.analyzers.load.mend import mend
from z3trace.analyzers.load.notes import Notes

_KEYS = rb'"(?:ph|name|cat|ts|pid|tid|id|args|dur|bp|s)"\s*:'
_BOUNDARY = re.compile(rb"\}\s*,(?=\s*\{\s*" + _KEYS + rb")")
_START = re.compile(rb"\{\s*" + _KEYS + rb'|(?<=[,}\s])\{\s*"')
_EVENT = re.compile(rb"\{\s*(?=" + _KEYS + rb')(?=[^{}]{0,2000}"ph"\s*:)')
_POSITION = re.compile(r"\(byte (\d+)\)")
_INDEX = re.compile(r"`\$\[(\d+)\]")
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_AFTER_LIST = re.compile(rb'\s*(?:,\s*"|\}|\Z)')
_NESTED = re.compile(rb'(?:"[^"\n]*"\s*:\s*\[?|\[\s*\[)\s*\Z')
_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[\s*\Z')
_UNCLOSED = re.compile(rb'[\s,]*(?:\Z|\]\s*(?:,\s*"|\}\s*\Z|\Z))')
_LIST_END = re.compile(rb"[\s,]*\]")

FAILURES = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What decoding raises on damaged text."""

_SPACE = b" \r\n\t"
_SEPARATORS = b"," + _SPACE

DecodeList = Callable[[Any], list[Any]]


def last_boundary(text: bytes | bytearray, searched: int = 0) -> int:
    """Position of the last comma between two events behind `searched`; -1 if there is none."""
    step = 1 << 13
    low = high = len(text)
    while low > searched:
        low = max(searched, low - step)
        step *= 4
        found = -1
        for match in _BOUNDARY.finditer(text, low, high):
            found = match.end() - 1
        if found >= 0:
            return found
        high = min(len(text), low + 512)
    return -1


def _trailing(error: Exception) -> int | None:
    """Where something follows a value that is complete, if that is what the decoder complains of."""
    found = _TRAILING.search(str(error))
    return int(found.group(1)) - _COUNTED_TOO_FAR if found else None


def _counted_too_far() -> int:
    try:
        msgspec.json.decode(b"1 x")
    except msgspec.DecodeError as error:
        found = _TRAILING.search(str(error))
        if found:
            return int(found.group(1)) - 2
    return 1


_COUNTED_TOO_FAR = _counted_too_far()
"""msgspec 0.23 counts the first character behind the value in; asked once, in case that changes."""


def list_end(text: bytes | bytearray | memoryview, error: Exception) -> int | None:
    """Where the list of events ends in `text`, if decoding failed only because something follows it."""
    end = _trailing(error)
    return end if end is not None and _AFTER_LIST.match(text, end) else None


def first_event(text: bytes, decode_list: DecodeList) -> int | None:
    """Where the first sound event starts in a text that should hold none."""
    for match in _EVENT.finditer(text):
        start = match.start()
        boundary = _BOUNDARY.search(text, start)
        end = boundary.end() - 1 if boundary else text.rfind(b"}") + 1
        if _only_event(decode_list, b"[" + text[start:end] + b"]") is not None:
            return start
        if not boundary and mend(text[start:]):
            return start
    return None


@dataclass
class Recovered:
    """What could be read of a damaged text.

    `rest` starts with the bracket or comma before an event that is unfinished (empty: there is none);
    `tail` is the text behind the end of the list (None: the list did not end).
    """

    lists: list[list[Any]] = field(default_factory=list)
    rest: bytes = b""
    tail: bytes | None = None


class Recovery:
    """Reads a damaged list of events: everything that is sound, and of the rest what can be mended."""

    def __init__(self, notes: Notes, decode_list: DecodeList, text: bytes, final: bool) -> None:
        """`text` is `[event, event, …` without the closing bracket, cut at a boundary or at the end of the
        file.

        `final` says that nothing more comes: an event that is cut off is then lost, else it is left over.
        """
        self._notes = notes
        self._decode = decode_list
        self._final = final
        replaced = text.decode("utf-8", "replace")
        invalid = replaced.count("\ufffd") - text.count(b"\xef\xbf\xbd")
        if invalid:
            notes.add("invalid_utf8", "{count} invalid UTF-8 sequences in strings: replaced", invalid)
            text = replaced.encode()
        self._text = text
        self._view = memoryview(bytearray(text + b"]"))
        commas = [match.end() - 1 for match in _BOUNDARY.finditer(text)]
        self._starts = [0, *commas]  # of the bracket or comma before each event
        self._ends = [*commas, len(text)]
        self._found = Recovered()

    def recover(self) -> Recovered:
        count = len(self._starts)
        at = 0
        while at < count and self._found.tail is None:
            at += self._sound_run(at)
            if at == count or self._found.tail is not None:
                break
            following = self._next_sound(at)
            if following is None and not self._final:
                self._found.rest = self._text[self._starts[at] :]
                break
            following = count if following is None else following
            self._mend(self._text[self._starts[at] + 1 : self._ends[following - 1]], following == count)
            at = following
        return self._found

    def _list(self, start: int, end: int) -> list[Any]:
        """Decode the events between two commas, in place: the commas become brackets meanwhile."""
        view = self._view
        first, last = view[start], view[end]
        view[start], view[end] = ord("["), ord("]")
        try:
            return self._decode(view[start : end + 1])
        finally:
            view[start], view[end] = first, last

    def _keep(self, at: int, count: int) -> None:
        self._found.lists.append(self._list(self._starts[at], self._ends[at + count - 1]))

    def _is_sound(self, at: int, count: int) -> bool:
        try:
            self._list(self._starts[at], self._ends[at + count - 1])
        except FAILURES:
            return False
        return True

    def _sound_run(self, at: int) -> int:
        """Keep as many events from `at` on as are sound; returns their number."""
        start, left = self._starts[at], len(self._starts) - at
        try:
            self._keep(at, left)
            return left
        except FAILURES as error:
            end = None
            if _trailing(error) is not None:
                end = list_end(b"[" + self._text[start + 1 :], error)
            position, index = _POSITION.search(str(error)), _INDEX.search(str(error))
        if end is not None:
            self._found.lists.append(self._decode(b"[" + self._text[start + 1 : start + end]))
            self._found.tail = self._text[start + end :]
            return 0
        most = left
        if position or index:
            guess = int(index.group(1)) if index else 0
            if position:
                guess = bisect_left(self._starts, start + int(position.group(1)), at) - at
            for sound in range(min(guess, left), max(guess - 3, 0), -1):
                if self._is_sound(at, sound):
                    self._keep(at, sound)
                    return sound
            most = min(max(guess - 3, 0), left)
        sound = self._feel(at, most)
        if sound:
            self._keep(at, sound)
        return sound

    def _feel(self, at: int, most: int) -> int:
        """How many events from `at` on are sound, found so that the cost follows the number."""
        low, high = 0, 1
        while high <= most and self._is_sound(at, high):
            low, high = high, high * 2
        high = min(high - 1, most)
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_sound(at, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _next_sound(self, at: int) -> int | None:
        """The first event behind the damaged one that is sound by itself; None if there is none yet."""
        if not self._final:
            try:
                self._list(self._starts[at], self._ends[-1])
            except FAILURES as error:
                # Open brackets at the end: the cut may lie inside nested data of one sound event.
                if "truncated" in str(error):
                    return None
        for candidate in range(at + 1, len(self._starts)):
            try:
                events = self._list(self._starts[candidate], self._ends[candidate])
            except FAILURES as error:
                # The last event, perhaps, and behind it the end of the list.
                if _trailing(error) is not None and self._sound_at(self._text, self._starts[candidate] + 1):
                    return candidate
                continue
            if _is_event(events):
                return candidate
        return None

    def _mend(self, text: bytes, at_end: bool) -> None:
        """Take out of the text of one or more damaged events what can be read."""
        starts = [match.start() for match in _START.finditer(text) if self._is_start(text, match.start())]
        at = 0
        taken = None
        for number, start in enumerate(starts):
            if start < at:
                continue
            for end in self._possible_ends(text, starts[number + 1 : number + 9]):
                taken = self._take(text[start:end])
                if taken is not None:
                    break
            if taken is None:
                continue
            self._note_gap(text[at:start], first=at == 0)
            event, length = taken
            self._found.lists.append([event])
            at = start + length
            closing = _LIST_END.match(text, at)
            if at_end and closing and _AFTER_LIST.match(text, closing.end()):
                self._found.tail = text[closing.end() :]
                return
        rest = text[at:].strip(_SEPARATORS)
        if rest and at_end:
            self._notes.add("cut_off", "the file ends within an event: that event is lost")
        elif rest:
            self._note_gap(rest, first=False)

    def _is_start(self, text: bytes, start: int) -> bool:
        """Whether an event starts here: not inside another, or in one that is never closed behind it."""
        if not _is_nested(text, start):
            return True
        sound = self._sound_at(text, start)
        return sound is not None and _UNCLOSED.match(text, start + sound[1]) is not None

    def _note_gap(self, text: bytes, first: bool) -> None:
        if text.strip(_SEPARATORS):
            self._notes.add(
                "unreadable", "{count} unreadable places among the events: what stood there is lost"
            )
        elif not first and text.count(b",") != 1:
            self._notes.add("separator", "{count} missing or doubled commas between events: nothing is lost")

    def _take(self, text: bytes) -> tuple[Any, int] | None:
        """The event that the text starts with, mended if need be, and where it ends."""
        sound = self._sound_at(text, 0)
        if sound is not None:
            return sound
        mended = mend(text)
        event = None if mended is None else _only_event(self._decode, b"[" + mended[0] + b"]")
        if mended is None or event is None:
            return None
        self._notes.add("mended", "{count} damaged events: read except for the damaged values")
        return event, mended[1]

    def _sound_at(self, text: bytes, start: int) -> tuple[Any, int] | None:
        """The sound event that starts at `start`, and how long it is."""
        length = _value_length(memoryview(text)[start:])
        event = (
            None if length is None else _only_event(self._decode, b"[" + text[start : start + length] + b"]")
        )
        return None if event is None or length is None else (event, length)

    def _possible_ends(self, text: bytes, following: list[int]) -> list[int]:
        """Where an event may end: before what looks like the next one, or, if that lies inside it, further on."""
        ends = []
        for start in following:
            ends.append(start)
            if _starts_list(text, start) or self._sound_at(text, start):
                return ends
        return ends if len(ends) == 8 else [*ends, len(text)]


def _value_length(text: memoryview) -> int | None:
    """How long the sound JSON value is that the text starts with, with the space behind it."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except FAILURES as error:
        return _trailing(error)
    return len(text)


def _only_event(decode_list: DecodeList, text: bytes) -> Any | None:
    try:
        events = decode_list(text)
    except FAILURES:
        return None
    return events[0] if _is_event(events) else None


def _is_event(events: list[Any]) -> bool:
    return len(events) == 1 and getattr(events[0], "ph", None) is not None


def _is_nested(text: bytes, start: int) -> bool:
    return _NESTED.search(text, max(0, start - 100), start) is not None and not _starts_list(text, start)


def _starts_list(text: bytes, start: int) -> bool:
    return _LIST_START.search(text, max(0, start - 100), start) is not None
