"""What was odd about a file: one entry for each kind, with a count and the first example."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadWarning:
    """One kind of damage or oddity: how often it was met and what was lost because of it."""

    kind: str
    count: int
    message: str

    def __str__(self) -> str:
        return self.message


class Notes:
    """Collects oddities while a file is read."""

    def __init__(self) -> None:
        self._found: dict[str, list[int | str]] = {}

    def add(self, kind: str, message: str, count: int = 1) -> None:
        """Count `count` more of `kind`; `message` may hold `{count}`, the first one given is kept."""
        entry = self._found.setdefault(kind, [0, message])
        entry[0] = int(entry[0]) + count

    def __contains__(self, kind: str) -> bool:
        return kind in self._found

    def warnings(self) -> tuple[LoadWarning, ...]:
        return tuple(
            LoadWarning(kind, int(count), str(message).replace("{count}", f"{count:,}"))
            for kind, (count, message) in self._found.items()
        )
