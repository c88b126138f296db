"""Time the demo's layouts against each other without a profiler, in one job and by turns.

Whatever else the machine does then disturbs all layouts alike.
`python -m z3trace.demo.timing OUTPUT LAYOUTS [OPTIONS OF TRAIN]` under a launcher.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from z3trace.demo.train import Counting, build_engine, parse_arguments

WARM_UP = 5
STEPS_A_TURN = 5
TURNS = 8
# On a busy machine fewer turns have to do.
FEWEST_TURNS = 3
SECONDS = 20.0


def main(output: Path, layouts: dict[str, str], arguments: list[str]) -> None:
    """Write {layout: [nanoseconds of each timed step on rank 0]} to `output`."""
    options = parse_arguments(arguments)
    engines = {name: build_engine(options, unit) for name, unit in layouts.items()}
    data = Counting(options)

    def steps(name: str, count: int) -> list[int]:
        durations = []
        for _ in range(count):
            start = time.perf_counter_ns()
            engines[name].backward(engines[name](data.next_batch()))
            engines[name].step()
            durations.append(time.perf_counter_ns() - start)
        return durations

    for name in layouts:
        steps(name, WARM_UP)
    timed: dict[str, list[int]] = {name: [] for name in layouts}
    begun = time.monotonic()
    for turn in range(1, TURNS + 1):
        for name in list(layouts)[:: 1 if turn % 2 else -1]:  # no layout always follows the same one
            dist.barrier()
            timed[name] += steps(name, STEPS_A_TURN)
        if dist.get_rank() == 0:
            print(f"turn {turn}/{TURNS}", flush=True)
        if turn >= FEWEST_TURNS and _over(time.monotonic() - begun > SECONDS):
            break
    if dist.get_rank() == 0:
        output.write_text(json.dumps(timed), encoding="utf-8")
    # Whoever still holds the process group keeps gloo's threads alive into Python's own end, where torch
    # aborts the process when one of them lets go of a tensor.
    engines.clear()
    gc.collect()
    dist.destroy_process_group()


def _over(late: bool) -> bool:
    """What rank 0 thinks, on every rank."""
    decision = torch.tensor([late])
    dist.broadcast(decision, 0)
    return bool(decision.item())


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
