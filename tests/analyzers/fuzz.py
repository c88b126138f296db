"""Damages traces in every way that still loads, and runs all analyses: `python fuzz.py SECONDS TRACE...`."""

import gzip
import json
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from z3trace.analyzers import analyze, open_run
from z3trace.errors import UserError

GARBAGE = [None, -1, 0, 1, 2**62, -(2**62), 2**70, 1.5, "", "x", "[]", [], {}, [[]], [[[-3]]], "NaN", True]
MARKS = ["ProfilerStep#3", "Optimizer.step#SGD.step", "autograd::engine::evaluate_function: X", "z3::fetch unit=a",
         "FSDP::all_gather (a.b)", "FSDP::pre_forward", "FullyShardedDataParallel.forward", "record_param_comms",
         "FullyShardedDataParallel._pre_backward_hook", "PreBackwardFunctionForModule", "c10d::barrier",
         "PostBackwardFunctionModule", "PreBackwardFunctionForModuleBackward", "gloo:all_gather", "nn.Module: A_0",
         "c10d::_allgather_base_", "c10d::reduce_scatter_", "dc::prefetch_params_fused", "cudaGraphLaunch",
         "symm_mem::multimem_all_gather_out", "ncclDevKernel_Generic", "Memcpy PtoP",
         "cudaStreamSynchronize"]  # fmt: skip


def read(path):
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def mutate(document, rng):
    """A damaged copy with at most 3000 events."""
    events = document["traceEvents"]
    keep = rng.randrange(1, min(3000, len(events)))
    begin = rng.randrange(len(events) - keep + 1)
    events = [dict(e) for e in events[begin : begin + keep]]
    if rng.random() < 0.5:
        share = rng.random()
        events = [e for e in events if rng.random() < share] or events[:1]
    names = [e.get("name") for e in events] + MARKS
    categories = ["kernel", "Kernel", "cpu_op", "gpu_memcpy", "gpu_memset", "user_annotation", "cuda_runtime"]
    for _ in range(rng.choice([0, 1, 10, len(events) // 4])):
        event = rng.choice(events)
        match rng.randrange(8):
            case 0:
                event["name"] = rng.choice(names)
            case 1:
                event["dur"] = rng.choice([0, 0.001, 1e6, -5, 1e300, None, *GARBAGE])
            case 2:
                event["ts"] = rng.choice([rng.choice(events).get("ts"), 0, -1, 1e300, None, *GARBAGE])
            case 3:
                event["tid"] = rng.choice([rng.choice(events).get("tid"), rng.choice(GARBAGE)])
            case 4:
                event["cat"] = rng.choice(categories)
            case 5:
                event.pop(rng.choice(list(event)), None)
            case 6:
                event["args"] = rng.choice([{}, rng.choice(events).get("args")])
            case _:
                args = event.get("args")
                if isinstance(args, dict) and args:
                    event["args"] = args | {rng.choice(list(args)): rng.choice(GARBAGE)}
    kept = {k: v for k, v in document.items() if k != "traceEvents" and rng.random() < 0.8}
    if rng.random() < 0.2 and "distributedInfo" in kept:
        kept["distributedInfo"] = rng.choice(
            [{}, [], {"pg_config": rng.choice(GARBAGE)}, {"world_size": "x"}]
        )
    return {**kept, "traceEvents": events}


def check(folder, window):
    """None, or the traceback of what is neither a report nor a user's error."""
    try:
        report = analyze(open_run([folder]), window=window)
        report.to_json()
        for row in report["steps"]:
            parts = ("compute_ns", "exposed_comm_ns", "exposed_memory_ns", "idle_ns")
            assert sum(row[p] for p in parts) == row["duration_ns"]
            for split in ("host_state", "cause"):
                pieces = report["idle"].where(rank=row["rank"], step=row["step"], split=split)
                assert sum(p["idle_ns"] for p in pieces) == row["idle_ns"], split
        for rank in report.ranks:
            for pieces in (rank.idle.host_state, rank.idle.cause):
                assert (pieces.starts < pieces.ends).all() and (pieces.starts[1:] >= pieces.ends[:-1]).all()
    except UserError:
        return None
    except Exception:
        return traceback.format_exc()
    return None


def run(document, model, seed, folder):
    """Damage one trace by one seed and analyse it; returns the traceback of a crash, or None."""
    rng = random.Random(seed)
    (folder / "rank0.json").write_text(json.dumps(mutate(document, rng)))
    if model is not None:
        (folder / "model.json").write_text(json.dumps(model))
    return check(folder, rng.choice(["device", "host"]))


def main(seconds, paths):
    documents = [read(path) for path in paths]
    models = [path.parent / "model.json" for path in paths]
    end, seed, failures = time.monotonic() + seconds, 0, {}
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            which = seed % len(paths)
            model = json.loads(models[which].read_text()) if models[which].exists() else None
            (Path(folder) / "model.json").unlink(missing_ok=True)
            crash = run(documents[which], model, seed, Path(folder))
            if crash is not None:
                failures.setdefault("\n".join(crash.splitlines()[-4:]), (seed, paths[which], crash))
            seed += 1
    print(seed, "runs,", len(failures), "failures")
    for seed, path, crash in failures.values():
        print(seed, path, crash)


if __name__ == "__main__":
    main(float(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
