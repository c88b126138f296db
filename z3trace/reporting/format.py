"""Numbers as a person reads them."""

UNKNOWN = "–"


def milliseconds(ns: float | None) -> str:
    """Nanoseconds as milliseconds with three significant digits; a dash for unknown."""
    if ns is None:
        return UNKNOWN
    ms = ns / 1e6
    if ms == 0:
        return "0 ms"
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 1 else 3
    return f"{ms:.{digits}f} ms"


def size(count: float | None) -> str:
    """Bytes in decimal units; a dash for unknown."""
    if count is None:
        return UNKNOWN
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def percent(fraction: float | None) -> str:
    """A fraction as whole percent; a dash for unknown."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.0f} %"


def count(value: float) -> str:
    """A mean count: whole where it is whole."""
    return f"{value:.0f}" if abs(value - round(value)) < 0.005 else f"{value:.1f}"
