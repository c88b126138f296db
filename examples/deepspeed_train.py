"""Train a small transformer with DeepSpeed ZeRO-3, without a line of z3trace in it.

    z3trace record --nproc-per-node 2 examples/deepspeed_train.py
    z3trace record --nproc-per-node 2 examples/deepspeed_train.py --leaf      # each layer as a whole

On a machine without GPUs set DS_ACCELERATOR=cpu; it then runs over gloo.
"""

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY = 1000


class Model(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": options.prefetch,
        "stage3_param_persistence_threshold": options.persistence,
    }
    if options.leaf:
        zero["leaf_module"] = {"classes": ["TransformerEncoderLayer"]}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": options.accumulate,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--prefetch", type=int, default=100_000, help="elements")
    parser.add_argument("--persistence", type=int, default=1_000, help="elements")
    parser.add_argument("--leaf", action="store_true", help="gather each layer as a whole")
    options = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model(options.dim, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(options))
    for step in range(options.steps):
        for _ in range(options.accumulate):
            loss = engine(torch.randint(0, VOCABULARY, (4, 65), device=engine.device))
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
