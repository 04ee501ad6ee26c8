"""Which checkpoints exist: those, and only those, whose folder holds the commit marker that was written last.

    checkpoints/
      .step-00000200/           being written: hidden, and no marker
      step-00000100/            committed
        *.distcp .metadata      the bytes, by torch.distributed.checkpoint
        committed.json          the marker: progress, identity, and the size of every file

Order of a save: bytes, each file synced to disk → marker → rename → older checkpoints, of which the marker goes first. A crash
between any two of these leaves the newest committed checkpoint as it was.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from ...config import Config
from ...config.types import Model
from ...errors import RunError
from ...runs import Run, read_json, sync_folder, unwritable, write_atomic

MARKER = "committed.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})$")


@dataclass(frozen=True)
class Identity:
    """What a run can't change and still be the same run."""

    dataset: str
    model: Model
    seed: int
    global_batch: int
    sequence_length: int


@dataclass(frozen=True)
class Commit:
    """The content of a marker: where training stood, what it trained, and the bytes of every file beside it."""

    step: int
    samples: int
    tokens: int
    seconds_trained: float
    world_size: int
    identity: Identity
    torch: str
    files: dict[str, int]
    format: int = FORMAT


def identity_of(config: Config, dataset: str) -> Identity:
    train = config.train
    return Identity(dataset, config.model, train.seed, train.global_batch, train.sequence_length)


def committed(run: Run) -> list[Path]:
    """The committed checkpoints of a run, oldest first."""
    folders = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    return sorted(folder for folder in folders if _NAME.fullmatch(folder.name) and (folder / MARKER).exists())


def newest(run: Run) -> Path | None:
    """The committed checkpoint of the highest step, if there is any."""
    return next(reversed(committed(run)), None)


def read_commit(folder: Path) -> Commit:
    """A checkpoint's marker. RunError when its files are not all there in full, or another program wrote it."""
    content = read_json(folder / MARKER) or {}
    if content.get("format") != FORMAT:
        raise RunError(
            f"is a checkpoint of format {content.get('format')}, this program reads {FORMAT}",
            where=str(folder),
            next="train under another name: make train SET='name=again'",
        )
    identity = content["identity"]
    model = Model(**identity.pop("model"))
    commit = Commit(**(content | {"identity": Identity(model=model, **identity)}))
    broken = [name for name, size in commit.files.items() if _size(folder / name) != size]
    if broken:
        raise RunError(
            f"{', '.join(broken)} is not as it was committed",
            where=str(folder),
            why="missing or of another size",
            next=f"go on from the checkpoint before it: rm -r {folder}, then make train",
        )
    return commit


def check_same(found: Identity, wanted: Identity, folder: Path) -> None:
    """RunError naming each key, with both values, that keeps a run from going on from a checkpoint."""
    was, now = _keys(found), _keys(wanted)
    changed = [f"{key} was {was[key]}, is {now[key]}" for key in now if was.get(key) != now[key]]
    if changed:
        raise RunError(
            f"can't go on with another {' and another '.join(change.split()[0] for change in changed)}",
            where=str(folder),
            why="; ".join(changed),
            next="put it back in the config, or train under another name: make train SET='name=again'",
        )


def _keys(identity: Identity) -> dict[str, object]:
    """The identity under the config's key names; the preset's own name decides nothing."""
    model = {
        f"model.{key}": value for key, value in asdict(identity.model).items() if key not in ("preset", "max_sequence_length")
    }
    train = {f"train.{key}": getattr(identity, key) for key in ("seed", "global_batch", "sequence_length")}
    return {"data (the dataset's identity)": identity.dataset[:12], **model, **train}


def begin(run: Run, step: int) -> Path:
    """An empty hidden folder to write the checkpoint of a step to."""
    folder = run.checkpoints / f".{run.checkpoint(step).name}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def commit(run: Run, hidden: Path, commit: Commit) -> Path:
    """Makes what was written to `hidden` (its files synced already) the checkpoint of its step, durably."""
    folder = run.checkpoint(commit.step)
    sync_folder(hidden)
    write_atomic(hidden / MARKER, json.dumps(asdict(commit), indent=1) + "\n")
    if folder.exists():
        remove(folder)
    hidden.replace(folder)
    sync_folder(run.checkpoints)
    return folder


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MARKER}


def retain(run: Run, keep: int) -> None:
    """Removes all committed checkpoints but the newest `keep`."""
    for folder in committed(run)[:-keep]:
        remove(folder)


def remove(folder: Path) -> None:
    """Takes a checkpoint away: its marker first, so that what is half removed is not one."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def sweep(run: Run) -> None:
    """Removes what saves that never ended left behind."""
    for folder in run.checkpoints.iterdir() if run.checkpoints.is_dir() else ():
        if folder.name.startswith(".step-") or (_NAME.fullmatch(folder.name) and not (folder / MARKER).exists()):
            shutil.rmtree(folder)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1
