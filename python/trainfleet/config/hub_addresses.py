"""Addresses on the Hugging Face Hub: of a model or tokenizer, where a folder goes, and of a
dataset, as a source.

A model:    hf://owner/name[@revision]
A dataset:  hf://owner/name[@revision][/config][:split], hf://name[...] where it has no owner, or
            hf:///local/folder[:split]

huggingface_hub keeps what it fetches below HF_HOME (~/.cache/huggingface) and takes it from there
when the Hub does not answer or with HF_HUB_OFFLINE=1. Only shapes, tokenizers and safetensors are
fetched: nothing that could be code or a pickle.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..trust.errors import InputError

HUB = "hf://"
MODEL = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w.-]{1,200})?", re.ASCII)
_NAME = r"[A-Za-z0-9_][\w.-]{0,95}"
DATASET = re.compile(
    rf"(?P<name>{_NAME}(?:/{_NAME})?)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]{1,100}|[\w.%-]{1,200}))?(?:/(?P<config>\w[\w.+-]{0,199}))?",
    re.ASCII,
)
SPLIT = re.compile(r"\w[\w.-]*(\+\w[\w.-]*)*", re.ASCII)
DATASET_FORMS = f"{HUB}owner/name[@revision][/config][:split] or {HUB}/folder[:split]"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", re.ASCII)
SMALL = (
    "config.json",
    "adapter_config.json",
    "model_index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "README.md",
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
SECONDS = 5  # that the Hub gets to answer before the cache is asked


def folder_of(address: str, weights: bool = False) -> Path:
    """The folder of this machine that an address means; `weights`: with those of a model from the
    Hub.

    Raises:
        InputError: it names no model of the Hub, or that can neither be fetched nor is in the
            cache.
    """
    if not address.startswith(HUB):
        if (elsewhere := _ADDRESS.match(address)) or meant(address):
            what = (
                f"{elsewhere[0]} is nothing that models are read from"
                if elsewhere
                else "there is no such folder"
            )
            raise InputError(
                f"{what}: a path and hf://owner/name are read{meant(address)}", where=address
            )
        return Path(address)
    if fault := fault_of(address):
        raise InputError(fault, where=address)
    return _fetched(address, weights)


def pinned(address: str) -> str:
    """An address of the Hub with the revision that this machine has of it; any other address as it
    is.

    Raises:
        InputError: as `folder_of`.
    """
    if not address.startswith(HUB) or "@" in address:
        return address
    revision = folder_of(address).name
    return f"{address}@{revision}" if re.fullmatch("[0-9a-f]{40}", revision) else address


def meant(address: str) -> str:
    """Returns a question that names the Hub's model that a wrong address seems to mean, or ""."""
    page = _PAGE.match(address)
    path = Path(address)
    is_model = (
        MODEL.fullmatch(address)
        and not path.parent.exists()
        and path.suffix not in (".json", ".model", ".txt")
    )
    named = page[1] if page else address if is_model else ""
    return f"; did you mean hf://{named}?" if named else ""


def fault_of(address: str) -> str:
    """Returns why an address of the Hub is wrong, or ""."""
    named = MODEL.fullmatch(address.removeprefix(HUB))
    return (
        ""
        if named
        else f"{address!r} names no model; hf://owner/name and hf://owner/name@revision do"
    )


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hub, or one of its folders; `None`: the only configuration, the newest
    revision.
    """

    name: str
    config: str | None
    split: str
    revision: str | None


def dataset_of(address: str) -> HubDataset:
    """Parses a source on the Hub.

    Raises:
        InputError: nothing, or a part of a split, which can't be streamed.
    """
    path, colon, split = address.removeprefix(HUB).replace("?split=", ":").partition(":")
    if "[" in split:
        whole = address.partition("[")[0]
        what = (
            "asks for a part of a split: datasets are streamed, which takes whole ones; "
            f"{whole} works"
        )
        raise InputError(what, where=address)
    split = split if colon else "train"
    if path.startswith(("/", "./", "../")) and path.strip("/") and SPLIT.fullmatch(split):
        return HubDataset(path, None, split, None)
    found = DATASET.fullmatch(path)
    if not found or not SPLIT.fullmatch(split):
        raise InputError(f"names no dataset; {DATASET_FORMS} does", where=address)
    return HubDataset(found["name"], found["config"], split, found["revision"])


@functools.cache
def _fetched(address: str, weights: bool) -> Path:
    name, _, revision = address.removeprefix(HUB).partition("@")
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(SECONDS))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # in logs they are noise
    from huggingface_hub import snapshot_download

    try:
        patterns = [*SMALL, *(WEIGHTS if weights else ())]
        return Path(
            snapshot_download(
                name, revision=revision or None, allow_patterns=patterns, etag_timeout=SECONDS
            )
        )
    except (
        Exception
    ) as error:  # of the network, the Hub, the cache, the disk: the library has a dozen kinds
        why = " ".join(str(error).split())[:300] or type(error).__name__
        then = (
            f"run hf download {name} on a machine with a network (a model with a licence needs "
            "HF_TOKEN), or name a folder"
        )
        raise InputError(
            "can't be fetched from the Hub, and is not in the cache",
            where=address,
            why=why,
            next=then,
        ) from error
