"""Opening a trace: plain, gzip or zip, a path or stdin, recognised by content."""

import io
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, cast

from isal import igzip, isal_zlib

from z3trace.analyzers.errors import TraceError
from z3trace.analyzers.load.notes import Notes

STDIN = "-"

_igzip: Any = igzip
_IsalError: Any = isal_zlib.error


class Source:
    """A stream of decompressed bytes that survives damaged compression and counts what it gives."""

    def __init__(self, stream: IO[bytes], name: str, notes: Notes, max_bytes: int | None) -> None:
        self._stream = stream
        self.name = name
        self._notes = notes
        self._max_bytes = max_bytes
        self.total = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes; empty at the end of the file or where the compression is damaged."""
        try:
            data = self._stream.read(size)
        except (EOFError, zipfile.BadZipFile, OSError, _IsalError) as error:
            if isinstance(error, OSError) and not isinstance(error, _igzip.BadGzipFile):
                raise TraceError(f"{self.name}: {error.strerror or error}") from None
            self._notes.add(
                "compression", "the compressed file is cut off or damaged: what came before is kept"
            )
            return b""
        self.total += len(data)
        if self._max_bytes is not None and self.total > self._max_bytes:
            raise TraceError(f"{self.name}: larger than the limit of {self._max_bytes:,} bytes when unpacked")
        return data


@contextmanager
def open_source(path: str, notes: Notes, max_bytes: int | None) -> Iterator[Source]:
    """Open a trace for reading; raises TraceError in one line where that is impossible."""
    with ExitStack() as stack:
        try:
            raw = _open_raw(path, stack)
            start = raw.peek(4)[:4]
            stream: IO[bytes] = cast(IO[bytes], raw)
            if start[:2] == b"\x1f\x8b":
                stream = cast(IO[bytes], stack.enter_context(_igzip.open(raw, "rb")))
            elif start == b"PK\x03\x04":
                stream = stack.enter_context(_only_member(path, raw, stack))
        except OSError as error:
            raise TraceError(f"{path}: {_reason(path, error)}") from None
        yield Source(stream, "stdin" if path == STDIN else path, notes, max_bytes)


def _open_raw(path: str, stack: ExitStack) -> io.BufferedReader:
    if path == STDIN:
        return cast(io.BufferedReader, sys.stdin.buffer)
    return stack.enter_context(Path(path).open("rb"))


def _only_member(path: str, raw: io.BufferedReader, stack: ExitStack) -> IO[bytes]:
    seekable: IO[bytes] = cast(IO[bytes], raw) if path != STDIN else io.BytesIO(raw.read())
    try:
        archive = stack.enter_context(zipfile.ZipFile(seekable))
    except zipfile.BadZipFile:
        raise TraceError(f"{path}: a damaged zip file: unpack it with a repair tool first") from None
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise TraceError(
            f"{path}: a zip of {len(members)} files where one trace is expected: unpack it first"
        )
    try:
        return archive.open(members[0])
    except (RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path}: the zip member cannot be read ({error}): unpack it first") from None


def _reason(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "a directory where one trace file is expected"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    return error.strerror or str(error)
