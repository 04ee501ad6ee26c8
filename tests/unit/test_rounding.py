"""Weights in bf16: rounding is right on average, follows from what is written down, and loses no small step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from test_engine_parts import TRAIN
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainfleet.devices.cpu import Cpu
from trainfleet.engine import optimizer, optimizers
from trainfleet.engine.optimizers import RoundedAdamW, chance, extent_of, renew, rounded
from trainfleet.engine.world import PRECISIONS

HALF = replace(TRAIN, param_dtype="bf16", compile=False)
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drawn(draw: int | Tensor, size: tuple[int, int], key: int = 5) -> Tensor:
    rows, columns = extent_of(torch.empty(size))
    return chance(
        torch.tensor(key, dtype=torch.int32),
        torch.as_tensor(draw, dtype=torch.int32),
        rows,
        columns,
    )


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5, 1.0078125, 0.0, 1e-30])
def test_rounding_is_right_on_average(value: float) -> None:
    """Over the places of a matrix at one step, and over many steps at one place."""
    exact = torch.tensor([[value]])
    value = exact.item()
    low, high = sorted(
        float(rounded(exact, torch.tensor([[bits]], dtype=torch.int32))) for bits in (0, 0xFFFF)
    )
    assert low <= value <= high and high - low <= abs(value) / 128
    places = rounded(exact.expand(512, 512).contiguous(), drawn(1, (512, 512)))
    steps = rounded(exact.expand(4000, 1).contiguous(), drawn(torch.arange(4000)[:, None], (1, 1)))
    for found in (places, steps):
        standard_error = (high - low) / 2 / found.numel() ** 0.5
        assert abs(found.double().mean().item() - value) <= 5 * standard_error


def test_draws_have_nothing_to_do_with_one_another() -> None:
    """Neighbours in a row or a column, other steps and other parameters; and each of the 32 bits is 0 or 1 as often."""
    draws = drawn(1, (400, 400))
    others = [
        draws >> 16,
        drawn(2, (400, 400)),
        drawn(1, (400, 400), key=6),
        draws.roll(1, 0),
        draws.roll(1, 1),
        draws.T,
    ]
    for other in others:
        pair = torch.stack([draws.flatten(), other.flatten()]) & 0xFFFF
        assert abs(torch.corrcoef(pair.double())[0, 1].item()) < 5 / 400
    shares = [((draws >> bit) & 1).double().mean().item() for bit in range(32)]
    assert shares == pytest.approx([0.5] * 32, abs=5 * 0.5 / 400)


@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0))],
)
@pytest.mark.parametrize("size", [(9, 5), (7,)])
def test_a_part_s_place_is_that_in_the_whole(
    size: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    """As the last of 2 x 2 ranks has it; of a matrix or vector that they do not divide."""
    whole = torch.arange(45)[: size[0] * (*size, 1)[1]].view(size)
    placements = tuple(
        Shard(0) if isinstance(placement, Shard) and len(size) == 1 else placement
        for placement in placements
    )
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        rows, columns = extent_of(part)
        held = part.to_local()
        assert torch.equal(whole.view(len(whole), -1)[rows, columns], held.view(len(held), -1))
    finally:
        dist.destroy_process_group()


def falling(parameter: nn.Parameter, steps: int) -> nn.Parameter:
    """A parameter after steps of 1e-4 down: a fiftieth of what bf16 can tell apart near 1.0."""
    update = RoundedAdamW(
        [{"params": [parameter]}], {parameter: "weight"}, 1, renew, **SETTINGS | {"lr": 1e-4}
    )
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        update.step()
    return parameter


def test_steps_too_small_for_bf16_add_up() -> None:
    start = torch.full((64, 64), 0.999).bfloat16()
    ours = falling(nn.Parameter(start.clone()), 200)
    nearest = torch.optim.AdamW([judge := nn.Parameter(start.clone())], lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        judge.grad = torch.ones_like(judge)
        nearest.step()
    assert torch.equal(judge, start)  # as torch rounds, nothing ever moves
    assert (start - ours).float().mean().item() == pytest.approx(0.02, rel=0.02)


def test_a_second_moment_comes_down_again() -> None:
    """After one large gradient it falls by a thousandth a step, which rounding to the nearest would undo each time."""
    parameter = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    update = RoundedAdamW([{"params": [parameter]}], {parameter: "weight"}, 1, renew, **SETTINGS)
    for step in range(501):
        parameter.grad = torch.full_like(parameter, 0.0 if step else 1.0)
        update.step()
    assert update.state[parameter]["exp_avg_sq"].float().mean().item() == pytest.approx(
        0.001 * 0.999**500, rel=0.02
    )


def imitated(weights: str, nearest: bool = False) -> float:
    """How far a small network is from another one that it learnt to imitate, at a small rate."""
    torch.manual_seed(0)
    teacher, model = (
        nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)) for _ in range(2)
    )
    x = torch.randn(256, 16)
    wanted, format = teacher(x).detach(), PRECISIONS[weights]
    model.to(format)
    train = replace(HALF, param_dtype=weights, learning_rate=2e-4, beta2=0.999, weight_decay=0.0)
    update = (
        torch.optim.AdamW(model.parameters(), 2e-4, weight_decay=0.0)
        if nearest
        else optimizer.build(model, train, Cpu())
    )
    for _ in range(600):
        loss = (model(x.to(format)).float() - wanted).square().mean()
        update.zero_grad()
        loss.backward()
        update.step()
    return loss.item()


@pytest.mark.thorough
def test_it_learns_as_fp32_does_where_rounding_to_the_nearest_stalls() -> None:
    exact = imitated("fp32")
    assert imitated("bf16") == pytest.approx(exact, rel=0.2)
    assert imitated("bf16", nearest=True) > 10 * exact


def made(seed: int = 1, name: str = "weight", rows: int = 6) -> RoundedAdamW:
    parameter = nn.Parameter(torch.linspace(-1, 1, rows * 4).view(rows, 4).bfloat16())
    return RoundedAdamW(
        [{"params": [parameter], "weight_decay": 0.1}], {parameter: name}, seed, renew, **SETTINGS
    )


def state_of(update: RoundedAdamW) -> list[Tensor]:
    (parameter,) = update.param_groups[0]["params"]
    return [
        parameter.detach().clone(),
        *(value.clone() for value in update.state[parameter].values()),
    ]


def stepped(update: RoundedAdamW, *gradients: Tensor) -> list[Tensor]:
    (parameter,) = update.param_groups[0]["params"]
    for gradient in gradients:
        parameter.grad = gradient.bfloat16()
        update.step()
    return state_of(update)


GRADIENTS = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def test_another_seed_or_name_rounds_otherwise_and_the_same_ones_alike() -> None:
    ours = stepped(made(), *GRADIENTS)
    assert all(map(torch.equal, ours, stepped(made(), *GRADIENTS)))
    assert not torch.equal(ours[0], stepped(made(seed=2), *GRADIENTS)[0])
    assert not torch.equal(ours[0], stepped(made(name="bias"), *GRADIENTS)[0])


def test_in_pieces_it_rounds_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stepped(made(), *GRADIENTS)
    monkeypatch.setattr(optimizers, "AT_ONCE", 8)
    assert all(map(torch.equal, whole, stepped(made(), *GRADIENTS)))


def test_an_optimizer_that_was_put_back_rounds_as_one_that_went_on() -> None:
    unbroken, again = made(), made()
    stepped(unbroken, *GRADIENTS[:2])
    (source,), (target,) = unbroken.param_groups[0]["params"], again.param_groups[0]["params"]
    with torch.no_grad():
        target.copy_(source)
    again.load_state_dict(copy.deepcopy(unbroken.state_dict()))
    assert all(map(torch.equal, stepped(unbroken, *GRADIENTS[2:]), stepped(again, *GRADIENTS[2:])))


def test_a_step_that_is_left_out_changes_nothing() -> None:
    update = made()
    before = stepped(update, *GRADIENTS[:2])
    update.found_inf = torch.tensor(1.0)
    assert all(map(torch.equal, before, stepped(update, torch.full((6, 4), torch.nan))))
    update.found_inf = torch.tensor(0.0)
    assert all(map(torch.equal, stepped(update, *GRADIENTS[2:]), stepped(made(), *GRADIENTS)))


def test_what_bf16_holds_follows_adamw() -> None:
    """Beside torch's AdamW in fp32, four steps differ by no more than as many roundings."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4).bfloat16().float())
    judge = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.999), weight_decay=0.1)
    for gradient in GRADIENTS:
        parameter.grad = gradient.bfloat16().float()
        judge.step()
    torch.testing.assert_close(
        stepped(made(), *GRADIENTS)[0].float(), parameter.detach(), rtol=4 / 128, atol=1e-3
    )
