"""A transformer of the transformers library under DeepSpeed, profiled: `deepspeed_run.py RANK PORT OUT MODE`.

Writes the trace and, on rank 0, beside it what DeepSpeed's own methods were called for: `truth.json`, and a
`model.json` of the model. MODE holds words: prefetch, checkpoint, reentrant.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WORLD, STEPS = 2, 3
KIND = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip


def log_gathers(names):
    """Wrap DeepSpeed's methods; returns the list that fills: (step, module, parameters not there yet)."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Coordinator,
    )

    log, state = [], {"step": None, "module": None}
    fetch, gather = (
        Coordinator.fetch_sub_module,
        Coordinator._PartitionedParameterCoordinator__all_gather_params_,
    )

    def logged_fetch(self, module, *args, **options):
        outer, state["module"] = state["module"], names[module]
        try:
            return fetch(self, module, *args, **options)
        finally:
            state["module"] = outer

    def logged_gather(self, params, *args, **options):
        if any(param.ds_status.name == "NOT_AVAILABLE" for param in params):
            log.append((state["step"], state["module"]))
        return gather(self, params, *args, **options)

    Coordinator.fetch_sub_module = logged_fetch
    Coordinator._PartitionedParameterCoordinator__all_gather_params_ = logged_gather
    return log, state


def main(rank, port, out, mode):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}  # fmt: skip
    import deepspeed
    import transformers

    # A C++ operator that only inference uses, and that takes a compiler and over a minute to build.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**KIND))
    if "checkpoint" in mode:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in mode})
    model.train()
    settings = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 2000 if "prefetch" in mode else 0}  # fmt: skip
    names = {module: name for name, module in model.named_modules()}
    description = {
        "modules": list(names.values()),
        "parameters": {n: {"shape": list(p.shape), "numel": p.numel()} for n, p in model.named_parameters()},
        "zero_optimization": settings, "world_size": WORLD,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings,
                "zero_allow_untested_optimizer": True},
    )  # fmt: skip
    log, state = log_gathers(names)
    tokens = torch.randint(0, KIND["vocab_size"], (1, 16))

    def step(number):
        state["step"] = number
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()

    for _ in range(2):
        step(None)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=STEPS - 1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(out / f"rank{rank}.json")),
    ) as profiler:  # fmt: skip
        for number in range(STEPS):
            step(number)
            profiler.step()
    if rank == 0:
        (out / "truth.json").write_text(json.dumps(log))
        (out / "model.json").write_text(json.dumps(description))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
