"""Rules for the keys that say where something is: buckets that can exist, folders that lead nowhere
else, hosts to go through.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from ..trust.errors import InputError
from .host_list import parse_host
from .hub_addresses import HUB, dataset_of, fault_of
from .types import Config

S3 = "s3://"
# docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"(?!xn--|sthree-)(?![0-9.]+\Z)[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
NO_TEXT = re.compile(r"/(dev)?|/(proc|sys)(/.*)?", re.DOTALL)  # a walk from here ends nowhere


def check(config: Config) -> Iterator[tuple[str, str]]:
    """Each key whose address can't be meant."""
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


def _sources(config: Config) -> Iterator[tuple[str, str]]:
    for index, source in enumerate(config.data.mixture):
        if fault := _fault(source.path, (S3, HUB), up=True) or _too_wide(source.path):
            yield f"data.sources[{index}]", fault
    if any(source.weight for source in config.data.mixture) and config.data.weights is None:
        yield (
            "data.sources",
            "some sources have a weight and some have none: give all a weight, or none",
        )


def _fault(address: str, schemes: tuple[str, ...], up: bool = False) -> str | None:
    """Returns why this is not a valid address; `up`: whether a path may climb by `..`."""
    scheme = _SCHEME.match(address)
    if scheme and scheme[0] not in schemes:
        return f"{address!r} begins with {scheme[0]}; what is read: paths, {', '.join(schemes)}"
    if address.startswith(HUB):
        return _no_dataset(address)
    if address.startswith(S3):
        bucket, _, prefix = address.removeprefix(S3).partition("/")
        if not _BUCKET.fullmatch(bucket):
            return f"{bucket!r} is not a bucket name: 3 to 63 of a-z, 0-9, '-' and '.'"
        return (
            f"{address!r} has an empty part" if "//" in prefix or prefix.startswith("/") else None
        )
    return (
        f"{address!r} climbs out by '..': write the folder itself"
        if not up and ".." in Path(address).parts
        else None
    )


def _no_dataset(address: str) -> str | None:
    """Returns why an address of the Hub names no dataset."""
    try:
        dataset_of(address)
    except InputError as error:
        return f"{address!r} {error.what}"
    return None


def _too_wide(source: str) -> str | None:
    """Returns why this source holds far more than a dataset: a walk through it would not end."""
    fixed = list(takewhile(lambda part: not glob.has_magic(part), Path(source).parts))
    if _SCHEME.match(source) or not fixed:
        return None
    top = f"/{os.path.abspath(Path(*fixed)).lstrip('/')}"  # noqa: PTH100  resolves `..` without asking the disk
    return (
        f"{source!r} means all of {top}: name the folder that has the text"
        if NO_TEXT.fullmatch(top)
        else None
    )


def absent(config: Config) -> Iterator[tuple[str, str]]:
    """Yields each named file that is missing, if the nodes are this machine, which can tell."""
    for key, file in (
        ("model.module", config.model.module),
        ("train.callback", config.train.callback),
    ):
        if file and not Path(file).is_file():
            yield key, f"{file!r} is not there; it is looked for in the folder where make runs"
