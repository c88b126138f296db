"""Parameters outside a forward: an error, or whole within `gathered`; never another layer's weights."""

import copy
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import run_world

import z3trace.engine as z3
from z3trace.errors import UserError

pytestmark = pytest.mark.usefixtures("alone")


def trained(steps: int = 1, **own: Any) -> tuple[models.Chain, z3.Engine]:
    model = models.build("Chain")
    assert isinstance(model, models.Chain)
    engine = z3.initialize(model, torch.optim.SGD, {"z3trace": own})
    for index in range(steps):
        engine.backward(engine(models.batch(index, 0, 1)))
        engine.step()
    return model, engine


@pytest.mark.parametrize("steps", [0, 1])
def test_reading_a_sharded_parameter_is_an_error_that_names_it(steps: int) -> None:
    model, _ = trained(steps)
    weight = model.layers[1].up.weight
    for read in (
        lambda: weight.sum(),
        lambda: weight[0],
        lambda: weight.data,
        lambda: weight.tolist(),
        lambda: torch.stack([weight, weight]),
        lambda: weight + 1,
        lambda: copy.deepcopy(model),
    ):
        with pytest.raises(
            RuntimeError, match=r"layers\.\d\.\w+\.?\w* is sharded|embedding\.weight is sharded"
        ):
            read()
    with pytest.raises(RuntimeError, match="gathered"):
        model.state_dict()


def test_questions_about_a_sharded_parameter_are_answered() -> None:
    model, _ = trained()
    weight = model.layers[0].down.weight
    assert weight.shape == (models.DIM, 15) and weight.numel() == 105 and weight.size(0) == models.DIM
    assert weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_leaf
    assert weight.requires_grad and weight.grad is None and weight.ndim == 2 and len(weight) == models.DIM
    assert isinstance(weight, nn.Parameter)
    assert "layers.0.down.weight" in repr(weight)
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in models.build("Chain").parameters()
    )
    model.zero_grad()


def test_gathered_gives_whole_parameters_and_takes_them_back() -> None:
    model, _ = trained(0)
    with z3.gathered(model) as whole:
        state = {name: value.clone() for name, value in whole.state_dict().items()}
    for name, value in models.build("Chain").state_dict().items():
        assert torch.equal(state[name], value)
    with pytest.raises(RuntimeError, match="sharded"):
        model.head.weight.sum()
    with pytest.raises(UserError, match="initialize"), z3.gathered(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("unit", ["block", "module"])
def test_gathered_between_forward_and_backward_disturbs_nothing(unit: str) -> None:
    disturbed, quiet = trained(0, unit=unit), trained(0, unit=unit)
    tokens = models.batch(0, 0, 1)
    for (model, engine), inside in ((disturbed, True), (quiet, False)):
        loss = engine(tokens)
        if inside:
            with z3.gathered(model), torch.no_grad():
                model(tokens)
                engine(models.batch(1, 0, 1))
        engine.backward(loss)
        engine.step()
    with z3.gathered(disturbed[0]), z3.gathered(quiet[0]):
        for ours, theirs in zip(disturbed[0].parameters(), quiet[0].parameters(), strict=True):
            assert torch.equal(ours, theirs)


def changed_on_rank_one() -> list[float]:
    model = models.build("Chain")
    engine = z3.initialize(model, torch.optim.SGD)
    with z3.gathered(engine, modifier_rank=1), torch.no_grad():
        model.norm.weight.fill_(float(dist.get_rank() + 5))
        model.layers[0].up.bias.fill_(float(dist.get_rank() + 7))
    with z3.gathered(engine), torch.no_grad():
        model.norm.bias.fill_(100.0)
    with z3.gathered(engine):
        return [p.mean().item() for p in (model.norm.weight, model.layers[0].up.bias, model.norm.bias)]


@pytest.mark.distributed
def test_changes_are_kept_from_the_modifier_rank_only() -> None:
    assert run_world(changed_on_rank_one, 2) == [[6.0, 8.0, 0.0]] * 2


def test_evaluation_between_training_steps_changes_nothing_and_gathers_no_gradient() -> None:
    (model, engine), (other, reference) = trained(2), trained(2)
    tokens = models.batch(7, 0, 1)
    engine.eval()
    assert not engine.training and not model.training
    with torch.no_grad():
        first = engine(tokens)
        second = engine(tokens)
    engine.train()
    assert torch.equal(first, second) and not first.requires_grad
    for each in (engine, reference):
        each.backward(each(tokens))
        each.step()
    with z3.gathered(model), z3.gathered(other):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("prefetch", "blocks"), [(0, 1), (1, 2), (2, 3)])
def test_no_more_blocks_are_whole_at_once_than_fetched_ahead(prefetch: int, blocks: int) -> None:
    _, engine = trained(3, prefetch=prefetch)
    sizes = {p.plan.name: p.padded_numel for p in engine.partitions.values()}
    assert engine._slots.numel == sizes[""] + blocks * sizes["layers.0"]


def test_two_forwards_before_two_backwards() -> None:
    model = models.build("Chain")
    engine = z3.initialize(model, torch.optim.SGD, {"gradient_accumulation_steps": 2})
    whole = models.build("Chain")
    losses = [engine(models.batch(i, 0, 1)) for i in range(2)]
    for loss in losses:
        engine.backward(loss)
    gradients = z3.full_gradients(engine)
    sum(whole(models.batch(i, 0, 1)) / 2 for i in range(2)).backward()
    for name, parameter in whole.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-7), name


def test_a_graph_that_is_kept_can_run_backward_twice() -> None:
    model = models.build("Chain")
    engine = z3.initialize(model, torch.optim.SGD)
    loss = engine(models.batch(0, 0, 1))
    engine.backward(loss, retain_graph=True)
    once = {name: g.clone() for name, g in z3.full_gradients(engine).items()}
    engine.backward(loss)
    twice = z3.full_gradients(engine)
    for name, gradient in once.items():
        assert torch.allclose(twice[name], 2 * gradient, rtol=1e-5, atol=1e-8), name


def test_wrong_uses_are_explained() -> None:
    _, engine = trained(1)
    with pytest.raises(UserError, match="without a backward"):
        engine.step()
    with pytest.raises(UserError, match="scalar"):
        engine.backward(torch.zeros(3, requires_grad=True))
    with torch.no_grad():
        loss = engine(models.batch(0, 0, 1))
    with pytest.raises(UserError, match="without a graph"):
        engine.backward(loss)
    with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\)"):
        engine(models.batch(0, 0, 1)).backward()


def test_after_a_backward_that_failed_nothing_goes_on() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("no gradient today")

    model, engine = trained(1)
    handle = model.layers[1].register_forward_hook(lambda m, args, output: Failing.apply(output))
    loss = engine(models.batch(0, 0, 1))
    handle.remove()
    with pytest.raises(ValueError, match="today"):
        engine.backward(loss)
    with pytest.raises(RuntimeError, match="start them again"):
        engine(models.batch(0, 0, 1))


def test_a_forward_that_fails_leaves_a_usable_engine() -> None:
    (model, engine), (other, reference) = trained(1), trained(1)
    with pytest.raises(IndexError):
        engine(torch.full((2, 5), models.CLASSES + 3))
    for each in (engine, reference):
        each.backward(each(models.batch(3, 0, 1)))
        each.step()
    with z3.gathered(model), z3.gathered(other):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
