"""Exports a run's model: `python -m trainfleet.engine.export RUN_FOLDER OUT FORMAT`.

config/platforms.py lists the formats. Hugging Face exports include a model card that states the
base model, training data and scores.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import marker
from ..checkpoints.init_from import locate
from ..config import Config, huggingface_config, load_resolved, platforms, weight_files
from ..config.addresses import HUB, MODEL, dataset_of, folder_of
from ..config.families import FAMILIES
from ..config.vocabulary import FILE, SPECIALS
from ..data.chat import ChatTemplate
from ..data.dataset import Dataset
from ..data.tokenizer import Tokenizer
from ..data.tokenizer import load as load_tokenizer
from ..models import Network
from ..models import huggingface_weights as weights
from ..run.run_folder import Run, unwritable
from ..trust import untrusted_input
from ..trust.errors import InputError, RunError, TrainfleetError, telling
from ..trust.redaction import hide
from ..trust.safe_output import run_program
from .generate import load, stops_of

Json = dict[str, Any]
Save = Callable[[Network, str, Path], list[str]]  # (model, family, folder) -> file names

CARD = "README.md"
REVISION = re.compile("[0-9a-f]{40}")
LICENCE = re.compile(r"^license:[ \t]*[\"']?([A-Za-z0-9.-]{1,40})[\"']?[ \t]*$", re.MULTILINE)
LEFT_OUT = re.compile(r"[^\w.+-]+")  # characters that are unsafe in Markdown


@telling
def main(arguments: list[str]) -> int:
    folder, out, form = arguments
    files = export(Run(Path(folder)), Path(out), form)
    print(f"{out}: {', '.join(files)}\nnext: {platforms.loading(form, Path(out))}")
    return 0


def export(run: Run, out: Path, form: str = platforms.HUGGINGFACE) -> list[str]:
    """Exports the run's newest checkpoint to the new folder `out` and returns the file names.

    The folder appears only once it is complete.

    Raises:
        RunError: `out` already exists, the run has no checkpoint, or the format does not support
            its model.
    """
    platforms.require_new(out)
    config = load_resolved(run.config)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    if module := config.model.module:
        raise RunError(
            "can't be exported to Hugging Face's format",
            where=str(run.folder),
            why=f"transformers has no class for the model in {module}",
            next="use make sample or make eval",
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
    """Writes the newest checkpoint's model and tokenizer to a folder. Returns the file names."""
    model, dataset = load(run, torch.device("cpu"))
    try:
        return write(model, load_tokenizer(dataset.folder), dataset, folder, save)
    except OSError as error:
        raise unwritable(folder, error) from error


def saving(config: Config, form: str, run: Run) -> Save:
    """Returns the function that writes a model's weights in the given format.

    Raises:
        RunError: the model can't be sharded in the way the format requires.
    """
    said = platforms.degrees(form)
    if said is None:
        return weights.save
    write = platforms.named(form.partition("-")[0]).saving(config, said, str(run.folder))
    return lambda model, family, folder: write(weights.outgoing(model, family), folder)


def write(
    model: Network, tokenizer: Tokenizer, dataset: Dataset, folder: Path, save: Save = weights.save
) -> list[str]:
    """Writes config, weights and tokenizer in Hugging Face format. Returns the file names."""
    named = special_tokens(tokenizer, model.shape.family, dataset.manifest.end_of_document)
    ids = {
        f"{role}_id": tokenizer.vocabulary[token]
        for role, token in named.items()
        if role in ("eos_token", "pad_token")
    }
    chat, ends = chat_of(dataset)
    shape = (
        huggingface_config.write(model.shape)
        | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        | ids
        | ends
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.shape.max_position_embeddings,
        **named,
        **chat,
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


def chat_of(dataset: Dataset) -> tuple[Json, Json]:
    """Returns the chat-related entries of tokenizer_config.json and config.json."""
    if not dataset.manifest.settings.conversations:
        return {}, {}
    template = ChatTemplate.read(dataset.folder)
    return json.loads(template.definition), {"eos_token_id": sorted(stops_of(dataset))}


def special_tokens(tokenizer: Tokenizer, family: str, end: int) -> dict[str, str]:
    """Returns the special tokens, keyed by their role in `transformers`."""
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
    """Returns the contents of tokenizer.json.

    For a masked model, adds a post-processor that inserts the start and separator tokens, as in
    training.
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


@dataclass(frozen=True)
class Base:
    """Model that a run was initialized from.

    Unknown fields are empty or None, for example if that model has since been deleted.
    """

    name: str
    hub: str = ""  # Hub name: owner/name
    identity: str = ""  # Hub revision, or file name and checksum
    licence: str = ""
    tokens: int | None = None  # number of training tokens


def card(run: Run, config: Config) -> str:
    """Returns the model card (README.md) for an exported folder."""
    base = base_of(run, config)
    task = "text-generation" if FAMILIES[config.model.family].causal else "fill-mask"
    about = {"library_name": "transformers", "pipeline_tag": task}
    if base and base.hub:
        about |= {"base_model": base.hub, "base_model_relation": "finetune"}
    if base and base.licence:
        about |= {"license": base.licence}
    head = "\n".join(f"{key}: {value}" for key, value in about.items())
    sources = ", ".join(
        dict.fromkeys(f"`{name_of(source.path)}`" for source in config.data.mixture)
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in _rows(run, config, base).items())
    how = (
        f"Continued with trainfleet from {_named(base)}"
        if base
        else "Trained from scratch with trainfleet"
    )
    return (
        f"---\n{head}\n---\n\n# {config.name}\n\n{how}, on {sources}.\n\n| | "
        f"|\n|---|---|\n{table}\n"
    )


def base_of(run: Run, config: Config) -> Base | None:
    """Returns the model that the run was initialized from, or None if it started from scratch.

    The run's latest `initialized` event takes precedence over the config.
    """
    told = [
        str(event.get("source")) for event in run.read_events() if event["event"] == "initialized"
    ]
    address = told[-1] if told else config.train.init_from
    if not address:
        return None
    known = Base(_last(address))
    # export even if the base model has been deleted or can't be read
    with suppress(TrainfleetError, OSError, ValueError):
        return _seen(address, known)
    return known


def name_of(source: str) -> str:
    """Returns a data source's name for the public model card.

    Hub addresses are kept, and paths are reduced to their last component.
    """
    with suppress(InputError):
        if source.startswith(HUB) and not dataset_of(source).name.startswith(("/", ".")):
            return source
    return _last(source)


def _seen(address: str, known: Base) -> Base:
    """Returns the base model at an address, with whatever details its files provide."""
    if address.startswith(HUB):
        folder, name = folder_of(address), address.removeprefix(HUB).partition("@")[0]
        revision = f"revision {folder.name}" if REVISION.fullmatch(folder.name) else ""
        return Base(name, name, revision, _licence(folder))
    if platforms.checkpoint_at(address):
        return known
    folder = Path(address)
    if (folder / huggingface_config.CONFIG).is_file():
        return Base(known.name, _origin(folder), _checksum(folder), _licence(folder))
    store, step = locate(address)
    commit = store.read(step)
    digest = hashlib.sha256((store.marker(step) or "").encode()).hexdigest()
    run = str(commit.config.get("name") or known.name)
    return Base(
        f"step {step:,} of {_last(run)}",
        identity=f"sha256 of its {marker.MARKER}: {digest}",
        tokens=commit.tokens,
    )


def _origin(folder: Path) -> str:
    """Returns the Hub name recorded in a folder's config.json, or "" if it is missing."""
    name = untrusted_input.read_json(folder / huggingface_config.CONFIG).get("_name_or_path", "")
    return name if isinstance(name, str) and MODEL.fullmatch(name) and "@" not in name else ""


def _checksum(folder: Path) -> str:
    """Returns the SHA-256 of the weight file.

    For several files, returns the SHA-256 of the output of `sha256sum`.
    """
    names = weight_files.file_names(folder)
    digests = []
    for name in names:
        digest = hashlib.sha256()
        with untrusted_input.open_regular(folder / name) as file:
            while block := file.read(untrusted_input.MEBIBYTE):
                digest.update(block)
        digests.append(digest.hexdigest())
    if len(names) == 1:
        return f"sha256 of {names[0]}: {digests[0]}"
    lines = "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))
    return (
        "sha256 of the output of `sha256sum *.safetensors`: "
        f"{hashlib.sha256(lines.encode()).hexdigest()}"
    )


def _licence(folder: Path) -> str:
    """Returns the license stated in a folder's model card, or "" if it is missing."""
    with suppress(FileNotFoundError, InputError):
        _, _, rest = untrusted_input.read_text(folder / CARD, untrusted_input.MEBIBYTE).partition(
            "---\n"
        )
        found = LICENCE.search(rest.partition("\n---")[0])
        return found[1] if found else ""
    return ""


def _named(base: Base) -> str:
    link = f"[{base.name}](https://huggingface.co/{base.hub})" if base.hub else f"`{base.name}`"
    return f"{link} ({base.identity})" if base.identity else link


def _last(path: str) -> str:
    """Returns the last meaningful component of a path or address, escaped for Markdown."""
    parts = [
        part
        for part in re.split("/", path.partition("://")[2] or path)
        if part and "*" not in part and part.strip(".")
    ]
    return LEFT_OUT.sub("_", parts[-1])[:100] if parts else "text"


def _rows(run: Run, config: Config, base: Base | None) -> dict[str, Any]:
    train, results = config.train, run.read_results()
    tokens = f"{results.get('tokens', 0):,}"
    if base:
        before = f"the {base.tokens:,}" if base.tokens is not None else "those"
        tokens += f", after {before} that {base.name} was trained on"
    return {
        "architecture": FAMILIES[config.model.family].folder.architecture,
        "parameters": f"{results.get('model', {}).get('parameters', 0):,}",
        "steps": f"{results.get('steps', 0):,} of {train.global_batch_size:,} sequences of "
        f"{train.sequence_length:,} tokens",
        "tokens": tokens,
        "training loss": results.get("final_loss"),
        "validation loss": results.get("valid_loss"),
        "optimizer": f"{train.optimizer}, learning rate {train.learning_rate:g}, "
        f"{train.schedule} schedule, seed {train.seed}",
    }


if __name__ == "__main__":
    run_program(main)
