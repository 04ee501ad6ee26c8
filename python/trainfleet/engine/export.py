"""Exports a run's model in another format: `python -m trainfleet.engine.export RUN_FOLDER OUT
FORMAT` (config/platforms.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..config import Config, huggingface_config, load_resolved, platforms
from ..config.families import FAMILIES
from ..config.vocabulary import FILE, SPECIALS
from ..data.dataset import Dataset
from ..data.tokenizer import Tokenizer
from ..data.tokenizer import load as load_tokenizer
from ..models import Network
from ..models import huggingface_weights as weights
from ..run.run_folder import Run, unwritable
from ..trust.errors import RunError, telling
from ..trust.redaction import hide
from ..trust.safe_output import install
from .generate import load
from .model_card import CARD, card

Json = dict[str, Any]
Save = Callable[[Network, str, Path], list[str]]  # model, family, folder → the files' names


@telling
def main(arguments: list[str]) -> int:
    folder, out, form = arguments
    files = export(Run(Path(folder)), Path(out), form)
    print(f"{out}: {', '.join(files)}\nnext: {platforms.loading(form, Path(out))}")
    return 0


def export(run: Run, out: Path, form: str = platforms.HUGGINGFACE) -> list[str]:
    """Writes the run's newest checkpoint into the new folder `out`, which appears completely or not
    at all. Returns its files.

    Raises:
        RunError: `out` already exists, the run has no checkpoint, or its model has no such form.
    """
    platforms.require_new(out)
    config, partial = load_resolved(run.config), out.with_name(f".{out.name}.{os.getpid()}")
    if module := config.model.module:
        why = f"transformers has no network like that of {module}"
        raise RunError(
            "has no Hugging Face form",
            where=str(run.folder),
            why=why,
            next="make sample, make eval",
        )
    save = saving(config, form, run)
    try:
        partial.mkdir(parents=True)
        files = fill(run, partial, save)
        if form == platforms.HUGGINGFACE:
            (partial / CARD).write_text(hide(card(run, config)), encoding="utf-8")
            files.append(CARD)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise unwritable(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return files


def fill(run: Run, folder: Path, save: Save) -> list[str]:
    """Writes the newest checkpoint's model and its tokenizer into a folder. Returns the files'
    names.
    """
    model, dataset = load(run, torch.device("cpu"))
    try:
        return write(model, load_tokenizer(dataset.folder), dataset, folder, save)
    except OSError as error:
        raise unwritable(folder, error) from error


def saving(config: Config, form: str, run: Run) -> Save:
    """Returns the function that writes a model's weights in a format.

    Raises:
        RunError: the model can't be divided so.
    """
    said = platforms.degrees(form)
    if said is None:
        return weights.save
    write = platforms.named(form.partition("-")[0]).saving(config, said, str(run.folder))
    return lambda model, family, folder: write(weights.outgoing(model, family), folder)


def write(
    model: Network, tokenizer: Tokenizer, dataset: Dataset, folder: Path, save: Save = weights.save
) -> list[str]:
    """Writes the model's shape, its weights and its tokenizer in the forms that `transformers`
    reads. Returns the files' names.
    """
    named = special_tokens(tokenizer, model.shape.family, dataset.manifest.end_of_document)
    ids = {
        f"{role}_id": tokenizer.vocabulary[token]
        for role, token in named.items()
        if role in ("eos_token", "pad_token")
    }
    shape = (
        huggingface_config.write(model.shape)
        | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        | ids
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.shape.max_position_embeddings,
        **named,
    }
    for name, content in ((huggingface_config.CONFIG, shape), ("tokenizer_config.json", settings)):
        (folder / name).write_text(
            json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    (folder / FILE).write_text(definition(tokenizer, model.shape.family, named), encoding="utf-8")
    return [
        huggingface_config.CONFIG,
        *save(model, model.shape.family, folder),
        FILE,
        "tokenizer_config.json",
    ]


def special_tokens(tokenizer: Tokenizer, family: str, end: int) -> dict[str, str]:
    """Returns the special tokens by the library's name for their role."""
    names = {id_: token for token, id_ in tokenizer.vocabulary.items()}
    if FAMILIES[family].causal:
        return {"eos_token": names[end]}
    roles = {
        "cls_token": "start",
        "sep_token": "separator",
        "mask_token": "mask",
        "pad_token": "padding",
    }
    return {
        theirs: next(name for name in SPECIALS[ours] if name in tokenizer.vocabulary)
        for theirs, ours in roles.items()
    }


def definition(tokenizer: Tokenizer, family: str, named: dict[str, str]) -> str:
    """Returns tokenizer.json; for a masked model it also sets the first and last token of an input,
    like training did.
    """
    content = json.loads(tokenizer.definition)
    if FAMILIES[family].causal or content.get("post_processor"):
        return tokenizer.definition
    start, separator = named["cls_token"], named["sep_token"]

    def special(token: str, segment: int) -> Json:
        return {"SpecialToken": {"id": token, "type_id": segment}}

    single = [special(start, 0), {"Sequence": {"id": "A", "type_id": 0}}, special(separator, 0)]
    known = {
        token: {"id": token, "ids": [tokenizer.vocabulary[token]], "tokens": [token]}
        for token in (start, separator)
    }
    second = [{"Sequence": {"id": "B", "type_id": 1}}, special(separator, 1)]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": known,
    }
    return json.dumps(content | {"post_processor": template}, ensure_ascii=False, indent=2)


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
