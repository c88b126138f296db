"""Which module call each of DeepSpeed's hook events belongs to.

A hook runs an autograd function for each positional tensor that enters a module (none for calls with
keyword arguments only) and for each tensor that leaves it. So the events of a forward are runs of entries
and runs of exits, in turn: a run of entries goes down to a module that calls no other, a run of exits comes
up from it. These runs are aligned with those of the model's calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from z3trace.engine.schedule.calls import Call


@dataclass(frozen=True)
class Hook:
    """One event of a hook: its row in the trace, and whether it is an exit."""

    row: int
    is_exit: bool


@dataclass
class _Run:
    """Calls (by number) that begin one inside the other, and those that end, innermost first."""

    entered: list[int]
    left: list[int]


class CallTree:
    """The calls of a model's forward, numbered in the order in which they begin."""

    def __init__(self, root: Call) -> None:
        self.names: list[str] = []
        self._parents: list[int] = []
        self._runs: list[_Run] = []
        self._first_run: list[int] = []
        self._last_run: list[int] = []
        self._add(root, -1)

    def _add(self, call: Call, parent: int) -> None:
        number = len(self.names)
        self.names.append(call.module)
        self._parents.append(parent)
        if not self._runs or self._runs[-1].left:
            self._runs.append(_Run([], []))
        self._runs[-1].entered.append(number)
        self._first_run.append(len(self._runs) - 1)
        self._last_run.append(0)
        for inner in call.inner:
            self._add(inner, number)
        self._runs[-1].left.append(number)
        self._last_run[number] = len(self._runs) - 1

    def align(self, hooks: Sequence[Hook], top: int = 0, *, whole: bool = True) -> dict[int, int] | None:
        """Call number of each hook event of one or several forwards of the call `top`; None if they do not fit.

        `whole=False`: the forward may stop early, as activation checkpointing's second one does.
        """
        runs = self._runs[self._first_run[top] : self._last_run[top] + 1]
        found = list(_runs_of(hooks))
        if not found or not found[0][0]:
            return None
        if len(found) % len(runs) or not found[-1][1] if whole else len(found) > len(runs):
            return None
        calls: dict[int, int] = {}
        for k, (entries, exits) in enumerate(found):
            run = runs[k % len(runs)]
            below = [c for c in run.entered if c >= top]
            # Calls without an event are the outer ones; further events of one call are those of the outermost.
            for row, position in zip(
                reversed(entries), range(len(below) - 1, -len(entries), -1), strict=False
            ):
                calls[row] = below[max(position, 0)]
            inside = [c for c in run.left if c >= top]
            for position, row in enumerate(exits):
                calls[row] = inside[min(position, len(inside) - 1)]
        return calls

    def around(self, call: int) -> Iterator[int]:
        """The call and those it lies in, innermost first."""
        while call >= 0:
            yield call
            call = self._parents[call]

    def before(self, call: int) -> Iterator[int]:
        """The calls that end before this one begins, latest first; of those that end together the outer first."""
        limit = self._first_run[call]
        ended = [c for c in range(call) if self._last_run[c] < limit]
        return iter(sorted(ended, key=lambda c: (-self._last_run[c], c)))

    def length(self, call: int) -> int:
        """The number of runs of one call."""
        return self._last_run[call] - self._first_run[call] + 1


def _runs_of(hooks: Sequence[Hook]) -> Iterator[tuple[list[int], list[int]]]:
    entries: list[int] = []
    exits: list[int] = []
    for hook in hooks:
        if exits and not hook.is_exit:
            yield entries, exits
            entries, exits = [], []
        (exits if hook.is_exit else entries).append(hook.row)
    if entries or exits:
        yield entries, exits


def without_inner(call: Call, leaves: frozenset[str]) -> Call:
    """The calls as hooks see them when some modules are leaves, whose inner calls have no hooks."""
    inner = () if call.module in leaves else tuple(without_inner(c, leaves) for c in call.inner)
    return Call(call.module, inner)


def numbered(hooks: Sequence[Hook]) -> Call:
    """The calls that the events alone show, named by the order in which they begin."""
    root = _Node("call 0", [])
    stack = [root]
    count = 0
    for hook in hooks:
        if not hook.is_exit:
            node = _Node(f"call {count}", []) if count else root
            if count:
                stack[-1].inner.append(node)
                stack.append(node)
            count += 1
        elif len(stack) > 1:
            stack.pop()
    return root.frozen()


@dataclass
class _Node:
    name: str
    inner: list["_Node"]

    def frozen(self) -> Call:
        return Call(self.name, tuple(node.frozen() for node in self.inner))
