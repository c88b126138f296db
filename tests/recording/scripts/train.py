"""A small training with one of several libraries, written as a user would; nothing of z3trace is in it.

    train.py LIBRARY STEPS [JSON of settings]

It counts its own collectives, see counting.py, and writes them to counts.json.
"""

import json
import sys
from importlib import import_module

import counting
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS = 16, 3


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, checkpointing=False, tied=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 50, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def batch():
    return torch.randint(0, 50, (2, 8))


def without_inference(deepspeed):
    """Without a C++ operator that only inference uses, and that takes a compiler and over a minute to build."""
    import_module(f"{deepspeed.__name__}.comm.torch").build_shm_op = lambda: None


def deepspeed(steps, model, leaf_after=None, **config):
    import deepspeed

    without_inference(deepspeed)
    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        **config,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if leaf_after:
        deepspeed.utils.set_z3_leaf_modules(engine.module, [globals()[leaf_after]])
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(batch())
            with counting.phase("backward"):
                engine.backward(loss)
            with counting.phase("optimizer"):
                engine.step()
        counting.next_step()


def trainer(steps, _model, lora=False):
    """A tiny Llama in the Trainer of transformers, which resolves what is `auto`."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    without_inference(deepspeed)

    class EachStep(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            counting.next_step()

    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    arguments = TrainingArguments(
        output_dir="out", max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        deepspeed=config, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=100,
    )  # fmt: skip
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip
    if lora:
        from peft import LoraConfig, get_peft_model

        llama = get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(64)]
    Trainer(model=llama, args=arguments, train_dataset=data, callbacks=[EachStep()]).train()


def accelerate(steps, model):
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    without_inference(deepspeed)
    PartialState(cpu=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "stage3_prefetch_bucket_size": 1000, "stage3_param_persistence_threshold": 40,
        },
    }  # fmt: skip
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", deepspeed_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(steps):
        for _ in range(2):
            with accelerator.accumulate(model):
                loss = model(batch())
                with counting.phase("backward"):
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        counting.next_step()


def fsdp2(steps, model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    train(steps, fully_shard(model, mesh=mesh))


def fsdp1(steps, model, **settings):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    train(
        steps,
        FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **settings),
    )


def ddp(steps, model):
    train(steps, nn.parallel.DistributedDataParallel(model))


def plain(steps, model):
    train(steps, model)


def train(steps, model, accumulate=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for _ in range(accumulate):
            loss = model(batch())
            with counting.phase("backward"):
                loss.backward()
        with counting.phase("optimizer"):
            optimizer.step()
        optimizer.zero_grad()
        counting.next_step()


def main(library, steps, settings="{}"):
    settings = json.loads(settings)
    torch.manual_seed(0)
    model = Model(settings.pop("checkpointing", False), settings.pop("tied", False))
    if library not in ("deepspeed", "trainer", "accelerate"):
        dist.init_process_group("gloo")
    globals()[library](int(steps), model, **settings)
    counting.write("counts.json")
    dist.destroy_process_group()


main(*sys.argv[1:])
