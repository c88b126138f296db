"""Repairs the JSON text of one damaged event.

A tolerant reader that never recurses: it takes what can be read and writes it out again as valid JSON. Raw
control characters, unknown escapes, unescaped quotes, missing or doubled commas, NaN and Infinity, and
nesting deeper than any decoder takes cost at most the value they stand in.
"""

import re
from dataclasses import dataclass, field

MAX_DEPTH = 100
MAX_DIGITS = 100

_SPACE = re.compile(rb"[\s,\x00-\x1f]*")
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?(?=[\s,\]}]|\Z)")
_LITERAL = re.compile(rb"(?:true|false|null)(?=[\s,\]}]|\Z)")
_GARBAGE = re.compile(rb'[^\s,:"{}\[\]]+')
_COLON = re.compile(rb"\s*:")
_AFTER_VALUE = re.compile(rb'\s*(?:,?\s*"(?:[^"\\]{1,80})"\s*:|[}\]]|\Z)')
_AFTER_ITEM = re.compile(rb"\s*[,\]]")
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|[\x00-\x1f"\\]')
_PLAIN = {b"\n": b"\\n", b"\t": b"\\t", b"\r": b"\\r"}


@dataclass
class _Container:
    is_object: bool
    items: list[bytes] = field(default_factory=list)
    key: bytes | None = None

    def add(self, value: bytes) -> None:
        if not self.is_object:
            self.items.append(value)
        elif self.key is not None:
            self.items.append(self.key + b":" + value)
            self.key = None

    def text(self) -> bytes:
        inner = b",".join(self.items)
        return b"{" + inner + b"}" if self.is_object else b"[" + inner + b"]"


def mend(text: bytes) -> tuple[bytes, int] | None:
    """Valid JSON of the object that `text` starts with and where it ends there; None if it has no end."""
    at = _SPACE.match(text).end()  # type: ignore[union-attr]
    if text[at : at + 1] != b"{":
        return None
    stack: list[_Container] = []
    size = len(text)
    while at < size:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        character = text[at : at + 1]
        if character in (b"{", b"["):
            stack.append(_Container(character == b"{"))
            at += 1
        elif character in (b"}", b"]"):
            at += 1
            if not _close(stack, character == b"}"):
                continue
            if len(stack) == 1 and stack[0].key == b"closed":
                return stack[0].items[0], at
        elif character == b'"':
            at = _read_string(text, at, stack[-1])
        else:
            at = _read_scalar(text, at, stack[-1])
    return None


def _close(stack: list[_Container], is_object: bool) -> bool:
    """Close the innermost container of this sort, with all that was left open inside it."""
    if not any(container.is_object == is_object for container in stack):
        return False
    while True:
        done = stack.pop()
        text = done.text() if len(stack) < MAX_DEPTH else b"null"
        if not stack:
            stack.append(_Container(False, [text], b"closed"))
            return True
        stack[-1].add(text)
        if done.is_object == is_object:
            return True


def _read_string(text: bytes, at: int, container: _Container) -> int:
    is_key = container.is_object and container.key is None
    follow = _COLON if is_key else _AFTER_VALUE if container.is_object else _AFTER_ITEM
    strict = _STRING.match(text, at)
    if strict and follow.match(text, strict.end()):
        end = strict.end()
    elif is_key:
        # No key: perhaps the rest of a string whose quotes were not escaped.
        return strict.end() if strict else at + 1
    else:
        end = at + 1
        while True:
            quote = text.find(b'"', end)
            if quote < 0:
                return len(text)
            end = quote + 1
            if follow.match(text, end):
                break
    content = text[at + 1 : end - 1]
    if not strict or strict.end() != end or _SURROGATE.search(content):
        content = _escape(content)
    string = b'"' + content + b'"'
    if is_key:
        container.key = string
        return follow.match(text, end).end()  # type: ignore[union-attr]
    container.add(string)
    return end


def _escape(content: bytes) -> bytes:
    def replace(match: re.Match[bytes]) -> bytes:
        found = match.group()
        if _SURROGATE.match(found):
            return b"\\ufffd"
        if len(found) > 1 and found != b'\\"':
            return found
        if found in (b'"', b'\\"'):
            return b'\\"'
        return _PLAIN.get(found, b"\\\\" if found == b"\\" else b"\\u%04x" % found[0])

    return _ESCAPE.sub(replace, content)


def _read_scalar(text: bytes, at: int, container: _Container) -> int:
    scalar = _NUMBER.match(text, at) or _LITERAL.match(text, at)
    if scalar:
        container.add(scalar.group() if len(scalar.group()) <= MAX_DIGITS else b"null")
        return scalar.end()
    garbage = _GARBAGE.match(text, at)
    container.add(b"null")
    return garbage.end() if garbage else at + 1
