"""What recording says to the user, on stderr, so that the script's stdout stays the script's."""

import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """One line on stderr. A closed stderr is no reason to disturb a training."""
    try:
        print(f"z3trace: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def step_range(steps: Sequence[int]) -> str:
    """`step 7`, `steps 7-9`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"steps {steps[0]}-{steps[-1]}"
