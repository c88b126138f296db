"""Any Kineto or Chrome trace -> a Trace: exact to the nanosecond, in bounded memory, whatever its state."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from z3trace.analyzers.trace import Trace

BLOCK_BYTES = 1 << 20

__all__ = ["load"]


def load(path: str | Path, *, max_bytes: int | None = None, block_bytes: int = BLOCK_BYTES) -> "Trace":
    """Read one trace file.

    Args:
        path: `.json`, `.json.gz` or a `.zip` with one member, recognised by content; `-` is stdin.
        max_bytes: give up on a file that is larger than this when unpacked.
        block_bytes: how much text is decoded at a time; results do not depend on it.

    Returns:
        The trace, with every event that can be read; what was odd is in `Trace.warnings`.

    Raises:
        TraceError: in one line, when there is no trace in the file or it cannot be read.
    """
    # Here and not above: a Trace is made of parts of this package.
    from z3trace.analyzers.load.build import load_trace

    return load_trace(path, max_bytes, block_bytes)
