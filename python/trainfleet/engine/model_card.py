"""Writes the model card of an export: the model, the weights it began from, its training data, and
its scores.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import listing, marker
from ..checkpoints.init_from import locate
from ..config import Config, huggingface_config, platforms, weight_files
from ..config.addresses import HUB, MODEL, dataset_of, folder_of
from ..config.families import FAMILIES
from ..run.run_folder import Run
from ..trust import untrusted_input
from ..trust.errors import InputError, TrainfleetError

CARD = "README.md"
REVISION = re.compile("[0-9a-f]{40}")
LICENCE = re.compile(r"^license:[ \t]*[\"']?([A-Za-z0-9.-]{1,40})[\"']?[ \t]*$", re.MULTILINE)
LEFT_OUT = re.compile(r"[^\w.+-]+")  # characters of a name that are removed from Markdown text


@dataclass(frozen=True)
class Base:
    """The model that a run began from. Empty or None means unknown: it is gone, or does not name
    itself.
    """

    name: str
    hub: str = ""  # owner/name
    identity: str = ""  # identity of its content: a revision of the Hub, or a checksum and its file
    licence: str = ""
    tokens: int | None = None  # number of tokens of its training


def card(run: Run, config: Config) -> str:
    """Returns the README.md of an exported folder."""
    base = base_of(run, config)
    about = {"library_name": "transformers", "pipeline_tag": _task(config)}
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
    """Returns the model that the run began from, according to its events; None if it began from
    scratch.
    """
    told = [
        str(event.get("source")) for event in run.read_events() if event["event"] == "initialized"
    ]
    address = told[-1] if told else config.train.init_from
    if not address:
        return None
    known = Base(_last(address))
    # it may be gone since, and the card is about another model
    with suppress(TrainfleetError, OSError, ValueError):
        return _seen(address, known)
    return known


def name_of(source: str) -> str:
    """Returns a source's public name: a dataset of the Hub by its address, others without the
    folders above them.
    """
    with suppress(InputError):
        if source.startswith(HUB) and not dataset_of(source).name.startswith(("/", ".")):
            return source
    return _last(source)


def _seen(address: str, known: Base) -> Base:
    """Describes the model at an address as far as its current files show it."""
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
    commit = listing.read(store, step)
    digest = hashlib.sha256((store.marker(step) or "").encode()).hexdigest()
    run = str(commit.config.get("name") or known.name)
    return Base(
        f"step {step:,} of {_last(run)}",
        identity=f"sha256 of its {marker.MARKER}: {digest}",
        tokens=commit.tokens,
    )


def _origin(folder: Path) -> str:
    """Returns the name on the Hub in a downloaded folder's config; "" without one."""
    name = untrusted_input.read_json(folder / huggingface_config.CONFIG).get("_name_or_path", "")
    return name if isinstance(name, str) and MODEL.fullmatch(name) and "@" not in name else ""


def _checksum(folder: Path) -> str:
    """Returns the SHA-256 of the only file of weights, or of the output of `sha256sum` for
    several.
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
    """Returns the licence that a folder's own card names; "" without one."""
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
    """Returns the last meaningful part of a path or an address, without characters that Markdown
    interprets.
    """
    parts = [
        part
        for part in re.split("/", path.partition("://")[2] or path)
        if part and "*" not in part and part.strip(".")
    ]
    return LEFT_OUT.sub("_", parts[-1])[:100] if parts else "text"


def _task(config: Config) -> str:
    return "text-generation" if FAMILIES[config.model.family].causal else "fill-mask"


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
