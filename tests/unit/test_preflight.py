"""What is refused before a start because it can't work, and that what is offered instead does."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from s3server import Application, serve
from trainfleet.backends import local, terms_of
from trainfleet.config import Config, Settings, load
from trainfleet.config.memory_fit import Room, checkpoint_bytes, lack
from trainfleet.hardware import accelerators, node_types
from trainfleet.launch import preflight
from trainfleet.report.history import size
from trainfleet.storage import s3
from trainfleet.trust.errors import ConfigError, S3Error

GIB = 2**30
HERE = "name: x\nfleet: {backend: local, nodes: 2}\ndata: {vocab_size: 2048}\nmodel: {preset: %s}\ntrain: {steps: 100, %s}\n"
H100 = (
    "name: x\nfleet: {backend: ssh, nodes: 1, hosts: [a], shared_folder: /f, instance_type: p5.48xlarge}\n"
    "model: {preset: llama-3-70b}\ndata: {vocab_size: 2048}\n"
    "train: {steps: 9, global_batch_size: 512, parallelism: {fsdp: 1, tensor: 1, pipeline: 1, context: 1, zero_stage: 3, virtual_stages: 1}}\n"
)


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_types, "local_accelerators", lambda: 0)
    monkeypatch.setattr(node_types, "local_memory", lambda: 24 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(10**15))
    return tmp_path


def config(text: str, set: str = "", short: dict[str, tuple[str, str]] | None = None) -> Config:
    Path("config.yaml").write_text(text)
    return load(Settings(Path("config.yaml"), set, short or {}), terms_of)[0]


def offers(message: str) -> list[str]:
    return message.partition("these fit: ")[2].split(", or ")


@pytest.mark.parametrize(
    ("preset", "train"),
    [
        ("llama-2-7b", ""),
        ("llama-3.2-1b", "optimizer: adamw"),
        ("gpt2-large", "micro_batch_size: 32, global_batch_size: 64, sequence_length: 1024"),
    ],
)
def test_what_is_offered_in_place_of_a_model_that_is_too_large_is_accepted(
    preset: str, train: str
) -> None:
    """An offer is what a user types next, so each is loaded as it would be typed, and must pass."""
    text = HERE % (preset, train)
    with pytest.raises(
        ConfigError,
        match=f"model.preset: {preset} needs .* GiB per rank, .* for 2 ranks, but this machine has 24.0 GiB",
    ) as caught:
        preflight.require(config(text))
    found = offers(caught.value.problems[0].message)
    assert found and found[0]
    for words in found:
        nodes = re.fullmatch(r"NODES=(\d+)", words)
        smaller = config(
            text, "" if nodes else words, {"NODES": ("fleet.nodes", nodes[1])} if nodes else {}
        )
        preflight.require(smaller)
        assert preflight.this_machine().wanted(smaller) < 24 * GIB


def test_a_model_that_may_fit_is_not_refused_though_it_is_tight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = config(HERE % ("llama-3.2-1b", "optimizer: adamw"), "fleet.nodes=1")
    wanted = preflight.this_machine().wanted(tight)
    for memory, refused in ((wanted / 1.1, False), (wanted / 1.3, True)):
        monkeypatch.setattr(node_types, "local_memory", lambda memory=memory: int(memory))
        assert bool(list(preflight.problems(tight))) == refused
    monkeypatch.setattr(node_types, "spare_memory", lambda: int(wanted * 0.8))
    assert " free now" in preflight.warnings(tight)[-1]


def test_what_others_machines_have_does_not_count_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts without fleet.backend would train here; without a GPU, cuda would fail on every rank."""
    text = HERE % ("tiny", "optimizer: adamw")
    assert (
        "warning: fleet.hosts is not used on this machine; set fleet.backend: ssh"
        in preflight.warnings(config(text, "fleet.hosts=[a,b]"))
    )
    assert not any("fleet.hosts" in line for line in preflight.warnings(config(text)))
    monkeypatch.setattr(node_types, "local_accelerators", lambda: 0)
    monkeypatch.setattr(local, "WSL", Path("none"))
    with pytest.raises(ConfigError, match=r"fleet\.platform: cuda: .* drivers report no GPU"):
        config(text, "fleet.platform=cuda")


def test_a_device_that_does_not_hold_its_part_is_told_before_any_host_is_asked() -> None:
    found = dict(preflight.problems(config(H100)))
    assert (
        "llama-3-70b needs" in found["model.preset"]
        and "a H100-80GB has 79.2 GiB" in found["model.preset"]
    )
    assert "NODES=" in found["model.preset"]


def test_what_this_machine_has_says_nothing_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_types, "local_accelerator", lambda: accelerators.BY_NAME["A10G-24GB"])
    with pytest.raises(
        ConfigError,
        match=r"fleet\.accelerator: null: fleet\.platform cuda means GPUs, but no key names their type",
    ):
        config(H100.replace("instance_type: p5.48xlarge", "platform: cuda"))
    assert not dict(
        preflight.problems(config(H100.replace("p5.48xlarge}", "p5.48xlarge, platform: cpu}")))
    )


def test_a_node_has_room_for_its_own_ranks_alone() -> None:
    two = config(HERE % ("llama-3.2-1b", "optimizer: adamw"))
    rank = Room(0, "rank", "").wanted(two)
    assert Room(0, "node", "").wanted(two) == rank and Room(0, "all", "").wanted(two) == 2 * rank
    assert lack(two, Room(1.1 * rank, "node", "the node")) is None
    assert lack(two, Room(1.1 * rank, "all", "this machine")) is not None


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ("train.compile=false", 1.05),
        (
            "train.compile=true train.activation_checkpointing=full",
            1.05,
        ),  # a block's input is kept whatever a compiler does
        ("train.compile=true", 1.2),
    ],
)
def test_a_run_is_refused_beyond_what_its_estimate_can_be_too_high(
    settings: str, most: float
) -> None:
    small = config(HERE % ("llama-3.2-1b", "optimizer: adamw"), settings)
    wanted = Room(0, "rank", "").wanted(small)
    assert lack(small, Room(1.01 * wanted / most, "rank", "a device")) is None
    assert lack(small, Room(0.99 * wanted / most, "rank", "a device")) is not None


def test_checkpoints_that_the_disk_does_not_hold_are_refused_with_how_many_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = config((HERE % ("small", "optimizer: adamw")) + "checkpoint: {every: 10, keep: 4}\n")
    one = checkpoint_bytes(small)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(3.5 * one))
    assert (
        "5 checkpoints of" in (message := dict(preflight.problems(small))["checkpoint.keep"])
        and "set checkpoint.keep=2" in message
        and f"of {size(one)} need {size(5 * one)}" in message
    )
    for step in (10, 20):  # what is there already needs no more room
        Path(f"runs/x/checkpoints/step-{step:08d}").mkdir(parents=True)
    assert not list(preflight.problems(small))


def test_folders_that_can_not_be_written_are_all_named(desk: Path) -> None:
    (desk / "file").touch()
    shut = config(HERE % ("tiny", ""), f"checkpoint.path={desk}/file/deeper")
    assert "is a file" in dict(preflight.problems(shut))["checkpoint.path"]
    shut = config(HERE % ("tiny", ""), "checkpoint.path=/proc/1/deeper")
    assert "is not writable" in dict(preflight.problems(shut))["checkpoint.path"]


def test_a_bucket_that_may_not_be_written_is_told_before_the_start() -> None:
    asked: list[str] = []

    def deny(start: Callable[[Application], Application]) -> Application:
        def answer(environ: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
            if environ["PATH_INFO"].endswith(".writable"):
                asked.append(environ["REQUEST_METHOD"])
                if closed:
                    begin(
                        "403 Forbidden",
                        [("Content-Type", "application/xml"), ("Content-Length", "57")],
                    )
                    return [b"<Error><Code>AccessDenied</Code><Message/></Error>".ljust(57)]
            return start(environ, begin)  # type: ignore[return-value, arg-type]

        return answer

    closed = False
    with serve(deny):  # type: ignore[arg-type]
        kept = config(HERE % ("tiny", ""), "checkpoint.path=s3://bucket/kept")
        preflight.try_addresses(kept)
        assert asked == ["PUT", "DELETE"] and not s3.list_objects("s3://bucket/")
        closed = True
        with pytest.raises(S3Error) as told:
            preflight.try_addresses(kept)
        assert "access is denied" in str(told.value)
    preflight.try_addresses(config(HERE % ("tiny", "")))  # in the run's own folder: nothing to ask


def test_a_control_group_that_limits_memory_is_believed(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (tmp_path / "membership").write_text("0::/a/b\n")
    assert list(node_types.memory_limits(tmp_path, tmp_path / "membership")) == [1000]


@pytest.mark.parametrize(("tokens", "warned"), [(4096, True), (32000, False)])
def test_a_small_tokenizer_of_a_model_with_many_tokens_is_warned_of(
    tokens: int, warned: bool
) -> None:
    told = preflight.warnings(config(H100.replace("vocab_size: 2048", f"vocab_size: {tokens}")))
    assert (
        any("128,256 tokens, but the tokenizer will have 4,096" in line for line in told) is warned
    )
