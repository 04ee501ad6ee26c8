"""What Trainium's stacks can't do is refused in plan, by key, with what works; and the packages that bear Neuron's names are told apart."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from trainfleet.backends import terms_of
from trainfleet.config import Settings, load
from trainfleet.devices import neuron
from trainfleet.plan.estimate import estimate
from trainfleet.report import proposal
from trainfleet.trust.errors import ConfigError, RunError
from trainfleet_nxd import device as neuron_xla
from trainium import CONFIG

RECIPES = Path(__file__).parents[2] / "python/trainfleet/recipes"


def read(folder: Path, settings: str, kind: str) -> None:
    (folder / "config.yaml").write_text(CONFIG.replace("TYPE", kind))
    load(Settings(folder / "config.yaml", settings), terms_of)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("trn1.32xlarge", "fleet.platform=neuron", "fleet.platform: neuron: trn1 trains only with PyTorch/XLA; use neuron-xla"),
        ("trn2.48xlarge", "fleet.platform=neuron-xla", "fleet.platform: neuron-xla: trn2 trains only with native PyTorch; use neuron"),
        ("trn1.32xlarge", "fleet.ranks_per_node=16", "fleet.ranks_per_node: 16: collectives on a trn1.32xlarge support only 1, 2, 8, 32 cores"),
        ("trn1.2xlarge", "", "trn1.2xlarge has no EFA and can't train on 4 nodes; set NODES=1"),
        ("trn1.32xlarge", "train.sequence_length=4000", "train.sequence_length: 4000: Trainium's kernels need a multiple of 128; nearest valid values: 3968, 4096"),
        ("trn2.48xlarge", "train.sequence_length=100", "multiple of 128; nearest valid values: 128"),
        ("trn1.32xlarge", "train.parallelism.fsdp=8 train.parallelism.tensor=1 train.parallelism.pipeline=1", "train.parallelism.fsdp: 8: NxD Core shards over all 128 data-parallel ranks or none; use 1 or 128"),
        ("trn1.32xlarge", "train.parallelism.tensor=8 train.parallelism.fsdp=16 train.parallelism.zero_stage=3", "train.parallelism.zero_stage: 3: NxD Core shards only the optimizer's state"),
        ("trn1.32xlarge", "train.parallelism.context=2", "train.parallelism.context: 2 is not supported on platform neuron-xla; use 1"),
        ("trn1.32xlarge", "train.spike_sigmas=6", "train.spike_sigmas: 6: NxD's optimizer can't skip a step; use 0"),
        ("trn1.32xlarge", "train.optimizer=muon", "train.optimizer: muon is not supported on platform neuron-xla; use adamw"),
        ("trn1.32xlarge", "train.optimizer=lamb train.parallelism.tensor=8", "lamb needs the norm of whole matrices"),
        ("trn1.32xlarge", "train.param_dtype=bf16 train.precision=bf16", "train.param_dtype: bf16 is not supported on platform neuron-xla"),
        ("trn1.32xlarge", "train.activation_checkpointing=selective", "train.activation_checkpointing: selective: NxD Core recomputes only whole blocks"),
        ("trn1.32xlarge", "train.compile=true", "train.compile: true: PyTorch/XLA always compiles every step"),
        ("trn1.32xlarge", "train.parallelism.tensor=3", "does not divide the world size 128"),
        ("trn1.32xlarge", "model.kv_heads=4 train.parallelism.tensor=64", "valid values: 1, 2, 4; with copied key-value heads (copies each): 8 (2), 16 (4), 32 (8)"),
        ("trn2.48xlarge", "model.kv_heads=4 train.parallelism.tensor=8", "8 does not divide model.heads 32 and model.kv_heads 4; valid values: 1, 2, 4"),
    ],
)  # fmt: skip
def test_what_a_stack_lacks_is_refused(tmp_path: Path, kind: str, settings: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, settings, kind)
    assert told in str(error.value)


@pytest.mark.parametrize("kind", ["trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"])
def test_what_it_has_is_not(tmp_path: Path, kind: str) -> None:
    read(tmp_path, "train.parallelism.tensor=8", kind)


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("", "torch-neuronx is not installed"),
        ("1.0", "torch-neuronx 1.0 is the empty package of the public index"),
        ("2.9.0.2.15.32035", "torch-neuronx 2.9.0.2.15.32035 is PyTorch/XLA"),
        ("2.99.3.0", "torch-neuronx 2.99.3.0 does not match torch"),
        (f"{torch.__version__.split('+')[0]}.3.0", ""),
    ],
)
def test_namesakes_of_torch_neuronx_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, told: str
) -> None:
    def answer(name: str) -> str:
        if not version:
            raise neuron.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(neuron, "version", answer)
    if not told:
        return neuron.check_package()
    with pytest.raises(RunError) as error:
        neuron.check_package()
    assert (
        told in error.value.why
        and "make setup" in error.value.next
        and "make build" in error.value.next
    )


@pytest.mark.parametrize("settings", ["train.micro_batch_size=2", "train.micro_batch_size=4", ""])
def test_what_is_derived_for_a_stack_is_not_refused_on_it(tmp_path: Path, settings: str) -> None:
    """NxD Core recomputes only whole blocks: the planner, left free, never takes the way that a rule then refuses."""
    read(tmp_path, settings, "trn1.32xlarge")


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (
            "llama-2-7b-trn1",
            "AWS: 25,933 tokens/s per node, on 16 nodes of trn1.32xlarge (TP 8, DP 64, ZeRO 1; Neuron 2.20)",
        ),
        ("bert-large-trn1", "AWS: 459,263 tokens/s per node, on 16 nodes"),
        (
            "trn1-single-node",
            "AWS: 489,805 tokens/s per node, on one node of trn1.32xlarge (DP 32, AdamW; Neuron 2.28)",
        ),
        ("llama-3-8b-trn2", "AWS has not published a training speed for trn2"),
    ],
)
def test_a_recipe_s_plan_has_aws_s_figure_beside_its_own(recipe: str, told: str) -> None:
    config = load(Settings(RECIPES / f"{recipe}.yaml", ""), terms_of)[0]
    assert told in proposal.beside(config)
    lines = "\n".join(proposal.describe(config, [], estimate(config, None)))
    assert (
        "GiB of" in lines
        and "data-parallel" in lines
        and "per node; AWS" in " ".join(lines.split())
    )


SDK = {
    "torch": "2.9.1",
    "torch-xla": "2.9.0",
    "torch-neuronx": "2.9.0.2.15.32035",
    "neuronx-distributed": "0.19.28492",
}


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({}, ""),
        ({"torch-xla": ""}, "torch-xla is not installed"),
        (
            {"torch": "2.13.0"},
            "the SDK needs 2.9 of torch and torch-xla, not torch 2.13.0 and torch-xla 2.9.0",
        ),
        (
            {"torch-xla": "2.8.1"},
            "the SDK needs 2.9 of torch and torch-xla, not torch 2.9.1 and torch-xla 2.8.1",
        ),
        ({"torch-neuronx": "1.0"}, "torch-neuronx 1.0 is an empty placeholder from PyPI"),
        (
            {"torch-neuronx": "2.13.3.0"},
            "torch-neuronx 2.13.3.0 is native PyTorch, which does not support Trn1",
        ),
        (
            {"neuronx-distributed": "0.1"},
            "neuronx-distributed 0.1 is an empty placeholder from PyPI",
        ),
    ],
)
def test_packages_that_are_not_the_last_sdk_s_for_trn1_are_refused(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], told: str
) -> None:
    def answer(name: str) -> str:
        if not (found := (SDK | versions)[name]):
            raise neuron_xla.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(neuron_xla, "version", answer)
    if not told:
        return neuron_xla.check_packages()
    with pytest.raises(RunError) as error:
        neuron_xla.check_packages()
    assert told in error.value.why and "make setup" in error.value.next


def test_a_rank_that_pytorch_xla_takes_for_another_ends() -> None:
    """On CPUs torchrun's ranks each are rank 0 of 1 to it: nothing is added up, and every rank trains a model of its own."""
    core = object.__new__(neuron_xla.NeuronXla)
    core.runtime = types.SimpleNamespace(global_ordinal=lambda: 0, world_size=lambda: 1)
    core.joined(0, 1)
    with pytest.raises(RunError, match="rank 1 of 2, but PyTorch/XLA sees rank 0 of 1"):
        core.joined(1, 2)
