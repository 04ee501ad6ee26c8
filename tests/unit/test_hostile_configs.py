"""Configs that were accepted and can't work, that ended in a traceback, or for which something else was proposed than was meant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from trainfleet.config import Settings, huggingface_config, load
from trainfleet.config.types import SshConfig
from trainfleet.hosts import host_results, ssh_config
from trainfleet.hosts.ssh_config import KnownHosts
from trainfleet.hosts.transport import Transport
from trainfleet.trust.errors import ConfigError, InputError


def refusal(folder: Path, text: str) -> str:
    (folder / "config.yaml").write_text(f"name: x\n{text}")
    with pytest.raises(ConfigError) as told:
        load(Settings(folder / "config.yaml"))
    return str(told.value)


@pytest.mark.parametrize(
    "name",
    ["PATH", "LD_PRELOAD", "PYTHONPATH", "TRAINFLEET_NODE", "MASTER_ADDR", "BASH_ENV", "HOME"],
)
def test_a_variable_by_which_programs_run_is_no_secret(name: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, f"fleet: {{secrets: [HF_TOKEN, {name}]}}\n")
    assert f"fleet.secrets: {name}: each node sets its own value" in said


def test_what_learns_its_positions_has_no_base_of_a_rotary_embedding(tmp_path: Path) -> None:
    assert "model.rope_theta: 5: gpt2 has learned positions" in refusal(
        tmp_path, "model: {family: gpt2, rope_theta: 5}\n"
    )
    (tmp_path / "config.yaml").write_text("name: x\nmodel: {family: gpt2}\n")
    assert load(Settings(tmp_path / "config.yaml"))[0].model.family == "gpt2"


@pytest.mark.parametrize("scaling", [[], "", 0, False, [1]])
def test_a_stretch_of_the_rotary_embedding_is_an_object_or_null(
    scaling: object, tmp_path: Path
) -> None:
    shape = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
             "max_position_embeddings": 64, "vocab_size": 300, "architectures": ["LlamaForCausalLM"]}  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape | {"rope_scaling": None}))
    assert huggingface_config.read(tmp_path).rope_scaling == 1
    for name in ("rope_scaling", "rope_parameters"):
        file.write_text(json.dumps(shape | {name: scaling}))
        with pytest.raises(InputError, match="must be an object"):
            huggingface_config.read(tmp_path)


@pytest.mark.parametrize(("text", "meant"), [
    ("fleet: {aws: {zone: a}}", "did you mean zones?"), ("fleet: {aws: {buckets: x}}", "did you mean bucket?"),
    ("fleet: {batch: {queues: x}}", "did you mean queue?"), ("data: {dataset: x}", "did you mean sources?"),
    ("dataset: x", "did you mean data.sources?"), ("data: {corpus: x}", "did you mean sources?"),
    ("model: {head: 2}", "did you mean heads?"), ("train: {step: 2}", "did you mean steps?"),
])  # fmt: skip
def test_a_key_that_is_off_by_a_letter_is_the_one_that_stands_here(
    text: str, meant: str, tmp_path: Path
) -> None:
    assert meant in refusal(tmp_path, f"{text}\n")


@pytest.mark.parametrize("key", ["key", "config", "known_hosts"])
def test_a_home_of_nobody_is_told_of_and_no_traceback(key: str) -> None:
    ssh = replace(SshConfig(**dict.fromkeys(SshConfig.__dataclass_fields__)), **{key: "~nobodyx/k"})  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=rf"fleet.ssh.{key}.*~nobodyx/k.*the home folder of an unknown user"
    ):
        {"config": lambda: ssh_config.read(ssh), "known_hosts": lambda: KnownHosts.of(ssh),
         "key": lambda: Transport._login(type("T", (), {"ssh": ssh})(), 1.0)}[key]()  # type: ignore[arg-type]  # fmt: skip


def test_an_answer_with_an_endless_number_is_told_of_in_a_sentence() -> None:
    with pytest.raises(host_results.Implausible) as told:
        host_results.fitted(int, "9" * 5000)
    said = str(host_results.implausible(told.value, "a mirror's"))
    assert "the text has a number with too many digits" in said, said


def test_no_config_is_too_long_to_be_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"name": "x", "data": {"sources": ["s"] * 10_001}})
    )
    with pytest.raises(ConfigError, match=r"data\.sources"):
        load(Settings(tmp_path / "config.yaml"))
