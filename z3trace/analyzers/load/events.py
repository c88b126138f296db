"""The text of a list of events -> decoded events, whole where it is sound, event by event where it is damaged.

Event boundaries are found in the text: `},` then `{` and the quote of a key that only events have. Such a match
cannot lie inside a sound string, because there the quote before the key would end it.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from z3trace.analyzers.load.mend import mend
from z3trace.analyzers.load.notes import Notes

_KEYS = rb'"(?:ph|name|cat|ts|pid|tid|id|args|dur|bp|s)"\s*:'
_BOUNDARY = re.compile(rb"\}\s*,(?=\s*\{\s*" + _KEYS + rb")")
_START = re.compile(rb"\{\s*(?:" + _KEYS + rb')|(?<=[,}\s])\{\s*"')
_POSITION = re.compile(r"\(byte (\d+)\)")
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_AFTER_LIST = re.compile(rb'\s*(?:,\s*"|\}|\Z)')

DecodeList = Callable[[Any], list[Any]]
_FAILURES = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def last_boundary(text: bytes, searched: int = 0) -> int:
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


def list_end(text: bytes, error: Exception) -> int | None:
    """Where the list of events ends in `text`, if decoding failed only because something follows it."""
    trailing = _TRAILING.search(str(error))
    if trailing is None:
        return None
    end = int(trailing.group(1))
    if not text[:end].rstrip().endswith(b"]"):
        end -= 1  # the position counts the first character behind the list in
    return end if _AFTER_LIST.match(text, end) else None


@dataclass
class Recovered:
    """Events of a damaged text, the position where an unfinished one starts (None: nothing is left over)."""

    lists: list[list[Any]]
    rest: int | None


class Recovery:
    """Reads a damaged list of events: everything that is sound, and of the rest what can be mended."""

    def __init__(self, notes: Notes, decode_list: DecodeList) -> None:
        self._notes = notes
        self._decode = decode_list

    def recover(self, text: bytes, final: bool) -> Recovered:
        """`text` is `[event, event, …` without the closing bracket, cut at a boundary or at the end of the file.

        `final` says that nothing more comes: an event that is cut off is then lost, else it is left over.
        """
        sound = text.decode("utf-8", "replace")
        replaced = sound.count("\ufffd") - text.count("\ufffd".encode())
        if replaced:
            self._notes.add("invalid_utf8", "{count} invalid UTF-8 sequences in strings: replaced", replaced)
            text = sound.encode()
        del sound
        buffer = bytearray(text + b"]")
        view = memoryview(buffer)
        commas = [match.end() - 1 for match in _BOUNDARY.finditer(text)]
        starts = [0, *commas]  # of the bracket or comma before each event
        ends = [*commas, len(text)]
        recovered = Recovered([], None)
        at = 0
        while at < len(starts):
            good = self._sound_run(view, starts, ends, at, recovered.lists)
            at += good
            if at == len(starts):
                break
            following = self._next_sound(view, starts, ends, at, final)
            if following is None:
                if not final:
                    recovered.rest = starts[at]
                    break
                following = len(starts)
            self._mend(text[starts[at] + 1 : ends[following - 1]], recovered.lists, following == len(starts))
            at = following
        return recovered

    def _list(self, view: memoryview, start: int, end: int) -> list[Any]:
        """Decode the events between two commas, in place: the commas become brackets meanwhile."""
        first, last = view[start], view[end]
        view[start], view[end] = ord("["), ord("]")
        try:
            return self._decode(view[start : end + 1])
        finally:
            view[start], view[end] = first, last

    def _sound_run(
        self, view: memoryview, starts: list[int], ends: list[int], at: int, lists: list[list[Any]]
    ) -> int:
        """Decode as many events from `at` on as are sound; returns their number."""
        try:
            lists.append(self._list(view, starts[at], ends[-1]))
            return len(starts) - at
        except _FAILURES as error:
            position = _POSITION.search(str(error))
        low = 0
        if position:
            high = bisect_left(starts, starts[at] + int(position.group(1)), at) - at
            for count in range(high, max(high - 3, 0), -1):
                try:
                    lists.append(self._list(view, starts[at], ends[at + count - 1]))
                    return count
                except _FAILURES:
                    high = count - 1
        else:
            # The decoder did not say where: feel the way forward, so that the cost follows the distance.
            high = 1
            while at + high <= len(starts):
                try:
                    self._list(view, starts[at], ends[at + high - 1])
                except _FAILURES:
                    break
                low, high = high, high * 2
            high = min(high, len(starts) - at)
        while low < high:
            middle = (low + high + 1) // 2
            try:
                self._list(view, starts[at], ends[at + middle - 1])
                low = middle
            except _FAILURES:
                high = middle - 1
        if low:
            lists.append(self._list(view, starts[at], ends[at + low - 1]))
        return low

    def _next_sound(
        self, view: memoryview, starts: list[int], ends: list[int], at: int, final: bool
    ) -> int | None:
        """The first event behind the damaged one that is sound by itself; None if the damage may reach further."""
        if not final:
            try:
                self._list(view, starts[at], ends[-1])
            except _FAILURES as error:
                # Open brackets at the end: the cut may lie inside nested data of one sound event.
                if "truncated" in str(error):
                    return None
        for candidate in range(at + 1, len(starts)):
            try:
                (event,) = self._list(view, starts[candidate], ends[candidate])
            except (*_FAILURES, ValueError):
                continue
            if getattr(event, "ph", None) is not None:
                return candidate
        return len(starts) if final else None

    def _mend(self, text: bytes, lists: list[list[Any]], cut_off: bool) -> None:
        """Take out of the text of one or more damaged events what can be read."""
        starts = [match.start() for match in _START.finditer(text) if not _is_nested(text, match.start())]
        at = starts[0] if starts else len(text)
        lost = not starts
        for number, start in enumerate(starts):
            if start < at:
                continue
            event = None
            for end in [*starts[number + 1 : number + 9], len(text)]:
                part = text[start:end].rstrip(b", \r\n\t")
                event = self._event(part) or self._mended(part)
                if event is not None:
                    at = end
                    lists.append([event])
                    break
            lost = lost or event is None
        if lost:
            kind = "cut_off" if cut_off else "unreadable"
            words = (
                "the file ends within an event" if cut_off else "{count} unreadable places among the events"
            )
            self._notes.add(kind, f"{words}: the event there is lost")

    def _event(self, text: bytes) -> Any | None:
        try:
            (event,) = self._decode(b"[" + text + b"]")
        except (*_FAILURES, ValueError):
            return None
        return event if getattr(event, "ph", None) is not None else None

    def _mended(self, text: bytes) -> Any | None:
        mended = mend(text)
        event = None if mended is None else self._event(mended)
        if event is not None:
            self._notes.add("mended", "{count} damaged events: read except for the damaged values")
        return event


def _is_nested(text: bytes, start: int) -> bool:
    return text[:start].rstrip()[-1:] in (b":", b"[")
