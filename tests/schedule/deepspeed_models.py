"""Small models, each with a habit that changes what stage 3 does; run by real DeepSpeed beside the schedule."""

import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 32
ROUTE = random.Random(0)  # the same on all ranks: drives what depends on data


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(functional.scaled_dot_product_attention(q, k, v))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width, mixer=MLP):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = mixer(width)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Plain(nn.Module):
    """Embedding, blocks, head."""

    block = Block

    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def run_block(self, number, x):
        return self.blocks[number](x)

    def order(self):
        return range(len(self.blocks))

    def forward(self, tokens):
        x = self.embed(tokens)
        for number in self.order():
            x = self.run_block(number, x)
        return self.head(self.norm(x))


class Tied(Plain):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.head.weight = self.embed.weight


class Unused(Plain):
    """Two layers that are never called; one of them is frozen."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.spare = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)


class Grouped(Plain):
    """The recorder shards each block's MLP over another process group."""


class Adapter(nn.Module):
    """A frozen linear layer with two trained low-rank ones, as peft wraps it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class ReadingAdapter(Adapter):
    """Reads a weight of its child for its dtype, as peft does, which makes it an external parameter."""

    def forward(self, x):
        y = self.base_layer(x)
        x = x.to(self.lora_A["default"].weight.dtype)
        return y + self.lora_B["default"](self.lora_A["default"](x))


class Lora(Plain):
    adapter = Adapter

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.requires_grad_(False)
        for block in self.blocks:
            block.attn.qkv = self.adapter(block.attn.qkv)


class ReadingLora(Lora):
    adapter = ReadingAdapter


class CheckpointedLora(Lora):
    def run_block(self, number, x):
        if not self.training or number == 0:
            return self.blocks[number](x)
        return checkpoint(self.blocks[number], x, use_reentrant=False)


class Experts(nn.Module):
    """Separate experts, of which each call uses two that depend on the data, in an order that does, too."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(MLP(width) for _ in range(4))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        chosen = ROUTE.sample(range(4), 2)
        return sum(weights[..., number, None] * self.experts[number](x) for number in chosen)


class MoeBlock(Block):
    def __init__(self, width):
        super().__init__(width, Experts)


class Moe(Plain):
    block = MoeBlock


class Dynamic(Plain):
    """Skips blocks and changes their order now and then."""

    def order(self):
        order = list(range(len(self.blocks)))
        if ROUTE.random() < 0.4:
            ROUTE.shuffle(order)
        return order[: ROUTE.randint(1, len(order))] if ROUTE.random() < 0.3 else order


class Shared(Plain):
    """One block called over and over."""

    def __init__(self, width, depth):
        super().__init__(width, 1)
        self.times = depth

    def order(self):
        return [0] * self.times


class KeywordBlock(Block):
    def forward(self, *, hidden):
        x = hidden + self.attn(self.ln1(hidden))
        return x + self.mlp(self.ln2(x))


class Keywords(Plain):
    block = KeywordBlock

    def run_block(self, number, x):
        return self.blocks[number](hidden=x)


class PairBlock(Block):
    def forward(self, x, y):
        x = x + self.attn(self.ln1(x)) * y
        return x, self.mlp(self.ln2(x)) + y


class Pairs(Plain):
    """Blocks with two inputs and two outputs."""

    block = PairBlock

    def forward(self, tokens):
        x = self.embed(tokens)
        y = x * 2
        for block in self.blocks:
            x, y = block(x, y)
        return self.head(self.norm(x + y))


class BiasLast(nn.Linear):
    """Returns its bias instead of adding it."""

    def forward(self, x):
        return functional.linear(x, self.weight), self.bias


class LooseBiasMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = BiasLast(2 * width, width)

    def forward(self, x):
        y, bias = self.fc2(functional.gelu(self.fc1(x)))
        return y + bias


class LooseBias(Plain):
    @staticmethod
    def block(width):
        return Block(width, LooseBiasMLP)


class Checkpointed(Plain):
    reentrant = False

    def run_block(self, number, x):
        if not self.training:
            return self.blocks[number](x)
        return checkpoint(self.blocks[number], x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


FAMILIES = {
    family.__name__: family
    for family in (
        Plain,
        Tied,
        Unused,
        Grouped,
        Lora,
        ReadingLora,
        CheckpointedLora,
        Moe,
        Dynamic,
        Shared,
        Keywords,
        Pairs,
        LooseBias,
        Checkpointed,
        Reentrant,
    )
}


# Classes that may be leaves. DeepSpeed fails in backward when no input of a leaf requires a gradient, as in
# LoRA's first block or by keyword, and when a leaf that is called twice fits the gradient bucket twice.
LEAVES = {
    "*": ["Block", "MLP", "Attention"],
    "Moe": ["Experts", "MoeBlock"],
    "Pairs": ["MLP"],
    "LooseBias": ["Block"],
    "Keywords": ["MLP", "Attention"],
    "Lora": ["MLP"],
    "ReadingLora": ["MLP"],
    "CheckpointedLora": ["MLP"],
    "Shared": [],
}
NAMED_LEAVES = [{"names": ["blocks.0.mlp"]}, {"name_suffixes": [".mlp"]}]
BLOCKS_AS_LEAVES = frozenset(FAMILIES) - {"Shared", "Keywords", "Lora", "ReadingLora", "CheckpointedLora"}
WIDTHS = [6, 8]
PLAIN_TORCH = True


def logits_of(engine, tokens: torch.Tensor) -> torch.Tensor:
    return engine(tokens)
