"""Finds the files in runs/ and data/ that this program made and may remove: as run/contents.py
declares them, and never through a link.

A run's folder has a config.yaml with the folder's name, beside what a run leaves. Of a dataset's
folder only the files that tokenizing makes are ours, by name: your own text may lie in the same
folder, and stays.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..run import contents
from ..run.run_folder import DATA, RUNS
from ..trust import untrusted_input
from ..trust.errors import TrainfleetError


def is_inside(path: Path, root: Path) -> bool:
    """Tells whether a path lies where it says, under `root`: neither it nor a folder on the way to
    it is a link.
    """
    if path.is_symlink() or ".." in path.parts or not path.is_relative_to(root):
        return False
    return path.resolve() == root.resolve() / path.relative_to(root)


def folders(root: Path) -> list[Path]:
    """Returns the folders in runs/ or data/, without links."""
    return sorted(path for path in root.glob("*") if path.is_dir() and is_inside(path, root))


def is_run(folder: Path) -> bool:
    """Tells whether a folder in runs/ is a run's."""
    config = folder / "config.yaml"
    if not (folder.is_dir() and is_inside(config, RUNS) and config.is_file()):
        return False
    with (
        suppress(OSError),
        open(config, encoding="utf-8", errors="replace", opener=untrusted_input.opener) as file,
    ):
        named = re.search(
            rf"^name: (['\"]?){re.escape(folder.name)}\1$", file.read(1 << 20), flags=re.MULTILINE
        )
        return named is not None and any(
            True for kind in _signs(contents.RUN) for _ in folder.glob(kind.glob)
        )
    return False


def is_dataset(folder: Path) -> bool:
    """Tells whether tokenizing has made something in a folder of data/."""
    signs = [folder / kind.name for kind in _signs(contents.DATASET)]
    return folder.is_dir() and is_inside(folder, DATA) and any(sign.is_file() for sign in signs)


def _signs(folder: str) -> Iterator[contents.FileKind]:
    yield from (kind for kind in contents.kinds(folder) if kind.signs)


def remakeable(run: Path) -> Iterator[Path]:
    """Returns the files of a run that can be made again: report, plots, and half-made files."""
    patterns = dict.fromkeys(kind.glob for kind in contents.kinds(contents.RUN) if kind.again)
    yield from (
        path for pattern in patterns for path in sorted(run.glob(pattern)) if is_inside(path, RUNS)
    )


def remove_dataset(folder: Path) -> list[Path]:
    """Removes what tokenizing has made in a folder, and the folder itself if nothing else is in it;
    what is left.
    """
    left, ours, links = (
        [],
        re.compile(contents.pattern_of(contents.DATASET)),
        re.compile(contents.RANK_LOGS_LINK.pattern),
    )
    for path in sorted(_walk(folder), reverse=True):
        name = str(path.relative_to(folder))
        if path.is_symlink() and links.fullmatch(name):
            path.unlink()
        elif path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty: then what is in it is named
                path.rmdir()
        elif not path.is_symlink() and ours.fullmatch(name):
            remove(path)
        else:
            left.append(path)
    with suppress(OSError):
        folder.rmdir()
    return left[::-1]


def remove(path: Path) -> int:
    """Removes a file, or a folder with all that is in it; no link is followed. Bytes that were
    freed.

    Raises:
        TrainfleetError: it can't be removed.
    """
    if path.is_symlink() or not path.exists():
        return 0
    freed = measure(path)
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise TrainfleetError(
            f"can't remove {path}", why=str(error), next=f"ls -ld {path}"
        ) from error
    return freed


def measure(path: Path) -> int:
    """Bytes in a file, or in all files of a folder; what a link leads to does not count."""
    total = 0
    for part in _walk(path) if path.is_dir() and not path.is_symlink() else [path]:
        with suppress(FileNotFoundError):  # gone meanwhile
            total += part.lstat().st_size if not part.is_dir() or part.is_symlink() else 0
    return total


def _walk(folder: Path) -> Iterator[Path]:
    """All that is in a folder, at any depth; links as such."""
    for parent, names, files in os.walk(folder):
        yield from (Path(parent) / name for name in (*names, *files))
