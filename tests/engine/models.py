"""Small models, each with something that an engine can get wrong. Sizes do not divide by 2, 3 or 4."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 7
CLASSES = 11


class Block(nn.Module):
    """A residual MLP with a norm: 7 parameters, 253 elements at dim 7."""

    def __init__(self, dim: int = DIM, hidden: int = 15) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Embedding, blocks, norm, head: what most models are."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embedding(tokens))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Frozen(Chain):
    """Frozen base with trainable adapters, and first layers that need no backward at all."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapters = nn.ModuleDict()
        for index in (1, 2):
            layer = self.layers[index]
            layer.up = Adapted(layer.up)
        self.norm.requires_grad_(True)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank trainable correction."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Twice(Chain):
    """Some blocks run twice, with others between."""

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2, 3, 3, 1):
            x = self.layers[index](x)
        return x


class Reversed(Chain):
    """Runs in another order than it was registered in."""

    def body(self, x: Tensor) -> Tensor:
        for index in (3, 0, 2, 1):
            x = self.layers[index](x)
        return x


class Branches(Chain):
    """Two blocks side by side, both fed by the same input."""

    def body(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[3](self.layers[1](x) + self.layers[2](x) * 2)


class Dynamic(Chain):
    """The order changes with every forward."""

    calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        order = [0, 1, 2, 3]
        for index in order[self.calls % 4 :] + order[: self.calls % 3]:
            x = self.layers[index](x)
        return x


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Tensor | None]


class StructuredBlock(Block):
    """Returns tensors inside a dataclass, a mapping and a tuple."""

    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        y = super().forward(x)
        return Output(y, {"square": (y * y).mean(), "none": None})


class Structured(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StructuredBlock() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        extra = x.new_zeros(())
        for layer in self.layers:
            output = layer(x)
            x = output.hidden
            extra = extra + output.extra["square"]
        return x + 0.01 * extra


class Nested(Chain):
    """Blocks in lists of lists of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(Block() for _ in range(n)) for n in (1, 3, 2))

    def body(self, x: Tensor) -> Tensor:
        for stage in self.layers:
            for layer in stage:
                x = layer(x)
        return x


class ViewBlock(Block):
    """Returns a view, on which the model then works in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1).transpose(0, 1)


class InPlace(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ViewBlock() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 0.5
        return x


class External(Chain):
    """Modules that read parameters of others."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        # Not through the block's forward: its parts are called from the model.
        last = self.layers[-1]
        return x + last.down(last.up(x)) * self.layers[0].gain


class Attention(Chain):
    """MultiheadAttention reads the weight of its child without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 1, batch_first=True)
        self.scales = nn.ParameterList([torch.ones(DIM), torch.ones(3)])

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x) * self.scales[0]
        return x + self.attention(x, x, x, need_weights=False)[0]


class Unused(Chain):
    """A parameter and a block that never run, and one whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 5)

    def body(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.layers[1](x)
        return self.layers[3](x)


class RankDependent(Chain):
    """Which outputs reach the loss differs from rank to rank; all blocks run on all ranks."""

    def body(self, x: Tensor) -> Tensor:
        rank = torch.distributed.get_rank()
        for index, layer in enumerate(self.layers):
            y = layer(x)
            if index % (rank + 2) != 1:
                x = y
        return x


class Checkpointed(Chain):
    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedPairs(Chain):
    """One checkpoint over two blocks."""

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 2):
            x = checkpoint(self._pair, x, index, use_reentrant=False)
        return x

    def _pair(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index + 1](self.layers[index](x))


class CheckpointedPairsReentrant(Chain):
    def body(self, x: Tensor) -> Tensor:
        for index in (0, 2):
            x = checkpoint(self._pair, x, index, use_reentrant=True)
        return x

    def _pair(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index + 1](self.layers[index](x))


class Buffers(Chain):
    """Buffers of several dtypes, one of them not contiguous and one shared; a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(DIM) > 0.3)
        self.register_buffer("wide", torch.rand(1, DIM).expand(3, DIM))
        self.register_buffer("scalar", torch.tensor(1.5))
        self.register_buffer("count", torch.arange(5))
        self.batch_norm = nn.BatchNorm1d(DIM)

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x) * self.mask * self.wide[1] * self.scalar
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class Mixture(nn.Module):
    """Separate experts, of which the data choose one: ranks differ in which."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x.detach().sum().abs() * 100) % len(self.experts)](x)


class Experts(Chain):
    """A mixture of experts after every block; a leaf where a schedule gathers modules on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(Mixture() for _ in self.layers)

    def body(self, x: Tensor) -> Tensor:
        for layer, mixture in zip(self.layers, self.mixtures, strict=True):
            x = layer(x)
            x = x + mixture(x)
        return x


class Single(nn.Module):
    """No block, one parameter of one element fewer than the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.weight * tokens.float().mean() - 2).square().sum()


MODELS = {
    kind.__name__: kind
    for kind in (
        Chain, Tied, Frozen, Twice, Reversed, Branches, Dynamic, Structured, Nested, InPlace, External, Attention,
        Unused, RankDependent, Checkpointed, CheckpointedReentrant, CheckpointedPairs,
        CheckpointedPairsReentrant, Buffers, Experts, Single,
    )
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(index: int, rank: int, world: int) -> Tensor:
    """Tokens of shape (2, 5) that count upwards, from another start for every rank and index."""
    generator = torch.Generator().manual_seed(index * world + rank)
    return (torch.randint(0, CLASSES, (2, 1), generator=generator) + torch.arange(5)) % CLASSES
