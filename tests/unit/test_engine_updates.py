"""LAMB, Muon and the schedules, each against what its paper says, and the step that is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_engine_parts import TRAIN
from torch import Tensor, nn

from trainfleet import models
from trainfleet.config.schedule import learning_rate
from trainfleet.config.types import Model, Train
from trainfleet.devices.cpu import Cpu
from trainfleet.engine import optimizer, optimizers
from trainfleet.engine.optimizers import AdamW, Lamb, Muon, orthogonal

GPT2 = Model("test", "gpt2", 2, 16, 2, 2, 32, 40, 24, 10_000.0, 1e-5, True)


def make() -> models.Network:
    model = models.build(GPT2)
    model.initialize(0)
    return model


def descend(name: str, steps: int = 30, **values: float) -> list[float]:
    """The losses of a small model that learns one batch by heart."""
    model, train = make(), replace(TRAIN, optimizer=name, **values)
    update, losses = optimizer.build(model, train, Cpu()), []
    tokens = torch.randint(0, 40, (4, 20), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loss = model(tokens, targets=tokens.roll(-1, 1))
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "rate", "left"), [("adamw", 0.01, 0.6), ("lamb", 0.05, 0.95), ("muon", 0.01, 0.6)]
)
def test_every_optimizer_learns_a_batch_by_heart(name: str, rate: float, left: float) -> None:
    """LAMB's steps are parts of the weights' own length, which are small at first: it takes its time."""
    losses = descend(name, learning_rate=rate)
    assert losses[-1] < left * losses[0], losses


def stepped(kind: type[AdamW], matrix: bool, gradients: list[Tensor], **settings: float) -> Tensor:
    parameter = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    update = kind(
        [{"params": [parameter], "matrix": matrix, "weight_decay": 0.1}],
        lr=0.01,
        betas=(0.9, 0.99),
        eps=1e-8,
    )
    for gradient in gradients:
        parameter.grad = gradient.clone()
        update.step()
    return parameter.detach()


GRADIENTS = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def test_what_muon_does_not_straighten_gets_adamw() -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    judge = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for gradient in GRADIENTS:
        parameter.grad = gradient.clone()
        judge.step()
    torch.testing.assert_close(stepped(Muon, False, GRADIENTS), parameter.detach())


def test_lamb_moves_a_matrix_by_its_own_length() -> None:
    before = torch.linspace(-1, 1, 12).view(3, 4)
    moved = stepped(Lamb, True, GRADIENTS[:1]) - before
    assert moved.norm().item() == pytest.approx(0.01 * before.norm().item(), rel=1e-5)


@pytest.mark.parametrize("format", [torch.float32, torch.bfloat16])
def test_muon_makes_singular_values_alike(format: torch.dtype) -> None:
    matrices = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonal(matrices, format))
    assert values.min() > 0.5 and values.max() < 1.3


def one_by_one(matrix: Tensor) -> Tensor:
    """Newton and Schulz's rounds as Jordan's post of 2024 has them, for one matrix."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_muon_steps_matrices_together_as_it_would_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several shapes, lying and standing, and more of one shape than go at once."""
    monkeypatch.setattr(optimizers, "AT_ONCE", 2 * 8 * 24)
    dice = torch.Generator().manual_seed(5)
    sizes = [(8, 24), (24, 8), (8, 8), (8, 24), (24, 8), (8, 8)]
    parameters = [nn.Parameter(torch.randn(size, generator=dice)) for size in sizes]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=dice)
    Muon(
        [{"params": parameters, "matrix": True, "weight_decay": 0.1}],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
    ).step()
    for parameter, old in zip(parameters, before, strict=True):
        ahead = parameter.grad.lerp(parameter.grad * 0.05, 0.95)  # type: ignore[union-attr]
        change = one_by_one(ahead) * 0.2 * max(old.shape) ** 0.5
        torch.testing.assert_close(
            parameter.detach(), old * (1 - 0.01 * 0.1) - 0.01 * change, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("kind", [Lamb, Muon])
@pytest.mark.parametrize("matrix", [True, False])
def test_a_step_that_is_left_out_changes_nothing(kind: type[AdamW], matrix: bool) -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    update = kind(
        [{"params": [parameter], "matrix": matrix, "weight_decay": 0.1}],
        lr=0.01,
        betas=(0.9, 0.99),
        eps=1e-8,
    )
    for gradient, skip in (
        (GRADIENTS[0], 0.0),
        (torch.full((3, 4), torch.nan), 1.0),
        (GRADIENTS[1], 0.0),
    ):
        update.found_inf, parameter.grad = torch.tensor(skip), gradient.clone()
        update.step()
    torch.testing.assert_close(parameter.detach(), stepped(kind, matrix, GRADIENTS[:2]))


def rates(train: Train) -> list[float]:
    return [learning_rate(train, step) / train.learning_rate for step in range(1, 101)]


@pytest.mark.parametrize(
    ("schedule", "half_way", "power"),
    [("cosine", 0.55, 1.0), ("linear", 0.55, 1.0), ("polynomial", 0.325, 2.0), ("wsd", 1.0, 1.0)],
)
def test_a_schedule_warms_up_falls_and_ends_at_the_floor(
    schedule: str, half_way: float, power: float
) -> None:
    train = replace(TRAIN, schedule=schedule, schedule_power=power, min_lr_ratio=0.1)
    found = rates(train)
    assert found[:10] == pytest.approx([step / 10 for step in range(1, 11)]) and found[
        99
    ] == pytest.approx(0.1)
    assert found[54] == pytest.approx(half_way) and found[9:] == sorted(found[9:], reverse=True)
    if schedule == "wsd":
        assert found[79] == 1.0 and found[89] == pytest.approx(0.55)


def test_a_run_may_end_before_its_schedule() -> None:
    long = replace(TRAIN, schedule="polynomial", schedule_steps=1000, warmup_steps=500)
    assert rates(long)[99] == pytest.approx(0.2)
