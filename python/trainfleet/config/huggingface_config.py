"""Reads and writes model shapes as Hugging Face config.json files.

Imports no model library, because `make plan` also uses this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..trust import untrusted_input
from ..trust.errors import InputError
from ..trust.untrusted_input import show
from ..trust.validation import fit
from . import schema
from .conversion import told
from .families import FAMILIES, Family, Preset
from .types import Model

CONFIG = "config.json"
LARGEST = untrusted_input.MEBIBYTE  # maximum size of a config.json; published files are a few KiB
Json = dict[str, Any]


READ = ("model_type", "quantization_config", "layer_types")  # keys read for every family
TURNING = ("head_dim", "rope_theta", "rope_scaling", "rope_parameters")
FULL_ATTENTION = "full_attention"
GELU = "gelu_pytorch_tanh"
# Activation function keys. Older files contain only the first, and write GELU as `gelu`.
ACTIVATIONS = ("hidden_act", "hidden_activation")
STRETCHED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(model: Model) -> Json:
    """Returns the config.json of a model shape, without tokenizer keys.

    Keys that differ between `transformers` 4 and 5 are written under both names.
    """
    family = FAMILIES[model.family]
    form = family.folder
    content: Json = {"architectures": [form.architecture], "model_type": model.family}
    content |= {theirs: getattr(model, ours) for ours, theirs in form.keys.items()} | {**form.fixed}
    content |= dict.fromkeys(form.dropouts, model.dropout)
    content[form.keys["max_position_embeddings"]] += family.positions_from
    if family.rotary:
        stretched = STRETCHED | {"factor": model.rope_scaling} if model.rope_scaling != 1 else None
        content |= {"head_dim": model.head_features}
        content |= dict.fromkeys(("hidden_act", "hidden_activation"), GELU) if family.gelu else {}
        content |= form.written
        content["rope_parameters"] = (stretched or {"rope_type": "default"}) | {
            "rope_theta": model.rope_theta
        }
        # key names before transformers 5
        content |= {"rope_theta": model.rope_theta, "rope_scaling": stretched}
    return content | {"dtype": "float32", "torch_dtype": "float32"}


def read(folder: Path) -> Preset:
    """Reads a model's shape from a folder's config.json.

    Raises:
        InputError: the file is missing, its model is not supported, or a number is outside the
            bounds of the config key. The error contains the key.
    """
    path = folder / CONFIG
    try:
        text = untrusted_input.read_text(path, LARGEST)
        return _read(untrusted_input.parse_json(text, str(path)))
    except FileNotFoundError as error:
        raise InputError(
            told(folder) or "there is no such file",
            where=str(path),
            next="set model.preset to a known shape or another folder",
        ) from error
    except InputError as error:
        where = error.where or f"{path}:{untrusted_input.line_of(text, error.key)}"
        raise InputError(error.what, where=where, key=error.key) from error


def unused(folder: Path) -> list[str]:
    """Returns the keys of a folder's config.json that trainfleet ignores.

    `transformers` may use them.
    """
    content = untrusted_input.read_json(folder / CONFIG, LARGEST)
    form = (family := FAMILIES[content["model_type"]]).folder
    read = {
        *READ,
        *TURNING * family.rotary,
        *ACTIVATIONS * family.gelu,
        *form.keys.values(),
        *form.fixed,
        *form.refused,
        *form.dropouts,
        *form.aliases,
        form.window,
    }
    return sorted(key for key, value in content.items() if value is not None and key not in read)


def _read(content: Any) -> Preset:
    if not isinstance(content, dict):
        raise InputError(f"must be an object, not {show(content)}")
    if (how := content.get("quantization_config")) is not None:
        what = f"the weights are quantized ({show(how)}) and can't be trained"
        then = "use the folder of the unquantized model"
        raise InputError(f"{what}; {then}", key="quantization_config")
    name = content.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            f"{show(name)} is not supported; supported: {', '.join(FAMILIES)}", key="model_type"
        )
    family = FAMILIES[name]
    _require_its_function(content, family)
    _one_attention(content)
    shape = _dimensions(content, family)
    _one_dropout(content, family, shape.get("dropout"))
    rotary = _rotary(content, family) if family.rotary else {}
    return fit(Preset, {"family": name, "kv_heads": shape["heads"]} | shape | rotary)


def _require_its_function(content: Json, family: Family) -> None:
    """Rejects values that would make the family's weights compute a different function."""
    form = family.folder
    needed: dict[str, tuple[Any, ...]] = dict.fromkeys(
        ACTIVATIONS * family.gelu, (GELU, "gelu", None)
    )
    needed |= {key: (value,) for key, value in form.fixed.items()}
    needed |= {key: (value, None) for key, value in form.refused.items()}
    for key, (built, *others) in needed.items():
        if (value := content.get(key, built)) not in (built, *others):
            raise InputError(
                f"{show(value)} is not supported for {family.name}; supported: {show(built)}",
                key=key,
            )


def _dimensions(content: Json, family: Family) -> Json:
    """Returns the model dimensions, each validated against its config key."""
    keys, values = family.folder.keys, _defaults(content, family)
    if missing := sorted(theirs for theirs in keys.values() if values.get(theirs) is None):
        raise InputError(f"this file lacks {', '.join(missing)}", key=missing[0])
    shape = {ours: values[theirs] for ours, theirs in keys.items()}
    if unused := family.positions_from:
        shape["max_position_embeddings"] = _whole(shape["max_position_embeddings"]) - unused
    for ours, theirs in keys.items():
        _check(ours, theirs, shape[ours])
    return shape


def _whole(value: Any) -> int:
    return value if type(value) is int else 0  # _check rejects 0 with a message that names the key


def _check(ours: str, theirs: str, value: Any) -> None:
    """Raises InputError if the schema of `model.<ours>` rejects a value."""
    for fault in schema.faults(
        value, schema.load_schema()["properties"]["model"]["properties"][ours]
    ):
        raise InputError(next(schema.explain(*fault))[1], key=theirs)


def _one_attention(content: Json) -> None:
    kinds = content.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != FULL_ATTENTION for kind in kinds)
    ):
        raise InputError(
            f"{show(kinds)} is not supported; every layer needs {show(FULL_ATTENTION)}",
            key="layer_types",
        )


def _one_dropout(content: Json, family: Family, dropout: Any) -> None:
    for key in family.folder.dropouts:
        if content.get(key, dropout) != dropout:
            raise InputError(
                f"{show(content[key])}, but another dropout is {show(dropout)}; all must be equal",
                key=key,
            )


def _defaults(content: Json, family: Family) -> Json:
    """Returns the file's values, with `transformers` defaults for keys that older files omit."""
    form = family.folder
    values: Json = {**form.defaults, **content}
    values |= {name: content[alias] for alias, name in form.aliases.items() if alias in content}
    for key, other in form.same_as.items():
        values.setdefault(key, values.get(other))
    # Attention is full within the window, so the window limits the sequence length.
    if form.window and values.get(form.window) is not None:
        key = form.keys["max_position_embeddings"]
        values[key] = min(_whole(values[name]) for name in (key, form.window))
    for key, other in form.four_times.items():
        if values.get(key) is None:
            values[key] = 4 * _whole(values.get(other))
    return values


def _rotary(content: Json, family: Family) -> Json:
    """Returns the rotary embedding's base, scaling and head size, from old or new key names."""
    # if a file contains both, every version of transformers uses rope_scaling
    name = "rope_parameters" if content.get("rope_scaling") in (None, {}) else "rope_scaling"
    scaling = {} if content.get(name) is None else content[name]
    stretched = _is_stretched(scaling, name)
    if (part := scaling.get("partial_rotary_factor", 1.0)) != 1:
        key = f"{name}.partial_rotary_factor"
        raise InputError(f"{show(part)} is not supported; supported: 1.0", key=key)
    head = _head_dim(content, family)
    where = f"{name}.rope_theta" if "rope_theta" in scaling else "rope_theta"
    theta = scaling.get("rope_theta", content.get("rope_theta", 10_000.0))
    factor = scaling.get("factor") if stretched else 1.0
    _check("rope_theta", where, theta)
    if theta is None or factor is None:
        raise InputError("is missing", key="rope_theta" if theta is None else f"{name}.factor")
    _check("rope_scaling", f"{name}.factor", factor)
    return {"rope_theta": float(theta), "rope_scaling": float(factor), "head_dim": head}


def _is_stretched(scaling: Any, name: str) -> bool:
    """Returns whether the rotary embedding is scaled as in Llama 3. Rejects any other scaling."""
    if not isinstance(scaling, dict):
        raise InputError(f"must be an object, not {show(scaling)}", key=name)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return False
    if {**scaling, "rope_type": kind}.items() >= STRETCHED.items():
        return True
    raise InputError(f"{show(scaling)} is not supported; supported: Llama 3's", key=name)


def _head_dim(content: Json, family: Family) -> Any:
    """Returns the features per head, or None if they equal hidden_size / heads."""
    head = content.get("head_dim", family.folder.defaults.get("head_dim"))
    if head is None:
        return None
    _check("head_dim", "head_dim", head)
    if head % 2:
        raise InputError(
            f"{head} is odd; the rotary embedding needs an even number", key="head_dim"
        )
    return None if head == content["hidden_size"] / content["num_attention_heads"] else head
