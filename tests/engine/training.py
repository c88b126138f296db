"""The same training by the engine, by DistributedDataParallel, and by whole replicas; run inside a world."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import z3trace.engine as z3


@dataclass(frozen=True)
class Run:
    """What a training left behind: the loss of every micro-batch, and parameters and first gradients by name."""

    losses: list[float]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    model: str = "Chain"
    steps: int = 20
    accumulation: int = 1
    clipping: float = 0.5
    bf16: bool = False
    optimizer: str = "AdamW"
    zero: tuple[tuple[str, Any], ...] = ()

    def batches(self, step: int) -> list[Tensor]:
        rank, world = dist.get_rank(), dist.get_world_size()
        first = step * self.accumulation
        return [models.batch(i, rank, world) for i in range(first, first + self.accumulation)]

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(parameters, lr=1e-2)
        return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9)

    def by_engine(self, **own: Any) -> tuple[Run, Any]:
        """`own` goes into the section z3trace."""
        model = models.build(self.model)
        engine = z3.initialize(model, self.make_optimizer, self.config(**own))
        losses, gradients = [], {}
        for step in range(self.steps):
            for tokens in self.batches(step):
                loss = engine(tokens)
                engine.backward(loss)
                if step == 0 and engine.is_gradient_accumulation_boundary():
                    gradients = {n: g.clone() for n, g in z3.full_gradients(engine).items()}
                engine.step()
                losses.append(loss.item())
        with z3.gathered(engine):
            parameters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        return Run(losses, parameters, gradients), engine

    def config(self, **own: Any) -> dict[str, Any]:
        return {
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.bf16},
            "zero_optimization": dict(self.zero),
            "z3trace": own,
        }

    def by_ddp(self) -> Run:
        model = models.build(self.model)
        parallel = DistributedDataParallel(model)
        optimizer = self.make_optimizer([p for p in model.parameters() if p.requires_grad])
        losses, gradients = [], {}
        for step in range(self.steps):
            batches = self.batches(step)
            for tokens in batches:
                with nullcontext() if tokens is batches[-1] else parallel.no_sync():
                    loss = parallel(tokens)
                    (loss / self.accumulation).backward()
                losses.append(loss.item())
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            self._step(model, optimizer)
        return Run(losses, {n: p.detach().clone() for n, p in model.named_parameters()}, gradients)

    def by_replicas(self) -> Run:
        """Every rank holds the whole model and averages gradients itself; no gradient counts as zeros.

        In bf16 the computation runs on bf16 copies of fp32 weights.
        """
        model = models.build(self.model)
        masters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        optimizer = self.make_optimizer([nn.Parameter(m) for m in masters.values()])
        kept = dict(zip(masters, optimizer.param_groups[0]["params"], strict=True))
        if self.bf16:
            model = model.bfloat16()
        losses, gradients = [], {}
        for step in range(self.steps):
            for tokens in self.batches(step):
                loss = model(tokens)
                (loss / self.accumulation).backward()
                losses.append(loss.item())
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    kept[name].grad = grad.float() / dist.get_world_size()
                    dist.all_reduce(kept[name].grad)
                    parameter.grad = None
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in kept.items()}
            if self.clipping:
                nn.utils.clip_grad_norm_(list(kept.values()), self.clipping)
            optimizer.step()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in kept:
                        parameter.copy_(kept[name])
        frozen = {n: p.detach() for n, p in model.named_parameters() if n not in kept}
        return Run(losses, {**{n: p.detach() for n, p in kept.items()}, **frozen}, gradients)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.clipping:
            nn.utils.clip_grad_norm_(model.parameters(), self.clipping)
        optimizer.step()
        optimizer.zero_grad()


def compare(ours: Run, reference: Run) -> dict[str, float]:
    """The largest relative differences: of losses, and per parameter of gradients and weights by their norm."""
    unused = {name for name, gradient in reference.gradients.items() if not gradient.any()}
    assert ours.gradients.keys() >= reference.gradients.keys() - unused
    assert ours.parameters.keys() == reference.parameters.keys()
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(ours.losses, reference.losses, strict=True)),
        "gradient": max(map(partial(_distance, ours.gradients, reference.gradients), ours.gradients)),
        "parameter": max(
            map(partial(_distance, ours.parameters, reference.parameters), reference.parameters)
        ),
    }


def _distance(ours: dict[str, Tensor], reference: dict[str, Tensor], name: str) -> float:
    scale = reference[name].float().norm().clamp(min=1e-6)
    return float((ours[name].float() - reference[name].float()).norm() / scale)
