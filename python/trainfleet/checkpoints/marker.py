"""Checkpoint marker: the last file of a save, which makes the files next to it a checkpoint.

The marker records the training progress, the versions, the config, and the size and checksum of
every other file. Its first line is the checksum of the rest, so any change to a checkpoint is
detected, including one to the marker.

On resume, each key that differs from the marker's config is refused, reported or ignored.
"""

from __future__ import annotations

import json
import platform
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from .. import __version__
from ..config import Config, flat
from ..config.families import FAMILIES
from ..config.schedule import learning_rate
from ..trust import untrusted_input
from ..trust.errors import InputError, RunError
from ..trust.validation import Count, Moment, Name, Pattern, Range, fit

MARKER = "committed.json"
# matches exactly the names that step_name returns
NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,14})")
BROKEN = re.compile(rf"{NAME.pattern}\.broken")
MARKER_BYTES = 2**25  # maximum marker size in bytes; ten thousand ranks need about 1 MB
FORMAT = 5
FileName = Annotated[str, Pattern(rf"(?!({re.escape(MARKER)}|\.\.?)$)[A-Za-z0-9._-]{{1,200}}")]
Number = Annotated[float, Range(-(10**39), 10**39)]
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TEXT = re.compile(r'\{"crc32": "([0-9a-f]{8})",\n"commit": (\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True)
class FileSum:
    """Size and CRC-32 of a file, computed in memory by its writer."""

    size: Count
    crc32: Count


@dataclass(frozen=True)
class Commit:
    """Marker content. `config` is the resolved config with dotted keys, such as `train.steps` →
    500.
    """

    step: Count
    samples: Count
    tokens: Count
    seconds_trained: Number
    loss: Number | None
    time: Moment
    world_size: Count
    layout: Mapping[Name, Count]
    dataset: Name
    config: Mapping[Name, Any]
    versions: Mapping[Name, Name]
    files: Mapping[FileName, FileSum]
    format: int = FORMAT
    guard: tuple[Number, ...] = ()  # statistics of recent steps (engine.step_guard)
    scale: tuple[Number, ...] = ()  # fp16 loss scale (engine.step_guard)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Broken(RunError):
    """Error for an incomplete or damaged checkpoint."""

    def __init__(
        self,
        what: str,
        *,
        where: str,
        why: str = "",
        then: str = "run make checkpoints to list the valid ones",
    ) -> None:
        super().__init__(what, where=where, why=why, next=then)


def render(commit: Commit) -> str:
    """Serializes a marker as text for `parse`."""
    body = json.dumps(asdict(commit), indent=1)
    return f'{{"crc32": "{_checksum(body)}",\n"commit": {body}}}\n'


def parse(text: str, where: str) -> Commit:
    """Parses a marker.

    Raises:
        Broken: the text was modified, or its content is invalid.
        RunError: it was written by a trainfleet version with a different format.
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[1] != _checksum(match[2]):
        raise Broken(
            f"{MARKER} is damaged", where=where, why="its text does not match its checksum"
        )
    try:
        content = untrusted_input.parse_json(match[2], MARKER)
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise _of_another_format(content.get("format"), where)
        commit = fit(Commit, content)
    except InputError as error:
        raise Broken(
            f"{MARKER} can't be trusted", where=where, why=f"{error.key[:80]} {error.what}".strip()
        ) from error
    wrong = [key for key, value in commit.config.items() if not _plain(value)]
    wrong += [
        key for key, moments in STATES.items() if not _is_state(getattr(commit, key), moments)
    ]
    if wrong:
        raise Broken(
            f"{MARKER} can't be trusted",
            where=where,
            why=f"its {wrong[0][:80]} has an invalid value",
        )
    return commit


def _of_another_format(found: Any, where: str) -> RunError:
    return RunError(
        f"has checkpoint format {json.dumps(found)[:20]}, but this program reads format {FORMAT}",
        where=where,
        why="another version of trainfleet wrote it",
        next="run make export with that version, then make train SET='name=again "
        "train.init_from=FOLDER'",
    )


def _plain(value: Any, depth: int = 4) -> bool:
    """Returns whether a value may occur in a config."""
    if isinstance(value, list | dict):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and all(_plain(item, depth - 1) for item in inside)
    if isinstance(value, str):
        return len(value) <= 10_000 and not _CONTROL.search(value)
    return value is None or abs(value) < 10**30


def _is_state(state: tuple[float, ...], moments: int) -> bool:
    """Returns whether a saved state is empty, or has `moments` numbers and three counters."""
    return not state or (
        len(state) == moments + 3 and all(0 <= count < 10**15 for count in state[moments:])
    )


# saved state → number of values before its three counters
STATES = {"guard": 5, "scale": 1}


def versions(**others: str) -> dict[str, str]:
    """Returns the versions of trainfleet, Python and these packages."""
    return {"trainfleet": __version__, "python": platform.python_version(), **others}


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


DATA = "data (the dataset's tokens)"
# May change if positions are computed, because only learned positions have one weight row each.
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
    """Describes the config changes that a resume from this checkpoint applies.

    Raises RunError as `check` does.
    """
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
        was = learning_rate(old, step)
        due = learning_rate(old, step + 1)
        now = learning_rate(new, step + 1)
    except (
        TypeError,
        LookupError,
        ArithmeticError,
    ):  # A marker from another source may not contain a valid schedule.
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
