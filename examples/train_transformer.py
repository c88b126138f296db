"""Train a small transformer with the z3trace engine.

    torchrun --nproc-per-node 2 examples/train_transformer.py
    z3trace record --nproc-per-node 2 examples/train_transformer.py --unit module

`--unit block` gathers the parameters of a whole transformer block at once; `--unit module` those of each
linear layer and norm on its own, as ZeRO-3 does by default.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import z3trace.engine as z3


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        hidden: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class Transformer(nn.Module):
    """A decoder that returns its own loss: the mean cross-entropy of the next token."""

    def __init__(self, vocabulary: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def build_engine(arguments: argparse.Namespace, unit: str) -> Any:
    """The model, the same on every rank, under the engine."""
    torch.manual_seed(0)
    model = Transformer(arguments.vocabulary, arguments.dim, arguments.layers, arguments.heads)
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "zero_optimization": {"stage": 3},
        "z3trace": {"schedule": "layerwise", "unit": unit},
    }
    return z3.initialize(model, optimizer=torch.optim.AdamW, config=config)


class Counting:
    """Batches of sequences that count upwards in steps of 1 to 9, each rank its own: easy to learn."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.shape = (arguments.batch, arguments.length + 1)
        self.vocabulary = arguments.vocabulary
        self.random = torch.Generator().manual_seed(1 + dist.get_rank())

    def next_batch(self) -> Tensor:
        batch, length = self.shape
        start = torch.randint(self.vocabulary, (batch, 1), generator=self.random)
        stride = torch.randint(1, 10, (batch, 1), generator=self.random)
        tokens: Tensor = (start + stride * torch.arange(length)) % self.vocabulary
        return tokens


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer with the z3trace engine.")
    parser.add_argument("--unit", choices=["block", "module"], default="block")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    engine = build_engine(arguments, arguments.unit)
    data = Counting(arguments)
    for step in range(arguments.steps):
        loss = engine(data.next_batch().to(engine.device))
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}/{arguments.steps} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
