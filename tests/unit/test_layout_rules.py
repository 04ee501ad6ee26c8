"""A layout that can't be is refused before any process starts: by key and value, with values that would work."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfleet.backends import terms_of
from trainfleet.config import Settings, load
from trainfleet.plan.estimate import estimate
from trainfleet.trust.errors import ConfigError

CONFIG = """
name: base
data: {name: text, sources: [stdlib], vocab_size: 384}
model: {layers: 4, hidden_size: 48, heads: 4, kv_heads: 2, intermediate_size: 96}
fleet: {nodes: 4}
train: {steps: 20, global_batch_size: 8, sequence_length: 64}
"""


def refusal(folder: Path, settings: str) -> str:
    (folder / "config.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError) as error:
        load(Settings(folder / "config.yaml", settings), terms_of)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            "train.parallelism.tensor=2 train.parallelism.pipeline=4",
            "does not divide the world size 4",
        ),
        (
            "train.parallelism.fsdp=3",
            "train.parallelism.fsdp: 3 does not divide the 4 data-parallel ranks; valid values: 1, 2, 4",
        ),
        (
            "train.parallelism.tensor=4",
            "train.parallelism.tensor: 4 does not divide model.heads 4 and model.kv_heads 2; valid values: 1, 2",
        ),
        (
            "train.parallelism.tensor=2 model.intermediate_size=97",
            "train.parallelism.tensor: 2 does not divide model.intermediate_size 97; valid values: 1",
        ),
        (
            "model.layers=2 train.parallelism.pipeline=4",
            "train.parallelism.pipeline: 4 makes 4 stages of 2 layers; use at most 2",
        ),
        (
            "train.parallelism.pipeline=2 train.parallelism.virtual_stages=4",
            "train.parallelism.virtual_stages: 2 x virtual_stages 4 makes 8 stages of 4 layers",
        ),
        ("train.parallelism.virtual_stages=2", "needs train.parallelism.pipeline 2 or more"),
        (
            "train.parallelism.context=4 train.sequence_length=60",
            "train.parallelism.context: 2 x 4 pieces do not divide",
        ),
        (
            "train.parallelism.pipeline=2 train.micro_batch_size=4",
            "train.micro_batch_size: 4 makes 1 micro-batches per step",
        ),
        (
            "train.precision=fp8",
            "train.precision: fp8: CPUs do not support it, only GPUs since Ada and Hopper; set auto",
        ),
        (
            "train.activation_memory_budget=0.5 train.compile=false",
            "train.activation_memory_budget: 0.5: a budget needs compiled blocks",
        ),
        (
            "train.activation_memory_budget=0.5 train.parallelism.tensor=2",
            "train.activation_memory_budget: 0.5 is not supported with train.parallelism.tensor 2; use null",
        ),
        (
            "train.activation_memory_budget=1.5",
            "train.activation_memory_budget: must be at least 0 and at most 1, not 1.5",
        ),
        (
            "train.activation_checkpointing=ful",
            'train.activation_checkpointing: "ful" is not one of none, selective, full; did you mean full?',
        ),
        (
            "train.activation_checkpointing=full train.activation_memory_budget=0.5",
            "train.activation_memory_budget: 0.5: a budget needs selective checkpointing; use null",
        ),
        (
            "train.learning_rate=3e-4 train.min_lr_ratio=3e-5",
            "train.min_lr_ratio: 3e-05 is read as a fraction of train.learning_rate; did you mean 0.1? 3e-05 / 0.0003 is 0.1",
        ),
        (
            "train.learning_rate=3e-4 train.min_lr_ratio=9e-4",
            "train.min_lr_ratio: 0.0009 is read as a fraction of train.learning_rate; use 0.001, or 0",
        ),
        (
            "train.sample_prompts=[a] train.parallelism.tensor=2",
            "train.sample_prompts: needs a decoder, and a layout that does not split it",
        ),
        (
            "data.conversations=true",
            "data.conversations: true: data.tokenizer bpe has no chat template",
        ),
        (
            "train.param_dtype=bf16 train.precision=fp32",
            "train.param_dtype: bf16 is not supported with train.precision fp32; use fp32, or train.precision bf16",
        ),
        (
            "train.param_dtype=bf16 train.precision=bf16 train.optimizer=muon",
            "train.param_dtype: bf16: train.optimizer muon supports only fp32; set train.optimizer adamw for both",
        ),
        (
            "train.document_mask=true model.family=roberta model.kv_heads=4",
            "roberta models attend across documents",
        ),
    ],
)
def test_what_can_not_be_divided_so_is_refused(tmp_path: Path, settings: str, told: str) -> None:
    assert told in refusal(tmp_path, settings)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("p4d.24xlarge", "", "fp8: A100-40GB has no fp8 instructions"),
        ("trn1.32xlarge", "", "fp8: NeuronCore-v2 has no fp8 instructions"),
        ("c7i.8xlarge", "", "fp8: a CPU has no fp8 instructions"),
        (
            "p5.48xlarge",
            "train.compile=false",
            "fp8: slower than bf16 unless compiled; use bf16, or train.compile true",
        ),
        (
            "p5.48xlarge",
            "train.parallelism.tensor=2",
            "fp8: not supported with train.parallelism.tensor 2; use bf16, or tensor 1",
        ),
        ("p5.48xlarge", "train.param_dtype=bf16", None),
        ("g6e.48xlarge", "", None),
    ],
)
def test_fp8_is_for_devices_that_have_it(
    tmp_path: Path, kind: str, settings: str, told: str | None
) -> None:
    fleet = f"fleet.backend=ssh fleet.shared_folder=/fsx/x fleet.nodes=1 fleet.instance_type={kind} train.global_batch_size=64"
    wanted = f"{fleet} model.kv_heads=4 train.precision=fp8 {settings}"
    if told:
        assert f"train.precision: {told}" in refusal(tmp_path, wanted)
        return
    (tmp_path / "config.yaml").write_text(CONFIG)
    needs = estimate(load(Settings(tmp_path / "config.yaml", wanted))[0], None)
    assert (
        needs.format == "fp8"
        and needs.peak == 8 * {"p5.48xlarge": 1978.9e12, "g6e.48xlarge": 733e12}[kind]
    )


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        (
            "p3dn.24xlarge",
            "train.precision=bf16",
            "train.precision: bf16: V100-32GB has no bf16 instructions; use fp16, as auto does",
        ),
        (
            "p3dn.24xlarge",
            "train.param_dtype=bf16",
            "train.param_dtype: bf16: V100-32GB has no bf16 instructions; use fp32",
        ),
        (
            "trn1.32xlarge",
            "train.precision=fp16",
            "train.precision: fp16 is not supported on Trainium",
        ),
        (
            "trn2.48xlarge",
            "train.precision=fp16",
            "train.precision: fp16 is not supported on Trainium",
        ),
        ("p3dn.24xlarge", "train.precision=auto", "fp16"),
        ("p3dn.24xlarge", "train.precision=auto train.optimizer=muon", "fp16"),
        (
            "p3dn.24xlarge",
            "train.precision=fp16 train.parallelism.pipeline=2 train.parallelism.tensor=2",
            "fp16",
        ),
        ("p4d.24xlarge", "train.precision=fp16", "fp16"),
        ("p4d.24xlarge", "train.precision=auto", "bf16"),
    ],
)
def test_each_device_gets_the_half_that_it_has(
    tmp_path: Path, kind: str, settings: str, told: str
) -> None:
    wanted = (
        f"fleet.backend=ssh fleet.shared_folder=/fsx/x fleet.nodes=1 fleet.instance_type={kind} train.global_batch_size=64"
        f" model.kv_heads=4 {settings}"
    )
    if ":" in told:
        assert told in refusal(tmp_path, wanted)
        return
    (tmp_path / "config.yaml").write_text(CONFIG)
    needs = estimate(load(Settings(tmp_path / "config.yaml", wanted))[0], None)
    assert (
        needs.format == told
        and needs.peak == 8 * {"p3dn.24xlarge": 125e12, "p4d.24xlarge": 312e12}[kind]
    )


def test_a_budget_of_memory_has_blocks_compiled(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    config, derived = load(Settings(tmp_path / "config.yaml", "train.activation_memory_budget=0.5"))
    assert config.train.compile and "budget" in next(
        row.why for row in derived if row.key == "train.compile"
    )


@pytest.mark.parametrize(
    "settings", ["tensor=2", "pipeline=2", "context=4", "fsdp=4", "pipeline=4"]
)
def test_what_can_be_divided_so_is_taken(tmp_path: Path, settings: str) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    config, _ = load(Settings(tmp_path / "config.yaml", f"train.parallelism.{settings}"))
    assert (
        config.train.global_batch_size % (config.train.micro_batch_size * config.data_parallel) == 0
    )
