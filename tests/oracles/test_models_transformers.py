"""Our models beside those of `transformers`: folders go out and in, and the same weights give the same logits and gradients."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from requirement import need
from trainfleet import models
from trainfleet.config import huggingface_config as shapes
from trainfleet.config.families import FAMILIES
from trainfleet.config.types import Model
from trainfleet.config.weight_files import BIASES
from trainfleet.engine import generate
from trainfleet.models import huggingface_weights
from trainfleet.trust.errors import RunError

LLAMA = Model("test", "llama", 3, 48, 6, 2, 80, 120, 64, 10_000.0, 1e-5, False)
PLAIN = replace(LLAMA, kv_heads=6, tie_word_embeddings=True, dropout=0.1)
SHAPES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tie_word_embeddings=True),
    "llama-3.2": replace(
        LLAMA,
        kv_heads=6,
        rope_theta=500_000.0,
        norm_eps=1e-6,
        rope_scaling=32.0,
        max_position_embeddings=9000,
    ),
    "llama-wide-heads": replace(LLAMA, head_dim=16),
    "mistral": replace(LLAMA, family="mistral", head_dim=16),
    "qwen2": replace(LLAMA, family="qwen2", norm_eps=1e-6, rope_theta=1e6),
    "qwen3": replace(LLAMA, family="qwen3", norm_eps=1e-6, head_dim=16, tie_word_embeddings=True),
    "olmo2": replace(LLAMA, family="olmo2", norm_eps=1e-6),
    "gemma": replace(
        LLAMA, family="gemma", norm_eps=1e-6, head_dim=24, kv_heads=1, tie_word_embeddings=True
    ),
    "phi3": replace(LLAMA, family="phi3"),
    "gpt2": replace(PLAIN, family="gpt2"),
    "bert": replace(PLAIN, family="bert", norm_eps=1e-12),
    "roberta": replace(PLAIN, family="roberta"),
    "bert-untied": replace(PLAIN, family="bert", norm_eps=1e-12, tie_word_embeddings=False),
    "roberta-untied": replace(PLAIN, family="roberta", tie_word_embeddings=False),
}
EVERY = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def make(shape: Model) -> models.Network:
    """A model far from its first weights: no bias is 0, no gain is 1."""
    model, generator = models.build(shape), torch.Generator().manual_seed(0)
    model.initialize(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.eval()


def export(model: models.Network, folder: Path) -> Path:
    folder.mkdir()
    content = {"pad_token_id": None} | shapes.write(model.shape)
    (folder / "config.json").write_text(json.dumps(content, sort_keys=True))
    huggingface_weights.save(model, model.shape.family, folder)
    return folder


def load(folder: Path, shape: Model) -> models.Network:
    model = models.build(shape)
    tensors = huggingface_weights.load(
        folder, shape, huggingface_weights.sizes_of(model.named_parameters())
    )
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def theirs_of(folder: Path, shape: Model) -> Any:
    transformers = need("transformers")
    kind = getattr(transformers, FAMILIES[shape.family].folder.architecture)
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


def tokens_of(shape: Model) -> Tensor:
    return torch.randint(3, shape.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))


@EVERY
def test_an_exported_folder_gives_the_same_logits_and_gradients(
    shape: Model, tmp_path: Path
) -> None:
    ours, tokens = make(shape), tokens_of(shape)
    theirs = theirs_of(export(ours, tmp_path / "out"), shape)
    if isinstance(ours, models.Bert):
        segments = (torch.arange(40) > 20).long().expand(2, 40)
        told = theirs(tokens, token_type_ids=segments)
        mine, other = ours(torch.stack((tokens, segments), 2)), told.prediction_logits
        follows = ours.pooler(ours.features(torch.stack((tokens, segments), 2)))
        torch.testing.assert_close(follows, told.seq_relationship_logits, rtol=1e-5, atol=1e-6)
    else:
        mine, other = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    mine.square().sum().backward()
    other.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        there = huggingface_weights.counterpart_of(shape.family, name)
        if not there.parts and parameter.grad is not None:
            gradient = parameter.grad.T if there.turned else parameter.grad
            expected = (
                gradients.get(there.name)
                if gradients.get(there.name) is not None
                else gradients[BIASES[there.name]]
            )
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4, msg=name)


@EVERY
def test_out_in_and_out_again_are_the_same_bytes(
    shape: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case, limit in (("one", 10**9), ("several", 20_000)):
        monkeypatch.setattr(huggingface_weights, "SHARD_BYTES", limit)
        first = export(make(shape), tmp_path / f"{case}-first")
        found = shapes.read(first)
        assert all(getattr(found, key) in (None, getattr(shape, key)) for key in vars(found)), found
        second = export(load(first, shape), tmp_path / f"{case}-second")
        names = sorted(path.name for path in first.iterdir())
        assert names == sorted(path.name for path in second.iterdir()) and (len(names) > 4) == (
            case == "several"
        )
        assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@EVERY
def test_the_same_text_is_written_greedily(shape: Model, tmp_path: Path) -> None:
    if not isinstance(ours := make(shape), models.Llama | models.GPT2):
        return  # it writes none
    theirs, prompt = theirs_of(export(ours, tmp_path / "out"), shape), tokens_of(shape)[:1, :8]
    written = theirs.generate(
        prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 8:].tolist()
    made = generate.continuation(
        ours, prompt[0].tolist(), temperature=0, top_k=1, generator=torch.Generator(), stop_at=()
    )  # fmt: skip
    assert [token for token, _ in zip(made, range(30), strict=False)] == written


@EVERY
def test_what_transformers_saves_comes_in(shape: Model, tmp_path: Path) -> None:
    ours = make(shape)
    theirs_of(export(ours, tmp_path / "out"), shape).save_pretrained(
        tmp_path / "saved", max_shard_size="100KB"
    )
    found, back = shapes.read(tmp_path / "saved"), load(tmp_path / "saved", shape)
    assert found.layers == shape.layers and found.rope_scaling == shape.rope_scaling
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))


def test_a_folder_that_is_not_the_model_is_refused_by_name(tmp_path: Path) -> None:
    shape = SHAPES["gpt2"]
    folder = export(make(shape), tmp_path / "good")
    tensors = load_file(folder / "model.safetensors")

    def refusal(changed: dict[str, Tensor] | None, other: Model = shape) -> str:
        shutil.rmtree(broken := tmp_path / "broken", ignore_errors=True)
        shutil.copytree(folder, broken)
        (broken / "model.safetensors").unlink()
        if changed is not None:
            save_file(changed, broken / "model.safetensors")
        with pytest.raises(RunError) as caught:
            load(broken, other)
        return str(caught.value)

    lacking = {
        name: tensor for name, tensor in tensors.items() if name != "transformer.h.1.mlp.c_fc.bias"
    }
    assert "lacks weights" in (told := refusal(lacking)) and "transformer.h.1.mlp.c_fc.bias" in told
    assert (
        "the model does not have" in (told := refusal(tensors | {"score.weight": torch.zeros(2)}))
        and "score.weight" in told
    )
    assert "neither model.safetensors" in refusal(None)
    assert (
        "a weight with the wrong shape"
        in (told := refusal(tensors, replace(shape, vocab_size=128)))
        and "(128, 48)" in told
    )
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(RunError, match="safetensors"):
        load(folder, shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "mamba"},
            'model_type: "mamba" is not supported; supported: llama, mistral, qwen2, qwen3, olmo2, gemma, phi3, gpt2',
        ),
        ({"attention_bias": True}, "attention_bias: true is not supported for llama"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "is not supported; supported: Llama 3's",
        ),
        ({"hidden_size": None}, "lacks hidden_size"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: 0.5 is not supported for llama; supported: 1.0",
        ),
        (
            {"layer_types": ["sliding_attention"]},
            'layer_types: ["sliding_attention"] is not supported; every layer needs "full_attention"',
        ),
    ],
)
def test_a_shape_that_is_not_built_is_refused_by_key(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shapes.write(LLAMA) | change))
    with pytest.raises(ValueError, match=r".") as caught:
        shapes.read(tmp_path)
    assert words in str(caught.value)


def test_older_files_come_in_under_their_old_names(tmp_path: Path) -> None:
    """The first GPT-2 files lack `transformer.` and carry the mask; the first BERT files say gamma and beta."""
    for family, old in (
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        ("bert", old_bert),
    ):
        folder = export(ours := make(SHAPES[family]), tmp_path / family)
        tensors = {
            old(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(
            tensors | ({"h.0.attn.bias": torch.ones(2)} if family == "gpt2" else {}),
            folder / "model.safetensors",
        )
        back = load(folder, SHAPES[family])
        assert all(
            torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True)
        )


def old_bert(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_head_that_differs_is_refused_and_as_transformers_has_it_once_untied(
    tmp_path: Path, family: str
) -> None:
    """transformers 5 keeps a tied output layer that has other numbers; the proposed mend gives its logits."""
    transformers = need("transformers")
    shape = replace(SHAPES[family], tie_word_embeddings=True)
    folder, file = export(make(shape), tmp_path / "out"), tmp_path / "out/model.safetensors"
    head = {"bert": "cls.predictions.decoder.weight"}.get(family, "lm_head.weight")
    tensors = load_file(file) | {head: torch.randn(shape.vocab_size, shape.hidden_size) / 9}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RunError, match="differs from its embedding") as caught:
        huggingface_weights.load(folder, shape, {})
    assert "tie_word_embeddings to false" in caught.value.next
    if family != "llama":
        return
    judge = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    mended = models.build(replace(shape, tie_word_embeddings=False)).eval()
    mended.load_state_dict(
        huggingface_weights.load(
            folder, mended.shape, huggingface_weights.sizes_of(mended.named_parameters())
        )
    )
    ids = torch.arange(20)[None]
    torch.testing.assert_close(mended(ids), judge(ids).logits, atol=1e-4, rtol=1e-4)
