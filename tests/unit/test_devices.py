"""The device that a rank opens is the one that was planned; and what a device decides, the engine takes from it."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_engine_parts import TRAIN
from torch import nn
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainfleet import devices, models
from trainfleet.config import Settings, load
from trainfleet.config.types import Model
from trainfleet.devices import cuda, neuron
from trainfleet.devices.cpu import Cpu
from trainfleet.engine import optimizer
from trainfleet.engine.__main__ import products
from trainfleet.engine.checkpoint.checkpoint_group import Peers
from trainfleet.engine.parallel import blocks
from trainfleet.engine.parallel.gradients import Mesh
from trainfleet.engine.timing import Stopwatch
from trainfleet.engine.world import join
from trainfleet.hardware import accelerators, node_types
from trainfleet.trust.errors import RunError

RECIPES = Path(__file__).parents[2] / "python/trainfleet/recipes"


def refused(kind: str) -> RunError:
    with pytest.raises(RunError) as error:
        devices.planned(kind)
    return error.value


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that sees no GPU, whatever this machine has, as rank 3 on node 1."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cuda, "DRIVER", Path("/nowhere/version"))
    monkeypatch.setattr(node_types, "local_accelerators", lambda: 0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("GROUP_RANK", "1")
    return monkeypatch


def test_a_torch_without_cuda_is_named_and_no_cpu_takes_the_place(
    blind: pytest.MonkeyPatch,
) -> None:
    blind.setattr(torch.version, "cuda", None)
    error = refused("cuda")
    assert (
        "this rank can't use a GPU, but the plan requires one" in error.what
        and error.where == "rank 3 on node 1"
    )
    assert (
        f"torch {torch.__version__} is built without CUDA" in error.why
        and "make setup" in error.next
    )


def test_a_missing_driver_is_named(blind: pytest.MonkeyPatch) -> None:
    blind.setattr(torch.version, "cuda", "13.0")
    assert "no NVIDIA driver is loaded" in refused("cuda").why


def test_a_driver_that_torch_finds_too_old_is_named_in_torchs_words(
    blind: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    (driver := tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02\nGCC version: 9\n"
    )
    blind.setattr(torch.version, "cuda", "13.0")
    blind.setattr(cuda, "DRIVER", driver)
    blind.setattr(torch.cuda, "init", fail)
    blind.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    why = refused("cuda").why
    assert (
        "too old (found version 11040)" in why
        and "470.57.02" in why
        and "CUDA 13.0" in why
        and "CUDA_VISIBLE_DEVICES=0,1" in why
    )


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    error = refused("cuda")
    assert "local rank 4 has no GPU" in error.what and "torch finds 4" in error.why


@pytest.mark.parametrize("kind", [cuda.Cuda, neuron.Neuron])
def test_a_part_of_a_step_is_timed_well_after_a_week_of_training(
    kind: type[devices.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers return the milliseconds between two events in fp32."""
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.time = math.nan

        def record(self) -> None:
            self.time = now[0]

        def elapsed_time(self, end: Event) -> float:
            return float(np.float32(1000 * (end.time - self.time)))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "neuron", SimpleNamespace(Event=Event), raising=False)
    watch = Stopwatch(0.0, clock=object.__new__(kind).clock)
    for step in (1, 2):
        watch.begin(step, sampled=True)
        with watch.part("forward"):
            now[0] += 0.005
        assert watch.parts() == {"forward": pytest.approx(0.005, rel=0.01)}
        now[0] += 7 * 86400


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, ""),
        (
            8,
            "8 accelerators of this node are idle, because ranks use the CPUs (fleet.platform is cpu)",
        ),
    ],
)
def test_a_cpu_that_was_planned_is_opened_beside_gpus_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, told: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(node_types, "local_accelerators", lambda: count)
    assert devices.planned("cpu").kind == "cpu" and capsys.readouterr().out.startswith(told)


def test_what_has_no_file_here_is_refused() -> None:
    assert "ranks can't use the device abacus yet" in refused("abacus").what


@pytest.mark.parametrize(
    ("capability", "targets", "runs"),
    [
        ((9, 0), ["sm_75", "sm_90a"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # the same major number, made for an earlier minor one
        ((7, 0), ["sm_75", "sm_80", "compute_120"], False),  # a V100 under a build for CUDA 13
        ((12, 1), ["sm_90", "compute_90"], True),  # PTX
        ((10, 0), ["sm_90"], False),
        ((9, 0), [], True),
    ],
)
def test_a_build_has_code_for_a_gpu_or_not(
    capability: tuple[int, int], targets: list[str], runs: bool
) -> None:
    assert cuda.has_code_for(capability, targets) == runs


@pytest.mark.parametrize(
    ("platform", "kind"),
    [("cpu", "cpu"), ("cuda", "cuda"), ("cuda-volta", "cuda"), ("neuron-xla", "neuron_xla")],
)
def test_the_plan_names_the_device_by_the_platform(platform: str, kind: str) -> None:
    recipe = (
        "bert-large-trn1" if kind == "neuron_xla" else "llama-3-8b-p5"
    )  # a platform for other devices is refused
    config, _ = load(
        Settings(
            RECIPES / f"{recipe}.yaml",
            f"fleet.platform={platform} train.precision=fp32 train.param_dtype=fp32",
        )
    )
    assert config.fleet.device == kind


@pytest.mark.parametrize(
    ("count", "found", "platform"),
    [
        (0, None, "cpu"),
        (8, None, "cuda"),
        (1, accelerators.BY_NAME["H200-141GB"], "cuda"),
        (1, accelerators.BY_NAME["V100-32GB"], "cuda-volta"),
    ],
)
def test_this_machines_accelerators_are_planned(
    monkeypatch: pytest.MonkeyPatch, count: int, found: Any, platform: str
) -> None:
    monkeypatch.setattr(node_types, "local_accelerators", lambda: count)
    monkeypatch.setattr(node_types, "local_accelerator", lambda: found)
    config, derived = load(Settings(RECIPES / "first-run.yaml", "fleet.nodes=1"))
    assert config.fleet.platform == platform
    assert "accelerators" in next(each.why for each in derived if each.key == "fleet.platform")


class Other(Cpu):
    """A CPU that decides otherwise than ours, as another device may."""

    fused_adamw = False
    costly: frozenset[object] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.compilations = 0

    def compiled(self, call: Any, dynamic: bool = False) -> Any:
        self.compilations += 1
        return call


def tiny() -> models.Network:
    model = models.build(Model("test", "llama", 2, 16, 2, 2, 32, 40, 32, 10_000.0, 1e-5, False))
    model.initialize(0)
    return model


def test_blocks_and_loss_are_compiled_as_the_device_says() -> None:
    device, model = Other(), tiny()
    blocks.compile_blocks(model, model.get_submodule(model.plan.blocks).children(), "none", device)
    assert device.compilations == 3


def test_selective_recomputation_keeps_what_the_device_names() -> None:
    product = torch.ops.aten.mm.default
    kept = [blocks.keep(device.costly, None, product).name for device in (Cpu(), Other())]
    assert kept == ["MUST_SAVE", "PREFER_RECOMPUTE"]


def test_without_a_fused_adamw_ours_takes_the_same_steps_and_leaves_the_same_out() -> None:
    held = []
    for device in (Cpu(), Other()):
        model, train = (
            nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)),
            replace(TRAIN, weight_decay=0.1),
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(generator=generator)
        update = optimizer.build(model, train, device)
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = (
                    torch.full_like(parameter, float("nan"))
                    if step == 2
                    else torch.sin(parameter.detach() + step)
                )
            optimizer.leave_out(update, torch.tensor(float(step == 2)))
            update.step()
        held.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert type(update) is not torch.optim.AdamW and torch.allclose(*held, rtol=1e-5, atol=1e-6)


class Unseen(cuda.Cuda):
    """A GPU of which nothing is asked that needs one."""

    native_bf16, native_fp16 = True, True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)


def test_ranks_on_gpus_have_one_group_of_gloo_for_their_hosts_and_wait_half_an_hour_in_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of gloo joins each of its ranks to each: one a dimension of the mesh is minutes of a large job's start."""
    made: list[tuple[str, timedelta]] = []
    make: Any = distributed_c10d._new_process_group_helper

    def note(*given: Any, **named: Any) -> Any:
        made.append((str(backend := given[3]), named["timeout"]))
        group, store = make(*given[:3], distributed_c10d.Backend("fake"), *given[4:], **named)
        distributed_c10d._world.pg_map[group] = (
            backend,
            store,
        )  # what a group that is made without one has too
        return group, store

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", note)
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    monkeypatch.setattr(
        distributed_c10d, "rendezvous", lambda *_, **__: iter([(FakeStore(), 0, 8)])
    )
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)
    for name, answer in {"set_device": None, "device_count": 8, "is_initialized": True}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    degrees = "train.parallelism.pipeline=2 train.parallelism.context=2 train.parallelism.fsdp=2"
    config = load(
        Settings(RECIPES / "llama-3-8b-p5.yaml", f"fleet.nodes=1 fleet.ranks_per_node=8 {degrees}")
    )[0]
    with join(Unseen()) as world:
        mesh, _ = Mesh(config, world.device), Peers()
        assert mesh.grid.device_type == "cuda" and mesh.context_group
    assert [backend for backend, _ in made if backend != "nccl"] == [
        "gloo",
        "gloo",
    ]  # the ranks', and their checkpoints'
    assert min(timeout for _, timeout in made) >= timedelta(minutes=30)


@pytest.mark.parametrize(("major", "name"), [(7, "float32"), (8, "tf32")])
def test_results_say_which_products_a_run_in_fp32_had(
    monkeypatch: pytest.MonkeyPatch, major: int, name: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    for each, answer in {
        "is_available": True,
        "device_count": 1,
        "get_arch_list": [],
        "get_device_properties": SimpleNamespace(name="GPU", major=major, minor=0),
    }.items():
        monkeypatch.setattr(torch.cuda, each, lambda *_, answer=answer: answer)
    device = cuda.Cuda(0)
    trainers: list[Any] = [
        SimpleNamespace(device=device, precision=format_)
        for format_ in (torch.float32, torch.bfloat16)
    ]
    assert [products(trainer) for trainer in trainers] == [name, "bfloat16"]
