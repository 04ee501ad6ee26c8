"""What one version of `transformers` makes of folders: `python transformers_judge.py COMMAND FOLDER [NUMBER]`, in that version's process.

It knows nothing of this project: it loads folders that others wrote and saves models of its own, each with the logits that it computes
(transformers_versions.py compares them).

load FOLDER         each folder in it that has inputs.safetensors gets theirs.safetensors, and the loader's complaints are printed
make FOLDER COUNT   writes COUNT models of random shapes a family, each with inputs and logits
keys FOLDER         for each family base.json, and a file for each key that has a value which makes another function of the model
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.modeling_rope_utils
from safetensors.torch import load_file, save_file

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "phi3")
CLASSES = {
    **{name: (f"{name.title()}Config", f"{name.title()}ForCausalLM") for name in LLAMA_LIKE},
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "bert": ("BertConfig", "BertForPreTraining"),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM"),
}
FIFTH = int(transformers.__version__.split(".")[0]) >= 5
STRETCHED_TOKENS, TOKENS = (
    1_200,
    40,
)  # a stretched rope shows in the slow waves alone, at late positions
# What other values a key may have, by its own value's type: transformers itself refuses those that make no model.
OTHERS: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (1, 3, 16, 0),
    float: (0.5, 2.0, 0.0),
    str: ("relu", "gelu_new", "relative_key"),
    list: (["sliding_attention"], [0]),
    dict: ({"0": [0]},),  # heads of layers, pruned
    type(None): (True, 1, 0.5, 3, "relu"),
}
THETA = 5e5
ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 16,
    },
]
# Which model it is, and in which number format it is computed: a folder's weights are loaded here as they are.
IDENTITY = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype"}


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [B, T], or tokens and segments [B, T, 2] -> [B, T, V]."""
    with torch.no_grad():
        if tokens.ndim == 3:
            return model(input_ids=tokens[..., 0], token_type_ids=tokens[..., 1]).prediction_logits
        return model(input_ids=tokens).logits


def class_of(content: dict[str, Any]) -> Any:
    return getattr(transformers, CLASSES[content["model_type"]][1])


def load(folder: Path) -> None:
    for inputs in sorted(folder.glob("*/inputs.safetensors")):
        case = inputs.parent
        kind = class_of(json.loads((case / "config.json").read_text()))
        model, told = kind.from_pretrained(
            case, output_loading_info=True, attn_implementation="eager"
        )
        complaints = {key: sorted(map(str, value)) for key, value in told.items() if value}
        if complaints:
            print(f"{case.name}: {complaints}")
        save_file(
            {"logits": logits_of(model.eval(), load_file(inputs)["tokens"]).contiguous()},
            case / "theirs.safetensors",
        )


def make(folder: Path, count: int) -> None:
    draw = random.Random(count)
    for family in CLASSES:
        for number in range(count):
            config = random_config(family, draw, tied=number % 2 == 0)
            model = shaken(class_of({"model_type": family})(config), number)
            save(model, folder / f"{family}-{number}", family)


def save(model: Any, folder: Path, family: str) -> None:
    """A folder as save_pretrained writes it, with inputs and what the model makes of them."""
    model.save_pretrained(folder)
    tokens = inputs_for(model.config, family)
    save_file({"tokens": tokens}, folder / "inputs.safetensors")
    save_file({"logits": logits_of(model, tokens).contiguous()}, folder / "theirs.safetensors")


def inputs_for(config: Any, family: str) -> torch.Tensor:
    longest = config.max_position_embeddings - (2 if family == "roberta" else 0)
    longest = min(
        longest, getattr(config, "sliding_window", None) or longest
    )  # what a window hides is refused at training
    count = STRETCHED_TOKENS if longest >= STRETCHED_TOKENS else min(TOKENS, longest)
    tokens = torch.randint(
        3, config.vocab_size, (1, count), generator=torch.Generator().manual_seed(count)
    )
    return torch.stack((tokens, torch.arange(count)[None] % 2), -1) if family == "bert" else tokens


def shaken(model: Any, seed: int) -> Any:
    """The model far from its first weights: no bias is 0, no gain is 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.float().eval()


def random_config(family: str, draw: random.Random, tied: bool, plain: bool = False) -> Any:
    """`plain`: of one layer, and with the rotary embedding as it is."""
    heads, features = draw.choice([2, 4, 6]), draw.choice([8, 12, 16])
    shape: dict[str, Any] = {
        "vocab_size": draw.choice([64, 100, 257]), "hidden_size": heads * features, "num_hidden_layers": 1 if plain else draw.choice([1, 2, 3]),
        "num_attention_heads": heads, "intermediate_size": draw.choice([40, 96, 130]),
        "max_position_embeddings": draw.choice([32, 64, 128]), "tie_word_embeddings": tied, "attn_implementation": "eager",
    }  # fmt: skip
    if family in LLAMA_LIKE:
        shape |= {
            "num_key_value_heads": draw.choice([each for each in range(1, heads + 1) if heads % each == 0]),
            "rms_norm_eps": draw.choice([1e-5, 1e-6]), "pad_token_id": None,
        } | rope(draw, plain or family == "phi3" or (family == "olmo2" and not FIFTH))  # fmt: skip
        if family in ("llama", "mistral", "qwen3", "gemma"):
            shape |= {"head_dim": features, "hidden_size": draw.choice([heads * features, 48])}
        if family == "mistral":
            shape["sliding_window"] = draw.choice([None, 16, 4096])
    elif family == "gpt2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
                 "max_position_embeddings": "n_positions"}  # fmt: skip
        shape = {names.get(key, key): value for key, value in shape.items()} | {
            "layer_norm_epsilon": draw.choice([1e-5, 1e-6])
        }
    else:
        shape |= {"layer_norm_eps": draw.choice([1e-12, 1e-5])}
        if family == "roberta":
            shape |= {
                "pad_token_id": 1,
                "type_vocab_size": 1,
                "max_position_embeddings": shape["max_position_embeddings"] + 2,
            }
    return getattr(transformers, CLASSES[family][0])(**shape)


def rope(draw: random.Random, plain: bool) -> dict[str, Any]:
    """A rotary embedding as this version's classes take it: of Llama 3.1's kind one time in two, for its sequence length."""
    theta = draw.choice([1e4, 5e5, 1e6])
    found: dict[str, Any] = {"rope_type": "default"}
    if stretched := draw.random() < 0.5 and not plain:
        found = {"rope_type": "llama3", "factor": draw.choice([8.0, 32.0]), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192}  # fmt: skip
    more = {"max_position_embeddings": 131_072} if stretched else {}
    if FIFTH:
        return {"rope_parameters": found | {"rope_theta": theta}, **more}
    return {"rope_theta": theta, "rope_scaling": found if stretched else None, **more}


def keys(folder: Path) -> None:
    for family in CLASSES:
        content = random_config(family, random.Random(0), tied=True, plain=True).to_dict()
        here = folder / family
        here.mkdir(parents=True)
        (here / "base.json").write_text(json.dumps(content))
        for number, (key, value) in enumerate(changes(family, content)):
            (here / f"{number}.json").write_text(
                json.dumps({"key": key, "value": value, "config": content | {key: value}})
            )


def changes(family: str, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each key with a value that gives the same weights another function, or the model other weights: the first that does, and every one
    of a word or a rope. Keys are those of the family's config and those that its module's own source reads of one.
    """
    kind = class_of({"model_type": family})
    model = shaken(kind(config_of(family, content)), 0)
    tokens = inputs_for(model.config, family)
    weights, expected = model.state_dict(), logits_of(model, tokens)
    sizes = {name: value.shape for name, value in weights.items()}

    def alike(values: dict[str, Any]) -> bool:
        try:
            changed = kind(config_of(family, content | values)).eval()
            if {name: value.shape for name, value in changed.state_dict().items()} != sizes:
                return False
            changed.load_state_dict(weights)
            return torch.allclose(logits_of(changed, tokens), expected, rtol=1e-4, atol=1e-5)
        except Exception:  # transformers itself makes no model of it, or none that can be run
            return True

    for key in sorted((content.keys() | read_by(kind)) - IDENTITY):
        value = content.get(key)
        ropes = (
            [{"rope_theta": THETA, **each} for each in ROPES]
            if key in ("rope_parameters", "rope_scaling")
            else []
        )
        for other in ropes or OTHERS.get(type(value), ()):
            if other != value and not alike({key: other}):
                yield key, other
                if not ropes and not isinstance(value, str):
                    break


def read_by(kind: Any) -> set[str]:
    """The keys that a model's code reads of its config, by name."""
    modules = (sys.modules[kind.__module__], transformers.modeling_rope_utils)
    return {
        name
        for module in modules
        for name in re.findall(r"config\.([a-z]\w+)\b(?!\()", inspect.getsource(module))
    } | {
        name
        for module in modules
        for name in re.findall(r"config, \"([a-z]\w+)\"", inspect.getsource(module))
    }


def config_of(family: str, content: dict[str, Any]) -> Any:
    config = getattr(transformers, CLASSES[family][0]).from_dict(deepcopy(content))
    config._attn_implementation = "eager"
    return config


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    command, where, *numbers = sys.argv[1:]
    {"load": load, "make": make, "keys": keys}[command](Path(where), *map(int, numbers))
