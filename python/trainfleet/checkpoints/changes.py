"""Policy for config changes on resume: each changed key is refused, reported or ignored."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from ..config import Config, flat
from ..config.families import FAMILIES
from ..config.schedule import learning_rate
from ..trust.errors import RunError
from .marker import Commit

DATA = "data (the dataset's tokens)"
# May change if positions are computed, because only learned positions have a row of weights each.
LENGTH = "model.max_position_embeddings"
_ORDER = (
    "step s begins at sample (s - 1) x global batch; another batch size repeats or skips samples"
)
# Key or key prefix → (effect, reason). The first match applies. Unmatched keys are reported.
# docs/how-to/runs.md, "Resume a run", documents this table.
EFFECTS = {
    DATA: (
        "refused",
        "a sample is identified by its position in the tokens, so other tokens change the samples",
    ),
    "model.preset": ("same", "it only sets other keys"),
    "model.": ("refused", "the weights fit only a model of that shape"),
    "train.seed": ("refused", "it decides the order of the samples"),
    "train.global_batch_size": ("refused", _ORDER),
    "train.sequence_length": (
        "refused",
        "it is the length of a sample, so it decides which tokens each sample has",
    ),
    "train.optimizer": ("refused", "the checkpoint has the state of only that optimizer"),
    "train.init_from": ("told", "(used only when a run starts; this run has already started)"),
    **dict.fromkeys(
        ("name", "fleet.", "data.", "budget."), ("same", "it does not affect training")
    ),
}
ANEW = "make train SET='name=again"
SEEN = 0.01  # minimum relative change in the learning rate that counts as a jump


def flatten(config: Config) -> dict[str, Any]:
    """Flattens a config to dotted keys and plain JSON values."""
    return dict(flat(json.loads(json.dumps(asdict(config)))))


def changed(commit: Commit, config: Config, dataset: str) -> dict[str, tuple[Any, Any]]:
    """Returns the changed keys with their values in the checkpoint and in the config.

    Keys that only one of them contains are ignored.
    """
    was = {**commit.config, DATA: commit.dataset[:12]}
    now = {**flatten(config), DATA: dataset[:12]}
    return {key: (was[key], now[key]) for key in now if key in was and was[key] != now[key]}


def check(commit: Commit, config: Config, dataset: str, where: str) -> dict[str, tuple[Any, Any]]:
    """Returns the changes to report, provided that all changes are allowed.

    Raises:
        RunError: some keys may not change; the message lists their values and the reasons.
    """
    differences = changed(commit, config, dataset)
    refused = {key: why for key in differences if (why := reason(key, config))}
    if refused:
        reasons = [
            f"{key} changed from {differences[key][0]} to {differences[key][1]}: {why}"
            for key, why in refused.items()
        ]
        taking = (
            "" if any(key.startswith("model.") for key in refused) else f" train.init_from={where}"
        )
        raise RunError(
            f"can't resume with a different {' and a different '.join(refused)}",
            where=where,
            why="; ".join(reasons),
            next=f"restore the old value in the config, or start a new run: {ANEW}{taking}'",
        )
    return {key: values for key, values in differences.items() if effect(key, config)[0] == "told"}


def effect(key: str, config: Config) -> tuple[str, str]:
    """Returns the effect of changing a key, and the reason."""
    if key == LENGTH and FAMILIES[config.model.family].rotary:
        return "same", "its positions are computed"
    fits = (
        found
        for known, found in EFFECTS.items()
        if key == known or (known.endswith(".") and key.startswith(known))
    )
    return next(fits, ("told", ""))


def reason(key: str, config: Config) -> str:
    """Returns why a key may not change, or "" if it may."""
    kind, why = effect(key, config)
    return why if kind == "refused" else ""


def notes(commit: Commit, config: Config, where: str) -> list[str]:
    """Describes what a resume from this checkpoint changes. Raises RunError as `check` does."""
    differences = check(commit, config, commit.dataset, where)
    told = [
        f"{key} changed from {was} to {now} {effect(key, config)[1]}".rstrip()
        for key, (was, now) in differences.items()
    ]
    return [
        *filter(
            None,
            (f"resumes from {where}; {'; '.join(told)}" * bool(told), jump(commit, config, where)),
        )
    ]


def jump(commit: Commit, config: Config, where: str) -> str:
    """Returns a warning with a remedy if the learning rate jumps at the checkpoint's step,
    or "".
    """
    given, new, step = commit.config, config.train, commit.step
    old = replace(
        new, **{name: given[f"train.{name}"] for name in vars(new) if f"train.{name}" in given}
    )
    try:
        was, due, now = (
            learning_rate(old, step),
            learning_rate(old, step + 1),
            learning_rate(new, step + 1),
        )
    except (
        TypeError,
        LookupError,
        ArithmeticError,
    ):  # A marker from elsewhere may not contain a valid schedule.
        return ""
    if step >= new.steps or min(was, due) * (1 - SEEN) <= now <= max(was, due) * (1 + SEEN):
        return ""
    warm = " train.warmup_steps=0" * (new.warmup_steps > step)
    holds = (
        f"use SET='train.learning_rate={was:.4g} train.min_lr_ratio=1{warm}' to keep it constant"
    )
    way = holds if was else f"start a new run to warm up: {ANEW} train.init_from={where}'"
    return (
        f"warning: the learning rate jumps from {was:.4g} at step {step:,} to {now:.4g} at "
        f"step {step + 1:,}; {way}"
    )
