"""Attribution without names: the layers of a model show as a repetition in the sizes of its gathers."""

from collections.abc import Sequence

from z3trace.analyzers.attribution.base import Attribution, Owner, Placement
from z3trace.analyzers.collectives import Collectives


def find_repetition(sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """The longest stretch of a size sequence that repeats: (first index, period, repeats) or None.

    Among stretches of equal length the shortest period wins. At least two repeats of at least one gather.
    """
    best: tuple[int, int, int] | None = None
    n = len(sizes)
    for period in range(1, n // 2 + 1):
        run = 0
        for k in range(n - period):
            run = run + 1 if sizes[k] == sizes[k + period] else 0
            repeats = run // period + 1
            covered = repeats * period
            if repeats >= 2 and (best is None or covered > best[1] * best[2]):
                best = (k + 1 - run, period, repeats)
    return best


def attribute(framework: str, collectives: Collectives, placement: Placement) -> Attribution:
    """Layers by number of the repeat, from the gathers of each step's forward and, reversed, backward."""
    owners = [Owner()] * len(collectives)
    note: str | None = None
    groups: dict[tuple[int, int, str], list[int]] = {}
    for k in range(len(collectives)):
        if collectives.kind[k] == "all_gather" and placement.phase[k] in ("forward", "backward"):
            key = (int(placement.step[k]), int(placement.micro_batch[k]), placement.phase[k])
            groups.setdefault(key, []).append(k)
    for (_, _, phase), members in groups.items():
        sizes = [int(collectives.bytes[k]) for k in members]
        found = find_repetition(sizes)
        if found is None:
            continue
        first, period, repeats = found
        for repeat in range(repeats):
            number = repeats - 1 - repeat if phase == "backward" else repeat
            for k in members[first + repeat * period : first + (repeat + 1) * period]:
                owners[k] = Owner(layer=f"repeat {number}")
        note = note or (
            f"no names in the trace: layers are told by repetition ({repeats} repeats of {period} "
            f"gather{'s' if period > 1 else ''} in {phase})"
        )
    if note is None and any(k == "all_gather" for k in collectives.kind):
        note = "no names in the trace and no repetition in the sizes: gathers are not attributed to layers"
    return Attribution(framework, tuple(owners), (note,) if note else ())
