"""Optimizers, groups and schedulers work on the shards as they do on whole parameters."""

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from worlds import run_world

import z3trace.engine as z3
from z3trace.errors import UserError


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices only, another rate for the head, and one parameter in no group."""
    named = dict(model.named_parameters())
    head = [p for n, p in named.items() if n.startswith("head")]
    matrices = [p for n, p in named.items() if p.ndim == 2 and not n.startswith("head")]
    rest = [p for n, p in named.items() if p.ndim < 2 and not n.startswith("head") and n != "norm.bias"]
    return [
        {"params": matrices, "weight_decay": 0.5},
        {"params": rest, "weight_decay": 0.0},
        {"params": head, "lr": 1e-3},
    ]


def train_in_groups(unit: str) -> float:
    """The largest difference to the same training on whole replicas, over all parameters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, whole = models.build("Chain"), models.build("Chain")
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    early = LambdaLR(optimizer, lambda step: 1 / (1 + step))  # built before initialize
    engine = z3.initialize(model, optimizer, {"z3trace": {"unit": unit}, "gradient_clipping": 0.3})
    assert engine.optimizer is optimizer
    reference = torch.optim.AdamW(groups(whole), lr=1e-2)
    schedulers = [early, LambdaLR(reference, lambda step: 1 / (1 + step))]
    for step in range(6):
        tokens = models.batch(step, rank, world)
        engine.backward(engine(tokens))
        engine.step()
        whole(tokens).backward()
        grouped = [p for group in reference.param_groups for p in group["params"]]
        for parameter in grouped:
            parameter.grad /= world
            dist.all_reduce(parameter.grad)
        norm = nn.utils.clip_grad_norm_(grouped, 0.3)
        assert torch.allclose(engine.get_global_grad_norm(), norm, rtol=1e-5)
        reference.step()
        whole.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
    with z3.gathered(engine):
        return max(
            float((a - b).detach().abs().max())
            for a, b in zip(model.parameters(), whole.parameters(), strict=True)
        )


@pytest.mark.distributed
@pytest.mark.parametrize("unit", ["block", "module"])
def test_groups_rates_decay_and_schedulers(unit: str) -> None:
    assert max(run_world(train_in_groups, 3, unit)) < 2e-6


def every_optimizer() -> dict[str, float]:
    """Rank and world as one: on 4 ranks some shards of the small units are empty ranges."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    makers = {
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
        "SGD nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
        "class": torch.optim.Adamax,
    }
    for name, maker in makers.items():
        model, whole = models.build("Chain"), models.build("Chain")
        engine = z3.initialize(model, maker, {"z3trace": {"unit": "module"}})
        reference = maker(whole.parameters())
        for step in range(2):
            tokens = models.batch(step, rank, world)
            engine.backward(engine(tokens))
            engine.step()
            whole(tokens).backward()
            for parameter in whole.parameters():
                parameter.grad /= world
                dist.all_reduce(parameter.grad)
            reference.step()
            whole.zero_grad()
        with z3.gathered(engine):
            found[name] = max(
                float((a - b).detach().norm() / b.detach().norm().clamp(min=1e-3))
                for a, b in zip(model.parameters(), whole.parameters(), strict=True)
            )
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_torch_optimizers_element_by_element() -> None:
    for differences in run_world(every_optimizer, 4):
        assert len(differences) == 7
        for name, difference in differences.items():
            assert difference < 1e-3, name


@pytest.mark.usefixtures("alone")
class TestWhatInitializeAccepts:
    def test_the_configuration_names_the_optimizer(self) -> None:
        engine = z3.initialize(
            models.build("Chain"),
            config={"optimizer": {"type": "SGD", "params": {"lr": 0.25, "momentum": 0.5}}},
        )
        assert isinstance(engine.optimizer, torch.optim.SGD)
        assert engine.optimizer.param_groups[0]["lr"] == 0.25

    def test_a_scheduler_on_the_engines_optimizer(self) -> None:
        engine = z3.initialize(models.build("Chain"), torch.optim.SGD)
        scheduler = CosineAnnealingLR(engine.optimizer, T_max=4)
        first = engine.optimizer.param_groups[0]["lr"]
        engine.backward(engine(models.batch(0, 0, 1)))
        engine.step()
        scheduler.step()
        assert engine.optimizer.param_groups[0]["lr"] < first

    def test_only_the_optimizers_parameters_are_trained(self) -> None:
        model = models.build("Chain")
        engine = z3.initialize(model, torch.optim.SGD(model.head.parameters(), lr=0.1))
        engine.backward(engine(models.batch(0, 0, 1)))
        engine.step()
        with z3.gathered(engine):
            changed = [
                name
                for (name, a), b in zip(
                    model.named_parameters(), models.build("Chain").parameters(), strict=True
                )
                if not torch.equal(a, b)
            ]
        assert changed == ["head.weight", "head.bias"]

    def test_what_cannot_be_used_is_refused(self) -> None:
        model = models.build("Chain")

        def refused(source: Any, message: str, config: Any = None) -> None:
            with pytest.raises(UserError, match=message):
                z3.initialize(model, source, config)

        refused(None, "needs an optimizer")
        refused(None, "no class of torch.optim", {"optimizer": {"type": "AdaWm"}})
        refused(None, "optimizer.params", {"optimizer": {"type": "SGD", "params": {"speed": 1}}})
        refused(torch.optim.LBFGS, "element by element")
        refused(torch.optim.Adafactor, "element by element")
        refused(lambda parameters: None, "returned NoneType")
        refused(torch.optim.SGD([nn.Parameter(torch.ones(1))]), "not the model's")
        used = torch.optim.AdamW(model.parameters())
        model(models.batch(0, 0, 1)).backward()
        used.step()
        refused(used, "has state already")
        model.requires_grad_(False)
        refused(torch.optim.SGD, "nothing to train")
        assert isinstance(model.head.weight, Tensor) and float(model.head.weight.sum()) != 0
