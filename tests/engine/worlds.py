"""Run a function in several processes that form a gloo world.

    results = run_world(check, 3, "block")      # check("block") on each of 3 ranks; results by rank

The function is found by its file and name, so it must be at the top of a module; arguments and results are
pickled. The world has `timeout` seconds; processes are killed when it is over or when one of them failed.
"""

import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def run_world(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """What `function(*args)` returned on each rank. Raises AssertionError with the output of a failing rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task").write_bytes(
            pickle.dumps((inspect.getsourcefile(function), function.__name__, args))
        )
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
        processes = []
        for rank in range(world):
            with (folder / f"output{rank}").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, str(folder), str(rank), str(world), str(timeout)],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )
        try:
            _await(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        failed = [
            f"rank {rank} ended with {process.returncode}:\n{(folder / f'output{rank}').read_text()[-4000:]}"
            for rank, process in enumerate(processes)
            if process.returncode != 0
        ]
        assert not failed, "\n".join(failed)
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]


def _await(processes: list["subprocess.Popen[bytes]"], deadline: float) -> None:
    """Until all have ended, or one has failed and the others have had a moment to say why."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + 3)
        time.sleep(0.02)


def _main(folder: Path, rank: int, world: int, timeout: float) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    source, name, args = pickle.loads((folder / "task").read_bytes())
    sys.path.insert(0, str(Path(source).parent))
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(source).stem] = module
    spec.loader.exec_module(module)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    result = getattr(module, name)(*args)
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    while not all((folder / f"result{other}").exists() for other in range(world)):
        time.sleep(0.01)
    # A rank that tears its connections down makes gloo's threads abort in those that are still busy with theirs.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
