"""train.parallelism: auto chooses the least division that is near the fastest, keeps what was given, and says why; plans need no machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainfleet.cli import main as command
from trainfleet.config import Config, Derived, Settings, load
from trainfleet.config.layout_search import needs
from trainfleet.config.layouts import refit
from trainfleet.config.limits import usable_bytes
from trainfleet.hardware.node_types import INSTANCE_TYPES
from trainfleet.recipes import FOLDER
from trainfleet.trust.errors import ConfigError

FLEET = """
name: fleet
fleet: {{backend: ssh, nodes: {nodes}, instance_type: {kind}, shared_folder: /fsx/x}}
data: {{vocab_size: 500}}
model: {{preset: {preset}}}
train: {{global_batch_size: {batch}, sequence_length: {length}, parallelism: auto}}
"""


def chosen(folder: Path, settings: str = "", **words: object) -> tuple[Config, dict[str, Derived]]:
    text = FLEET.format(
        **(
            {
                "nodes": 8,
                "kind": "p5.48xlarge",
                "preset": "llama-3-8b",
                "batch": 512,
                "length": 8192,
            }
            | words
        )
    )
    (folder / "config.yaml").write_text(text)
    exact = "train.spike_sigmas=0" if "trn1" in text else ""
    config, derived = load(Settings(folder / "config.yaml", f"{settings} {exact}".strip()))
    return config, {row.key: row for row in derived}


@pytest.mark.parametrize(
    ("words", "layout", "recompute"),
    [
        ({"preset": "llama-3.2-1b"}, "fsdp 1 tensor 1 pipeline 1", "none"),
        ({"preset": "llama-3-8b"}, "fsdp 8 zero_stage 3 tensor 1 pipeline 1", "none"),  # within a node, replicas over nodes
        ({"preset": "llama-3-70b", "nodes": 16}, "fsdp 128 zero_stage 3 tensor 1 pipeline 1", "full"),  # a last stage has the output layer too
        ({"preset": "llama-2-13b", "kind": "p4d.24xlarge", "nodes": 2, "length": 4096}, "fsdp 4 zero_stage 1 tensor 4", "selective"),
        ({"preset": "llama-2-7b", "kind": "trn1.32xlarge", "nodes": 4, "length": 4096}, "fsdp 16 zero_stage 1 tensor 4 pipeline 2", "none"),
        ({"preset": "llama-2-70b", "kind": "trn1.32xlarge", "nodes": 32, "batch": 1024, "length": 4096}, "zero_stage 1 tensor 8 pipeline 8", "full"),
        ({"preset": "llama-3-8b", "batch": 8}, "tensor 8", "none"),  # 64 ranks, 8 sequences: the others help with those
        ({"preset": "llama-3-8b", "kind": "g6.48xlarge", "nodes": 2, "batch": 64, "length": 4096}, "fsdp 16 zero_stage 3 tensor 1", "full"),
        ({"preset": "bert-large", "kind": "trn1.32xlarge", "nodes": 16, "batch": 65536, "length": 128}, "fsdp 512 zero_stage 1 tensor 1", "none"),
        ({"nodes": 48, "batch": 128}, "tensor 4 pipeline 3", "none"),  # 384 = 3 x 128
        ({"preset": "llama-3-70b", "nodes": 10_000, "batch": 80_000}, "fsdp 32 zero_stage 3", "full"),  # 4 nodes share the state: a ring over all is slow
    ],
)  # fmt: skip
def test_the_least_division_that_is_near_the_fastest_is_taken(
    tmp_path: Path, words: dict[str, object], layout: str, recompute: str
) -> None:
    config, derived = chosen(tmp_path, **words)
    device = INSTANCE_TYPES[config.fleet.instance_type or ""].accelerator
    assert device and needs(config) <= usable_bytes(device)
    found = config.train.parallelism
    pairs = dict(zip(layout.split()[::2], map(int, layout.split()[1::2]), strict=True))
    assert {
        name: getattr(found, name) for name in pairs
    } == pairs and config.train.activation_checkpointing == recompute
    assert "GiB" in derived["train.parallelism.fsdp"].why
    assert (
        config.train.global_batch_size % (config.data_parallel * config.train.micro_batch_size) == 0
    )


def test_what_was_given_stays(tmp_path: Path) -> None:
    config, derived = chosen(
        tmp_path,
        "train.parallelism.tensor=4 train.activation_checkpointing=full train.micro_batch_size=2",
    )
    assert (
        config.train.parallelism.tensor,
        config.train.activation_checkpointing,
        config.train.micro_batch_size,
    ) == (
        4,
        "full",
        2,
    )
    assert not {
        "train.parallelism.tensor",
        "train.activation_checkpointing",
        "train.micro_batch_size",
    } & set(derived)
    assert (
        chosen(
            tmp_path, "train.parallelism.fsdp=1 train.parallelism.tensor=1", preset="llama-3.2-1b"
        )[0].train.parallelism.fsdp
        == 1
    )


def test_a_model_that_no_layout_holds_is_refused_with_a_number_of_nodes_that_would_do(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"train.parallelism: auto: no layout of 8 ranks .* GiB per rank; set NODES=2",
    ):
        chosen(tmp_path, nodes=1, preset="llama-3-70b", batch=64)
    assert chosen(tmp_path, nodes=2, preset="llama-3-70b", batch=64)[0].fleet.nodes == 2


@pytest.mark.parametrize(
    ("settings", "preset", "way"),
    [
        ("train.parallelism.fsdp=1", "llama-3-8b", "train.parallelism.fsdp=1 is in the way; set train.parallelism.fsdp=8"),
        ("train.parallelism.fsdp=1 train.activation_checkpointing=none train.micro_batch_size=2", "llama-3-70b",
         r"train.activation_checkpointing=none are in the way; set train.parallelism.fsdp=\d+ .*train.activation_checkpointing=full$"),
    ],
)  # fmt: skip
def test_a_given_key_that_is_in_the_way_is_named_with_a_value_that_fits(
    settings: str, preset: str, way: str, tmp_path: Path
) -> None:
    """No number of nodes helps a rank that has to hold the whole model."""
    settings += " train.parallelism.tensor=1 train.parallelism.pipeline=1"
    with pytest.raises(ConfigError) as caught:
        chosen(tmp_path, settings, nodes=4, preset=preset, batch=256)
    said = caught.value.problems[0].message
    assert re.search(way, said) and "many more nodes" not in said
    offered = said.rpartition("set ")[2]
    kept = {word.partition("=")[0]: word for word in f"{settings} {offered}".split()}
    assert chosen(tmp_path, " ".join(kept.values()), nodes=4, preset=preset, batch=256)


def test_matrices_are_not_split_over_pcie_and_a_batch_that_does_not_divide_is_what_is_told(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"no layout of 8 ranks of 19.8 GiB .*; set NODES=2"
    ):  # tensor 8 would fit
        chosen(tmp_path, kind="g6.48xlarge", nodes=1, batch=64, length=4096)
    with pytest.raises(ConfigError) as caught:
        chosen(tmp_path, kind="g6.48xlarge", nodes=2, batch=8, length=2048)
    assert [problem.key for problem in caught.value.problems] == ["train.global_batch_size"]


def test_weights_in_bf16_are_offered_where_they_make_it_fit(tmp_path: Path) -> None:
    one = {"kind": "p5en.48xlarge", "nodes": 1, "batch": 8, "length": 4096}
    with pytest.raises(
        ConfigError, match=r"set NODES=2, or train.param_dtype=bf16 train.precision=bf16\n"
    ):
        chosen(tmp_path, "fleet.ranks_per_node=1", **one)
    config, _ = chosen(
        tmp_path, "fleet.ranks_per_node=1 train.param_dtype=bf16 train.precision=bf16", **one
    )
    assert needs(config) < 105 * 2**30 and config.train.parallelism.fsdp == 1


def test_a_word_that_is_no_layout_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'train.parallelism: "fast" is not valid; write it like "auto"'
    ):
        chosen(tmp_path, "train.parallelism=fast")


def test_the_resolved_config_holds_what_was_chosen(tmp_path: Path) -> None:
    from trainfleet.config import dump_resolved, load_resolved

    config, _ = chosen(tmp_path)
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert (
        load_resolved(tmp_path / "resolved.yaml") == config and config.train.parallelism.fsdp == 8
    )


def test_on_fewer_nodes_the_state_is_sharded_over_those_that_are_left(tmp_path: Path) -> None:
    config, _ = chosen(tmp_path, nodes=16, preset="llama-3-70b", batch=480 * 128)
    fewer = refit(config, 15)
    assert fewer.train.parallelism.fsdp == 120 and fewer.data_parallel == 120
    config, _ = chosen(tmp_path, "train.parallelism.fsdp=16", nodes=16, batch=480 * 128)
    assert refit(config, 15).train.parallelism.fsdp == 15


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("llama-2-7b-trn1", ("4 nodes x 32 ranks (trn1.32xlarge)", "16 data-parallel (state over 16, ZeRO 1) x 4 tensor x 2 pipeline", "of 14.4 usable per rank, assumed", "an MFU of 40%, predicted")),
        ("llama-3-8b-p5", ("8 nodes x 8 ranks (p5.48xlarge)", "64 data-parallel (state over 8, ZeRO 3)", "of 71.3 usable per rank, within 16% for four of five published runs", "an MFU of 39%, predicted")),
        ("bert-large-trn1", ("16 nodes x 32 ranks (trn1.32xlarge)", "512 data-parallel\n", "512 x 2 micro-batches of 64")),
        ("roberta-large-p3dn-ec2", ("8 nodes x 8 ranks (p3dn.24xlarge)", "fp16 V100-32GB has no bf16 instructions", "125 TFLOP/s per rank, fp16")),
    ],
)  # fmt: skip
def test_a_fleet_that_is_not_there_yet_is_planned(
    recipe: str, told: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["plan", f"CONFIG={FOLDER / recipe}.yaml"]) == 0
    said = capsys.readouterr().out
    words = " ".join(said.split())  # whatever the terminal's width
    assert all(
        " ".join(part.split()) in words for part in (*told, "FI_PROVIDER", "hosts: none yet", "MFU")
    ), said


def test_a_layout_that_was_written_and_can_not_fit_is_refused_with_what_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = " ".join(
        f"train.parallelism.{name}=1"
        for name in ("fsdp", "tensor", "pipeline", "context", "zero_stage", "virtual_stages")
    )
    for settings, warned in ((whole, True), ("", False)):
        assert command(["plan", f"CONFIG={FOLDER / 'llama-3-8b-p5'}.yaml", f"SET={settings}"]) == (
            2 if warned else 0
        )
        said = capsys.readouterr()
        assert (
            ("warning: this is unlikely to fit" in said.out)
            == ("model.preset: llama-3-8b needs" in said.err)
            == warned
        )


def test_who_searched_for_a_micro_batch_is_told_the_key_that_remains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        command(
            ["plan", f"CONFIG={FOLDER / 'llama-3-8b-p5'}.yaml", "SET=train.search_micro_batch=true"]
        )
        == 2
    )
    assert (
        "train.search_micro_batch: unknown key; did you mean micro_batch_size?"
        in capsys.readouterr().err
    )


def test_without_hosts_nothing_is_launched(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", f"CONFIG={FOLDER / 'llama-3-8b-p5'}.yaml"]) == 2
    assert "fleet.hosts: the ssh backend needs a list of your machines" in capsys.readouterr().err
