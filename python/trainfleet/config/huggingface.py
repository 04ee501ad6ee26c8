"""A model's shape as Hugging Face's config.json, both ways. Nothing is loaded for it: `make plan` reads one too."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .families import FAMILIES
from .presets import Preset
from .types import Model

CONFIG = "config.json"
Json = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How a family writes its shape: which key each of our dimensions has there, and what must stand in the keys of others."""

    architecture: str
    keys: dict[str, str]
    fixed: Json = field(default_factory=dict)


_COMMON = {
    "vocabulary_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
_LLAMA = _COMMON | {"norm_epsilon": "rms_norm_eps", "kv_heads": "num_key_value_heads"}
_BERT = _COMMON | {"norm_epsilon": "layer_norm_eps", "dropout": "hidden_dropout_prob"}
_GPT2 = _COMMON | {
    "hidden_size": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "intermediate_size": "n_inner",
    "max_sequence_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
}
_PLAIN = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_ENCODER = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
FORMATS = {
    "llama": Format("LlamaForCausalLM", _LLAMA, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}),
    "gpt2": Format("GPT2LMHeadModel", _GPT2, {"activation_function": "gelu_new", **_PLAIN}),
    "bert": Format("BertForPreTraining", _BERT, {**_ENCODER, "type_vocab_size": 2}),
    "roberta": Format("RobertaForMaskedLM", _BERT, {**_ENCODER, "type_vocab_size": 1, "pad_token_id": 1}),
}
# A dropout of its own for attention and embeddings: ours is one for all.
OTHER_DROPOUTS = {"gpt2": ("attn_pdrop", "embd_pdrop"), "bert": ("attention_probs_dropout_prob",)}
OTHER_DROPOUTS["roberta"] = OTHER_DROPOUTS["bert"]
STRETCHED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def write(model: Model) -> Json:
    """The config.json of a shape, but for what is the tokenizer's."""
    form, family = FORMATS[model.family], FAMILIES[model.family]
    content: Json = {"architectures": [form.architecture], "model_type": model.family}
    content |= {theirs: getattr(model, ours) for ours, theirs in form.keys.items()} | form.fixed
    content |= dict.fromkeys(OTHER_DROPOUTS.get(model.family, ()), model.dropout)
    if model.family == "roberta":
        content["max_position_embeddings"] += family.positions_from
    if family.rotary:
        stretched = STRETCHED | {"factor": model.rope_scaling} if model.rope_scaling != 1 else {"rope_type": "default"}
        content |= {"head_dim": model.hidden_size // model.heads, "rope_theta": model.rope_theta}
        content["rope_parameters"] = stretched | {"rope_theta": model.rope_theta}
    return content | {"dtype": "float32"}


def read(folder: Path) -> Preset:
    """The shape that a folder's config.json has.

    Raises:
        ValueError: there is none, or it is of a model that is not built here; which key says so.
    """
    content = _load(folder / CONFIG)
    family = content.get("model_type")
    if family not in FORMATS:
        raise ValueError(f"{folder / CONFIG}: model_type {family!r} is not built; built: {', '.join(FORMATS)}")
    form, values = FORMATS[family], _defaults(content, family)
    for key, value in form.fixed.items():
        if content.get(key, value) != value:
            raise ValueError(f"{folder / CONFIG}: {key} {content[key]!r} is not built for {family}: {value!r} is")
    if missing := sorted(theirs for theirs in form.keys.values() if values.get(theirs) is None):
        raise ValueError(f"{folder / CONFIG}: lacks {', '.join(missing)}")
    dropouts = {content[key] for key in OTHER_DROPOUTS.get(family, ()) if key in content}
    shape = {ours: values[theirs] for ours, theirs in form.keys.items()}
    if dropouts - {shape.get("dropout")}:
        raise ValueError(f"{folder / CONFIG}: has several dropouts ({', '.join(map(str, sorted(dropouts)))}); one is built")
    if family == "roberta":
        shape["max_sequence_length"] -= FAMILIES[family].positions_from
    return Preset(family, **{"kv_heads": shape["heads"]} | shape | _rotary(folder, content, family))


def _load(path: Path) -> Json:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error


def _defaults(content: Json, family: str) -> Json:
    """The file with what `transformers` takes where older files leave a key out."""
    values: Json = {"tie_word_embeddings": family != "llama"} | content
    if family == "llama":
        values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
        values.setdefault("rms_norm_eps", 1e-6)
    if family == "gpt2":
        values["n_inner"] = values.get("n_inner") or 4 * values.get("n_embd", 0)
    return values


def _rotary(folder: Path, content: Json, family: str) -> Json:
    """Base and stretch of the rotary embedding, from where files of either age have them."""
    if not FAMILIES[family].rotary:
        return {}
    scaling: Json = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    stretched: Json = {key: scaling.get(key) for key in STRETCHED if key != "rope_type"} if kind == "llama3" else {}
    if kind not in ("default", "llama3") or any(STRETCHED[key] != value for key, value in stretched.items()):
        raise ValueError(f"{folder / CONFIG}: rope scaling {scaling} is not built: Llama 3's is")
    head = content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]
    if head * content["num_attention_heads"] != content["hidden_size"]:
        raise ValueError(f"{folder / CONFIG}: head_dim {head} is not built: hidden_size / num_attention_heads is")
    theta: Any = scaling.get("rope_theta", content.get("rope_theta", 10_000.0))
    return {"rope_theta": float(theta), "rope_scaling": float(scaling["factor"]) if kind == "llama3" else 1.0}
