"""Microseconds as they stand in a trace -> integer nanoseconds, exactly.

A double holds microseconds with three decimals exactly enough only below 2**43; beyond that (the unix epoch
in microseconds with decimals) and where more than three decimals are given, the text of the number is
needed.
"""

import struct
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt

from z3trace.analyzers.load.fields import NULL

Int64 = npt.NDArray[np.int64]

ABSENT = float("nan")
"""Default of a time field when numbers are decoded."""

_EXACT_BELOW = float(1 << 43)
_LARGEST_US = 2**63 // 1000


class NeedText(Exception):
    """A double has lost digits: decode this block again with times as text."""


def numbers_to_ns(values: list[Any]) -> tuple[Int64, int]:
    """Decoded JSON values of one time field -> ns, and how many values were unusable (they become NULL)."""
    n = len(values)
    try:
        whole = np.frombuffer(struct.pack(f"{n}q", *values), np.int64)
    except struct.error:
        pass
    else:
        if n and (whole.max() >= _LARGEST_US or whole.min() <= -_LARGEST_US):
            raise NeedText
        return whole * 1000, 0
    try:
        us = _doubles(values)
    except (OverflowError, TypeError):
        raise NeedText from None
    present = us == us
    all_present = bool(present.all())
    if not all_present:
        us = np.where(present, us, 0.0)
    largest = float(np.abs(us).max(initial=0.0))
    if largest >= _EXACT_BELOW:
        raise NeedText
    floor = np.floor(us)
    thousandths = (us - floor) * 1000.0
    rounded = np.rint(thousandths)
    # Further decimals than three show as a rest larger than the spacing of doubles explains.
    if float(np.abs(thousandths - rounded).max(initial=0.0)) > float(np.spacing(largest)) * 500.0 + 1e-9:
        raise NeedText
    ns = floor.astype(np.int64) * 1000 + rounded.astype(np.int64)
    if not all_present:
        ns[~present] = NULL
    return ns, 0


def _doubles(values: list[Any]) -> npt.NDArray[np.float64]:
    try:
        return np.frombuffer(struct.pack(f"{len(values)}d", *values), np.float64)
    except struct.error:
        pass
    if any(type(value) not in (int, float) and value is not None for value in values):
        raise TypeError("a time that is no number")
    return np.array([ABSENT if value is None else value for value in values], np.float64)


def texts_to_ns(texts: Sequence[bytes]) -> tuple[Int64, int]:
    """JSON texts of one time field (empty: absent) -> ns, and how many values were unusable."""
    ns = np.full(len(texts), NULL, np.int64)
    given = [text for text in map(bytes, texts) if text]
    if not given:
        return ns, 0
    joined = b"\n".join(given) + b"\n"
    characters = np.frombuffer(joined, np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    dots = np.flatnonzero(characters == ord("."))
    unusable = 0
    exact: list[int]
    if len(dots) == len(ends) and bool((ends - dots == 4).all()) and not joined.strip(b"0123456789.\n"):
        exact = [int(text) for text in joined.replace(b".", b"").split()]
        if max(exact) >= 2**63:
            unusable = sum(value >= 2**63 for value in exact)
            exact = [value if value < 2**63 else NULL for value in exact]
    else:
        exact = []
        for text in given:
            value = _one_text(text)
            if value is None:
                unusable += 1
                value = NULL
            exact.append(value)
    values = np.array(exact, np.int64)
    if len(given) == len(texts):
        return values, unusable
    ns[np.fromiter((len(bytes(text)) > 0 for text in texts), np.bool_, len(texts))] = values
    return ns, unusable


def _one_text(text: bytes) -> int | None:
    plain = text.strip().strip(b'"').strip()
    if plain == b"null":
        return NULL
    if len(plain) > 64:
        return None
    try:
        number = Decimal(plain.decode("ascii", "replace"))
        if not number.is_finite() or number.adjusted() > 18:
            return None
        ns = int((number * 1000).to_integral_value())
    except (InvalidOperation, ValueError, OverflowError):
        return None
    return ns if -(2**63) < ns < 2**63 else None
