"""Which keys of the config may change when a run resumes: all but those that would make it another run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ..config import Config, flat
from ..config.families import FAMILIES
from ..trust.errors import RunError
from .marker import Commit

DATA = "data (the dataset's tokens)"
_ORDER = "step s trains on samples (s - 1) x global batch onwards: others would come twice or never"
# key, or the beginning of one → why it stays. docs/how-to/runs.md, "Going on with a run", is this table.
FIXED = {
    DATA: "a sample is known by its place among the tokens: in others it is another sample",
    "model.": "the weights are of that shape, and mean something in that model only",
    "train.seed": "the order of the samples is drawn from it",
    "train.global_batch": _ORDER,
    "train.sequence_length": "samples are cut to it, so that it decides which are which",
}
LENGTH = "model.max_sequence_length"  # free where positions are computed; where they are learnt, each has a row
FREE = ("model.preset", LENGTH)  # a preset is a name for the other keys
SILENT = ("name", "fleet.", "data.", "budget.")  # what changes here changes nothing that is trained


def flatten(config: Config) -> dict[str, Any]:
    """The config as dotted keys and plain JSON values."""
    return dict(flat(json.loads(json.dumps(asdict(config)))))


def changed(commit: Commit, config: Config, dataset: str) -> dict[str, tuple[Any, Any]]:
    """Key → the checkpoint's value and the config's, where they differ. A key that one of them does not know counts as equal."""
    was = {**commit.config, DATA: commit.dataset[:12]}
    now = {**flatten(config), DATA: dataset[:12]}
    return {key: (was[key], now[key]) for key in now if key in was and was[key] != now[key]}


def check(commit: Commit, config: Config, dataset: str, where: str) -> dict[str, tuple[Any, Any]]:
    """What changed and is worth a word, when all of it may.

    Raises:
        RunError: naming each key that may not, with both values and the reason.
    """
    differences = changed(commit, config, dataset)
    refused = {key: why for key in differences if (why := reason(key, config))}
    if refused:
        reasons = [f"{key} was {differences[key][0]}, is {differences[key][1]}: {why}" for key, why in refused.items()]
        raise RunError(
            f"can't go on with another {' and another '.join(refused)}",
            where=where,
            why="; ".join(reasons),
            next="put it back in the config, or train under another name, and train.init_from takes the weights along",
        )
    return {key: values for key, values in differences.items() if not key.startswith(SILENT)}


def reason(key: str, config: Config) -> str:
    """Why a run can't go on with another value of a key; empty when it can."""
    if key in FREE and (key != LENGTH or FAMILIES[config.model.family].rotary):
        return ""
    return next((why for fixed, why in FIXED.items() if key == fixed or (fixed.endswith(".") and key.startswith(fixed))), "")
