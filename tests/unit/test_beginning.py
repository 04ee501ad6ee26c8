"""What train.init_from names is looked at by the plan: a folder without the model that is meant ends there, and not on the ranks."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import verbs
from s3server import serve
from trainfleet import models
from trainfleet.checkpoints.init_from import faults, require_distant
from trainfleet.cli import main
from trainfleet.config import (
    Config,
    Settings,
    huggingface_config,
    load,
    load_resolved,
    weight_files,
)
from trainfleet.config.families import FAMILIES
from trainfleet.config.types import Model
from trainfleet.models import huggingface_weights as weights
from trainfleet.storage import s3
from trainfleet.trust.errors import InputError, RunError

OLD, NAME = Path(__file__).parent / "old_checkpoint", "step-00000004"
SHAPE: Model = load_resolved(OLD / "config.yaml").model
Harm = Callable[[Path], object]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a few words\n" * 100)
    return tmp_path


def config_from(address: object, shape: Model = SHAPE) -> Config:
    given = {
        key: value
        for key, value in asdict(shape).items()
        if value is not None and key not in ("preset", "module")
    }
    content = {"name": "new", "data": {"sources": ["text"], "vocab_size": 300}, "model": {"preset": None, **given},
               "train": {"init_from": str(address), "sequence_length": 64}}  # fmt: skip
    Path("new.yaml").write_text(json.dumps(content))
    return load(Settings(Path("new.yaml")))[0]


def told(address: object, shape: Model = SHAPE) -> str:
    return "".join(
        message for key, message in faults(config_from(address, shape)) if key == "train.init_from"
    )


def hugging_face(folder: Path, shape: Model = SHAPE) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(huggingface_config.write(shape)))
    weights.save(models.build(shape), shape.family, folder)
    return folder


def checkpoint(folder: Path) -> Path:
    """A run's folder with one checkpoint."""
    shutil.copytree(OLD / NAME, folder / "checkpoints" / NAME)
    return folder


def in_parts(folder: Path) -> None:
    """Divides a folder's weights over two files with an index."""
    tensors = load_file(folder / weight_files.WEIGHTS)
    (folder / weight_files.WEIGHTS).unlink()
    names, where = sorted(tensors), {}
    for number, half in enumerate((names[::2], names[1::2]), 1):
        save_file({name: tensors[name] for name in half}, folder / f"part-{number}.safetensors")
        where |= dict.fromkeys(half, f"part-{number}.safetensors")
    (folder / weight_files.INDEX).write_text(json.dumps({"weight_map": where}))


def change(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_what_can_be_begun_from_is_let_through(desk: Path) -> None:
    run = checkpoint(desk / "run")
    for address in (
        run,
        run / "checkpoints",
        run / "checkpoints" / NAME,
        hugging_face(desk / "whole"),
    ):
        assert not told(address)
    in_parts(desk / "whole")
    assert not told("whole") and not told("hf://owner/name") and not told("s3://bucket/run")


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "phi3", "gpt2", "bert", "roberta"]
)  # fmt: skip
def test_weights_of_every_family_are_let_through(desk: Path, family: str) -> None:
    """As transformers' own folders have them: tied copies and buffers beside the weights."""
    text = f"name: x\ndata: {{sources: [text], vocab_size: 300}}\nmodel: {{preset: tiny, family: {family}, layers: 2}}\n"
    Path("family.yaml").write_text(text + "train: {sequence_length: 64}\n")
    shape = load(Settings(Path("family.yaml")))[0].model
    weight_files.require(hugging_face(desk / "model", shape), shape)
    file = desk / "model" / weight_files.WEIGHTS
    tensors = load_file(file)
    beside = {
        "bert": "bert.embeddings.position_ids",
        "roberta": "roberta.embeddings.position_ids",
        "gpt2": "transformer.h.0.attn.bias",
    }
    tensors[beside.get(family, "model.layers.0.self_attn.rotary_emb.inv_freq")] = torch.ones(7)
    if shape.tie_word_embeddings:
        tied = {"bert": "cls.predictions.decoder.weight", "roberta": "lm_head.decoder.weight"}.get(
            family, "lm_head.weight"
        )
        source = next(
            name
            for name in tensors
            if name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))
        )
        tensors[tied] = tensors[source].clone()
    save_file(tensors, file)
    weight_files.require(desk / "model", shape)
    if shape.tie_word_embeddings:
        for row in (0, 9):
            other = tensors[tied].clone()
            other[row] += 1
            save_file(tensors | {tied: other}, file)
            with pytest.raises(RunError, match="differs from its embedding"):
                weight_files.require(desk / "model", shape)


HARMS: dict[str, tuple[Harm, str]] = {
    "missing": (shutil.rmtree, "does not exist"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("x")), "is not a folder"),
    "empty": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "contains no model"),
    "other files": (lambda folder: (shutil.rmtree(folder), folder.mkdir(), (folder / "a.txt").touch()), "contains no model"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "lacks config.json"),
    "no weights": (lambda folder: (folder / weight_files.WEIGHTS).unlink(), "has neither model.safetensors nor"),
    "a part missing": (lambda folder: (in_parts(folder), (folder / "part-2.safetensors").unlink()), "part-2.safetensors: is missing"),
    "a part for another": (
        lambda folder: (in_parts(folder), shutil.copy(folder / "part-1.safetensors", folder / "part-2.safetensors")), "parameters",
    ),
    "half a file": (lambda folder: os.truncate(folder / weight_files.WEIGHTS, 900), "can't be read as safetensors"),
    "git-lfs": (
        lambda folder: (folder / weight_files.WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull",
    ),
    "a web page": (lambda folder: (folder / weight_files.WEIGHTS).write_text("<!DOCTYPE html>404"), "a web page"),
    "another family": (lambda folder: change(folder, model_type="mamba"), '"mamba" is not supported'),
    "another shape": (lambda folder: change(folder, hidden_size=32), "model.hidden_size is 32 in this folder, 16 in the config"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "must be an object"),
    "an encoder's": (lambda folder: change(folder, model_type="bert"), "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("harm, why", HARMS.values(), ids=HARMS)
def test_a_folder_without_the_model_is_told_with_what_is_wrong(
    desk: Path, harm: Harm, why: str
) -> None:
    folder = hugging_face(desk / "model")
    harm(folder)
    assert why in told(folder)


def test_weights_that_contradict_their_config_are_told(desk: Path) -> None:
    folder = hugging_face(desk / "model")
    deep = SHAPE.__class__(**{**asdict(SHAPE), "layers": 3})
    change(folder, num_hidden_layers=3)
    assert "have 1 layers, but the model's config.json needs 3" in told(folder, deep)
    tensors = load_file(folder / weight_files.WEIGHTS)
    change(folder, num_hidden_layers=1)
    tensors["model.norm.weight"] = torch.ones(17)
    save_file(tensors, folder / weight_files.WEIGHTS)
    assert "parameters, but the model's config.json needs" in told(folder)


EXTRA = {  # what a family's folders may have beside its weights; and what none may, as then the model computes something else
    "llama": (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "qwen3": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.sinks"),
    "gpt2": ("transformer.h.0.attn.masked_bias", "score.weight"),
    "roberta": ("roberta.pooler.dense.weight", "classifier.out_proj.weight"),
    "bert": ("bert.embeddings.position_ids", "bert.encoder.layer.0.adapter.weight"),
}


@pytest.mark.parametrize("family", EXTRA)
def test_no_weight_of_a_folder_is_passed_over_without_a_word(
    desk: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    def said(code: int = 0) -> str:
        assert main(["plan"]) == code
        return " ".join(" ".join(capsys.readouterr()).split())

    text = f"name: x\ndata: {{sources: [text], vocab_size: 300}}\nmodel: {{preset: tiny, family: {family}, layers: 1}}\n"
    Path("config.yaml").write_text(text + "train: {sequence_length: 64, init_from: model}\n")
    shape = load(Settings(Path("config.yaml")))[0].model
    file = hugging_face(desk / "model", shape) / weight_files.WEIGHTS
    tensors = load_file(file)
    known, other = EXTRA[family]
    assert "the model does not use" not in said()
    beside = {known: torch.ones(7)}
    save_file(tensors | beside, file)
    assert f"model: the model does not use 1 weight: {known}" in said()
    huggingface_weights_are_loaded(desk / "model", shape)
    save_file(tensors | beside | {other: torch.ones(3)}, file)
    refused = said(2)
    assert f"has weights that the model does not have: 1 weight: {other}" in refused
    assert "next: " in refused


def huggingface_weights_are_loaded(folder: Path, shape: Model) -> None:
    """Ranks pass over the same names as the plan."""
    named = models.build(shape).named_parameters()
    assert weights.load(folder, shape, weights.sizes_of(named))


def test_every_key_of_a_config_json_is_gone_by_or_named(desk: Path) -> None:
    folder = hugging_face(desk / "model")
    change(
        folder,
        attention_dropout=0.1,
        rope_interleaved=True,
        initializer_range=0.02,
        pad_token_id=None,
    )
    said = " ".join(line for line in huggingface_config.unused(folder))
    assert (
        said
        == "architectures attention_dropout dtype initializer_range rope_interleaved torch_dtype"
    )
    config_from("model")
    content = json.loads(Path("new.yaml").read_text())
    by_preset = content | {"model": {"preset": "./model"}, "train": {"sequence_length": 64}}
    for config in (content, by_preset):
        Path("new.yaml").write_text(json.dumps(config))
        said = " ".join(verbs.enter(desk, "plan", "CONFIG=new.yaml").split())
        told = "config.json: trainfleet ignores architectures, attention_dropout, dtype,"
        assert said.count(told) == 1, config


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_is_said_to_be_gone_by_that_changes_nothing(desk: Path, family: str) -> None:
    text = f"name: x\ndata: {{sources: [text], vocab_size: 300}}\nmodel: {{preset: tiny, family: {family}, layers: 1}}\n"
    Path("config.yaml").write_text(text)
    content = huggingface_config.write(load(Settings(Path("config.yaml")))[0].model)

    def read(**keys: object) -> object:
        without = (
            {"rope_parameters": None} if "rope_theta" in keys else {}
        )  # which has a base of its own
        (desk / "config.json").write_text(json.dumps(content | keys | without))
        try:
            return huggingface_config.read(desk)
        except InputError:
            return None

    whole, named = read(), huggingface_config.unused(desk)
    assert whole and named == ["architectures", "dtype", "torch_dtype"]
    assert not [key for key in content if key not in named and read(**{key: [7]}) == whole]


def test_a_checkpoint_in_place_of_a_model_is_looked_at_too(desk: Path) -> None:
    run = checkpoint(desk / "run")
    wide = SHAPE.__class__(**{**asdict(SHAPE), "hidden_size": 32, "intermediate_size": 64})
    assert "model.hidden_size is 16 in the checkpoint, 32 in the config" in told(run, wide)
    os.truncate(run / "checkpoints" / NAME / "rank-00000.safetensors", 10)
    assert "rank-00000.safetensors has 10 bytes" in told(
        run
    ) and "rank-00000.safetensors has 10 bytes" in told(run / "checkpoints" / NAME)
    (run / "checkpoints" / NAME / "committed.json").unlink()
    assert "has no committed.json" in told(run) and "has no committed.json" in told(
        run / "checkpoints" / NAME
    )
    (desk / "runs/new/checkpoints/step-00000001").mkdir(parents=True)
    assert not told(run), "a run that has a checkpoint of its own no longer looks there"


def test_nxd_s_checkpoints_are_looked_at_too(desk: Path) -> None:
    tag = desk / "nxd/tag/model"
    tag.mkdir(parents=True)
    for rank in (0, 2):
        torch.save(
            {"norm.weight": torch.ones(4)}, tag / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        )
    (tag.parent / "done").touch()
    assert "lacks dp_rank_00_tp_rank_01_pp_rank_00.pt" in told("nxd")
    second = tag / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    torch.save({"norm.weight": torch.ones(4)}, second)
    whole = second.read_bytes()
    for broken in (b"", whole[:-30], packed(whole)):
        second.write_bytes(broken)
        assert f"{second.name}: is not in torch.save's format" in told("nxd")
    second.write_bytes(whole)
    assert not told("nxd")
    (tag.parents[1] / "config.json").write_text(
        json.dumps(huggingface_config.write(SHAPE) | {"hidden_size": 64})
    )
    assert "model.hidden_size is 64 in this folder, 16 in the config" in told("nxd")


def test_a_model_whose_files_are_links_is_read_where_they_lead(desk: Path) -> None:
    """As in the Hub's cache, or where somebody keeps large files on another disk."""
    folder = hugging_face(desk / "model")
    (folder / weight_files.WEIGHTS).rename(desk / "weights")
    (folder / weight_files.WEIGHTS).symlink_to(desk / "weights")
    assert not told(folder)
    tag = desk / "nxd/tag/model"
    tag.mkdir(parents=True)
    torch.save({"norm.weight": torch.ones(4)}, desk / "slice.pt")
    (tag / "dp_rank_00_tp_rank_00_pp_rank_00.pt").symlink_to(desk / "slice.pt")
    (tag.parent / "done").touch()
    assert not told("nxd")
    cached = desk / "models--me--it/snapshots/0123"
    cached.mkdir(parents=True)
    (desk / "models--me--it/blobs").mkdir()
    for number, path in enumerate(folder.iterdir()):
        shutil.copy(path, desk / f"models--me--it/blobs/{number}")
        (cached / path.name).symlink_to(f"../../blobs/{number}")
    assert not told(cached)


def packed(saved: bytes) -> bytes:
    """What torch.save wrote, in parts that may be of any size once they are unpacked."""
    small = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved)) as old,
        zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    return small.getvalue()


def test_a_bucket_without_a_model_is_told_before_the_start(desk: Path) -> None:
    with serve(lambda application: application):
        s3.write("s3://bucket/run/a.txt", b"x")
        with pytest.raises(RunError, match="contains no model"):
            require_distant(config_from("s3://bucket/run"))


def test_the_verbs_tell_it_with_the_line_before_anything_starts(desk: Path) -> None:
    (desk / "config.yaml").write_text(
        "name: base\ndata: {sources: [text]}\ntrain:\n  init_from: text\n"
    )
    for verb in ("plan", "train"):
        said = verbs.enter(desk, verb, code=2)
        assert (
            "config.yaml:4: train.init_from: text: contains no model" in said and "next: " in said
        )
    assert not (desk / "runs").exists() and not (desk / "data").exists()


@pytest.mark.parametrize("address", ["runs/first", "runs/first/checkpoints/step-00000008"])
def test_a_run_without_a_checkpoint_must_be_trained_first(desk: Path, address: str) -> None:
    for there in (False, True):
        (found,) = [why for _, why in faults(config_from(address))]
        assert "; train first first" in found, found
        (desk / "runs/first").mkdir(parents=True, exist_ok=there)
