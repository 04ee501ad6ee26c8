"""Parses and validates addresses: local folders, S3 buckets and Hugging Face Hub repositories.

Model and tokenizer addresses are hf://owner/name[@revision]. Dataset addresses are
hf://owner/name[@revision][/config][:split], hf://name[...] without an owner, or
hf:///local/folder[:split].

huggingface_hub caches downloads in HF_HOME (~/.cache/huggingface), and falls back to the cache if
the Hub does not respond or HF_HUB_OFFLINE=1. Only configs, tokenizers and safetensors are
downloaded, so a download never contains code or pickles.
"""

from __future__ import annotations

import functools
import glob
import os
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ..trust.errors import InputError
from .host_list import parse_host
from .types import Config, Refusals

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
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "README.md",
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
SECONDS = 5  # timeout per Hub request, before falling back to the cache


def folder_of(address: str, weights: bool = False) -> Path:
    """Returns the local folder for an address, and downloads Hub models to the cache.

    Downloads the weights only if `weights` is set.

    Raises:
        InputError: the address is neither a path nor a Hub model, or the model is not cached and
            can't be downloaded.
    """
    if not address.startswith(HUB):
        if (elsewhere := _ADDRESS.match(address)) or meant(address):
            what = f"models can't be read from {elsewhere[0]}" if elsewhere else "no such folder"
            raise InputError(
                f"{what}; set a path or hf://owner/name{meant(address)}", where=address
            )
        return Path(address)
    if fault := fault_of(address):
        raise InputError(fault, where=address)
    return _fetched(address, weights)


def pinned(address: str) -> str:
    """Pins a Hub address to the cached revision. Returns other addresses unchanged.

    Raises:
        InputError: the Hub address is invalid, or the model is not cached and can't be downloaded.
    """
    if not address.startswith(HUB) or "@" in address:
        return address
    revision = folder_of(address).name
    return f"{address}@{revision}" if re.fullmatch("[0-9a-f]{40}", revision) else address


def meant(address: str) -> str:
    """Returns "; did you mean hf://owner/name?" if an invalid address looks like a Hub model, or
    "".
    """
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
    """Returns why a Hub model address is invalid, or ""."""
    named = MODEL.fullmatch(address.removeprefix(HUB))
    return (
        ""
        if named
        else f"{address!r} is not a model address; set hf://owner/name or hf://owner/name@revision"
    )


@dataclass(frozen=True)
class HubDataset:
    """Dataset on the Hub or in a local folder.

    Without `config`, the dataset must have a single configuration. `revision` defaults to the
    latest one.
    """

    name: str
    config: str | None
    split: str
    revision: str | None


def dataset_of(address: str) -> HubDataset:
    """Parses the address of a Hub dataset.

    Raises:
        InputError: the address is not a dataset, or selects part of a split. Only whole splits
            can be streamed.
    """
    path, colon, split = address.removeprefix(HUB).replace("?split=", ":").partition(":")
    if "[" in split:
        whole = address.partition("[")[0]
        what = f"selects a part of a split, but datasets are streamed as whole splits; use {whole}"
        raise InputError(what, where=address)
    split = split if colon else "train"
    if path.startswith(("/", "./", "../")) and path.strip("/") and SPLIT.fullmatch(split):
        return HubDataset(path, None, split, None)
    found = DATASET.fullmatch(path)
    if not found or not SPLIT.fullmatch(split):
        raise InputError(f"is not a dataset address; set {DATASET_FORMS}", where=address)
    return HubDataset(found["name"], found["config"], split, found["revision"])


@functools.cache
def _fetched(address: str, weights: bool) -> Path:
    name, _, revision = address.removeprefix(HUB).partition("@")
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(SECONDS))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # progress bars clutter logs
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
    ) as error:  # network, Hub, cache and disk errors, for which the library raises a dozen types
        why = " ".join(str(error).split())[:300] or type(error).__name__
        then = (
            f"run hf download {name} on a machine with Internet access (gated models need "
            "HF_TOKEN), or set a local folder"
        )
        raise InputError(
            "can't be downloaded from the Hub and is not in the cache",
            where=address,
            why=why,
            next=then,
        ) from error


S3 = "s3://"
# docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"(?!xn--|sthree-)(?![0-9.]+\Z)[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,2}")
# system folders that are too large to search
NO_TEXT = re.compile(r"/(dev)?|/(proc|sys)(/.*)?", re.DOTALL)


def check(config: Config) -> Refusals:
    """Yields (key, message) for each invalid address in the config."""
    yield from _sources(config)
    for key, address in (
        ("data.tokenized_path", config.data.tokenized_path),
        ("checkpoint.path", config.checkpoint.path),
    ):
        if address and (fault := _fault(address, (S3,))):
            yield key, fault
    source = config.train.init_from
    if source and (
        fault := fault_of(source) if source.startswith(HUB) else _fault(source, (S3,), up=True)
    ):
        yield "train.init_from", fault
    if config.fleet.ssh.jump:
        try:
            parse_host(config.fleet.ssh.jump)
        except ValueError as error:
            yield "fleet.ssh.jump", str(error)


def _sources(config: Config) -> Refusals:
    for index, source in enumerate(config.data.mixture):
        if fault := _fault(source.path, (S3, HUB), up=True) or _too_wide(source.path):
            yield f"data.sources[{index}]", fault
    if any(source.weight for source in config.data.mixture) and config.data.weights is None:
        yield (
            "data.sources",
            "only some sources have a weight; set weight for all sources or for none",
        )


def _fault(address: str, schemes: tuple[str, ...], up: bool = False) -> str | None:
    """Returns why an address is invalid, or None. `up` allows `..` in paths."""
    scheme = _SCHEME.match(address)
    if scheme and scheme[0] not in schemes:
        return f"{address!r} begins with {scheme[0]}; supported: paths, {', '.join(schemes)}"
    if address.startswith(HUB):
        return _no_dataset(address)
    if address.startswith(S3):
        bucket, _, prefix = address.removeprefix(S3).partition("/")
        if not _BUCKET.fullmatch(bucket):
            return f"{bucket!r} is not a bucket name; use 3 to 63 of a-z, 0-9, '-' and '.'"
        return (
            f"{address!r} has an empty path segment"
            if "//" in prefix or prefix.startswith("/")
            else None
        )
    return (
        f"{address!r} contains '..'; write the path without it"
        if not up and ".." in Path(address).parts
        else None
    )


def _no_dataset(address: str) -> str | None:
    """Returns why a Hub address is not a dataset, or None."""
    try:
        dataset_of(address)
    except InputError as error:
        return f"{address!r} {error.what}"
    return None


def _too_wide(source: str) -> str | None:
    """Returns why a source, such as a system folder, is too broad to search for text, or None."""
    fixed = list(takewhile(lambda part: not glob.has_magic(part), Path(source).parts))
    if _SCHEME.match(source) or not fixed:
        return None
    top = f"/{os.path.abspath(Path(*fixed)).lstrip('/')}"  # noqa: PTH100  resolves `..` without disk access
    return (
        f"{source!r} covers all of {top}; set the folder that has the text"
        if NO_TEXT.fullmatch(top)
        else None
    )


def absent(config: Config) -> Refusals:
    """Yields (key, message) for each user module or callback that is missing on this machine.

    Applies only if this machine simulates all nodes.
    """
    for key, file in (
        ("model.module", config.model.module),
        ("train.callback", config.train.callback),
    ):
        if file and not Path(file).is_file():
            yield key, f"{file!r} does not exist in the folder where make runs"


def check_shared_folder(config: Config) -> Refusals:
    """Rejects a shared folder outside the FSx file system, and FSx settings that lack the DNS or
    mount name.
    """
    fleet, fsx = config.fleet, config.fleet.fsx
    if (fsx.dns_name is None) != (fsx.mount_name is None):
        yield "fleet.fsx", "set both dns_name and mount_name, or neither"
    if (
        fsx.dns_name
        and fleet.shared_folder
        and not f"{fleet.shared_folder}/".startswith(f"{fsx.mount_point.rstrip('/')}/")
    ):
        yield (
            "fleet.shared_folder",
            f"{fleet.shared_folder} is outside fleet.fsx.mount_point {fsx.mount_point}; set a "
            "folder inside it",
        )


def check_destination(config: Config) -> Refusals:
    """Rejects a checkpoint path that needs shell expansion."""
    path = config.checkpoint.path or ""
    if path.startswith(("~", "$")):
        yield (
            "checkpoint.path",
            f"{path}: only a shell expands {path[0]}; write the full path",
        )
