"""Time the demo's layouts against each other without a profiler, in one job and by turns.

Whatever else the machine does then disturbs all layouts alike. `python -m z3trace.demo.timing --help`.
"""

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

from z3trace.demo.train import Counting, build_engine, parse_arguments

WARM_UP = 5
TURNS = 8
STEPS_A_TURN = 5


def main(output: Path, layouts: dict[str, str], arguments: list[str]) -> None:
    """Write {layout: [nanoseconds of each timed step on rank 0]} to `output`."""
    options = parse_arguments(arguments)
    engines = {name: build_engine(options, unit) for name, unit in layouts.items()}
    data = Counting(options)
    durations: dict[str, list[int]] = {name: [] for name in layouts}
    for turn in range(TURNS + 1):
        names = list(layouts) if turn % 2 else list(layouts)[::-1]
        for name in names:
            dist.barrier()
            for _ in range(STEPS_A_TURN if turn else WARM_UP):
                start = time.perf_counter_ns()
                engine = engines[name]
                engine.backward(engine(data.next_batch()))
                engine.step()
                if turn:
                    durations[name].append(time.perf_counter_ns() - start)
        if dist.get_rank() == 0:
            print(f"turn {turn}/{TURNS}", flush=True)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(durations), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
