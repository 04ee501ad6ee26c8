"""make clean: removes files that can be regenerated. With PURGE, also removes the config's run and
dataset.

In runs/ and data/, removes only files that trainfleet wrote (run/contents.py), and never follows
links. A folder counts as a run if its config.yaml has the folder's name and the folder contains run
files. In a dataset's folder, files are recognized by name, because the user may keep text files
next to them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..backends import backend_of, is_guest
from ..backends.base import Can, Machines
from ..backends.run_storage import Here, Place
from ..config import Config
from ..report.history import size
from ..run import contents
from ..run.run_folder import COMPILED, DATA, RUNS, Run, is_locked
from ..trust import untrusted_input
from ..trust.errors import BackendError, TrainfleetError
from ..trust.safe_output import is_agreed
from ..trust.untrusted_input import printable, shortened


def is_inside(path: Path, root: Path) -> bool:
    """Returns whether `path` is inside `root` without passing through a symbolic link."""
    if path.is_symlink() or ".." in path.parts or not path.is_relative_to(root):
        return False
    return path.resolve() == root.resolve() / path.relative_to(root)


def folders(root: Path) -> list[Path]:
    """Returns the subfolders of runs/ or data/, excluding symbolic links."""
    return sorted(path for path in root.glob("*") if path.is_dir() and is_inside(path, root))


def is_run(folder: Path) -> bool:
    """Returns whether a folder in runs/ contains a run."""
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
    """Returns whether a folder in data/ contains a tokenized dataset."""
    signs = [folder / kind.name for kind in _signs(contents.DATASET)]
    return folder.is_dir() and is_inside(folder, DATA) and any(sign.is_file() for sign in signs)


def _signs(folder: str) -> Iterator[contents.FileKind]:
    yield from (kind for kind in contents.kinds(folder) if kind.signs)


def remakeable(run: Path) -> Iterator[Path]:
    """Yields the run's files that can be regenerated: reports, plots and incomplete files."""
    patterns = dict.fromkeys(kind.glob for kind in contents.kinds(contents.RUN) if kind.again)
    yield from (
        path for pattern in patterns for path in sorted(run.glob(pattern)) if is_inside(path, RUNS)
    )


def remove_dataset(folder: Path) -> list[Path]:
    """Removes the files that tokenization wrote to a folder, and the folder if that leaves it
    empty. Returns the remaining files.
    """
    left = []
    ours = re.compile(contents.pattern_of(contents.DATASET))
    links = re.compile(contents.RANK_LOGS_LINK.pattern)
    for path in sorted(_walk(folder), reverse=True):
        name = str(path.relative_to(folder))
        if path.is_symlink() and links.fullmatch(name):
            path.unlink()
        elif path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # keeps non-empty folders
                path.rmdir()
        elif not path.is_symlink() and ours.fullmatch(name):
            remove(path)
        else:
            left.append(path)
    with suppress(OSError):
        folder.rmdir()
    return left[::-1]


def remove(path: Path) -> int:
    """Removes a file, or a folder and its contents, without following links. Returns the number of
    bytes freed.

    Raises:
        TrainfleetError: the file or folder can't be removed.
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
    """Returns the size in bytes of a file, or of all files in a folder, without following links."""
    total = 0
    for part in _walk(path) if path.is_dir() and not path.is_symlink() else [path]:
        with suppress(FileNotFoundError):  # The file was removed in the meantime.
            total += part.lstat().st_size if not part.is_dir() or part.is_symlink() else 0
    return total


def _walk(folder: Path) -> Iterator[Path]:
    """Yields a folder's contents recursively, without following links."""
    for parent, names, files in os.walk(folder):
        yield from (Path(parent) / name for name in (*names, *files))


CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache", str(COMPILED))
# Matches the suffix that `make profile`, `make scaling` and `make sweep` append to a run's name.
MEASURING = r"-(?:(?:profile|scaling)-\d{4}-\d{6}[a-z0-9-]*|sweep-[0-9a-f]{8})"


def made_by(run: Run, config: Config | None) -> list[Path]:
    """Returns the folders of a run, its dataset, and its profile, scaling and sweep runs."""
    measuring = [
        folder for folder in _runs() if re.fullmatch(re.escape(run.name) + MEASURING, folder.name)
    ]
    return [run.folder, *measuring, *([DATA / config.data.name] if config else [])]


def _runs() -> list[Path]:
    return [folder for folder in folders(RUNS) if is_run(folder)]


def _datasets() -> list[Path]:
    return [folder for folder in folders(DATA) if is_dataset(folder)]


def remove_remakeable() -> None:
    """Removes all files that can be regenerated. Raises BackendError if a run or dataset is in
    use.
    """
    busy = [folder for folder in (*_runs(), *_datasets()) if is_locked(folder)]
    if busy:
        raise BackendError(
            f"still running: {', '.join(map(str, busy))}",
            next=f"run make stop CONFIG={busy[0]}/config.yaml, or wait until it ends",
        )
    removed = sum(remove(path) for path in _remakeable())
    print(
        f"removed {size(removed)} of files that can be regenerated (reports, plots, caches, "
        "incomplete files)"
    )


def _remakeable() -> Iterator[Path]:
    for run in _runs():
        yield from remakeable(run)
    yield from (Path(name) for name in CACHES)
    for root in ("python", "tests"):
        yield from (path for path in Path(root).rglob("__pycache__") if is_inside(path, Path()))


def machines_of(config: Config | None) -> Machines | None:
    """Returns the machines that the backend creates for this config, or None if it doesn't create
    machines.
    """
    backend = backend_of(config) if config and not is_guest(config) else None
    return backend.machines() if backend and Can.MACHINES in backend.can else None


def end_of_hosts(config: Config | None, everything: bool, sure: bool) -> int:
    """Prints the files left on permanent hosts, and removes them if `everything` is set
    (PURGE=all). Returns the exit code.

    Raises:
        BackendError: some of the files can't be removed.
    """
    if config is None or is_guest(config):
        return 0
    machines = backend_of(config).machines()
    left = machines.left()
    for what in left:
        print(f"left {what}")
    if not left:
        return 0
    if not everything:
        print(
            "next: make clean PURGE=all removes these too; other runs on these hosts may need them"
        )
        return 0
    if not sure and not _confirmed(f"these {len(left)} items on hosts (other runs may need them)"):
        return 1
    machines.remove(purge=True)
    still = machines.left()
    for what in still or ():
        print(f"still there: {what}")
    if not still:
        print("only drivers and packages are left on the hosts")
    return 1 if still else 0


def folders_of(config: Config | None, run: Run) -> Place:
    """Returns where the run's folders remain once its machines are gone: on this machine, or in S3
    if the nodes have no shared disk.
    """
    backend = backend_of(config) if config else None
    return Here(run) if backend is None or Can.SHARED in backend.can else backend.place(run)


def take_down(
    machines: Machines, place: Place, made: Sequence[Path], purge_too: bool, sure: bool
) -> int:
    """Removes the machines first because they cost money, verifies that they are gone, then cleans
    up local files. Removes data only with PURGE. Returns the exit code.

    Raises:
        BackendError: a billable resource remains.
    """
    if purge_too and not sure:
        held = machines.left()
        print("\n".join(held))
        if not _confirmed(f"these {len(held)} cloud resources"):
            print("nothing was removed")
            return 1
    machines.remove(purge_too)
    remove_remakeable()
    return purge(place, made, True) if purge_too else keep(place, made)


def keep(place: Place, made: Sequence[Path]) -> int:
    """Prints the runs and datasets that are kept. Returns the exit code."""
    here = {folder: measure(folder) for folder in (*_runs(), *_datasets())}
    kept = {str(folder): count for folder, count in here.items()} | place.folders()
    for name, count in kept.items():
        print(f"kept {name}: {size(count)}")
    others = (
        "; CONFIG=runs/<name>/given.yaml selects another run"
        if any(f not in made for f in here)
        else ""
    )
    own = f"next: make clean PURGE=1 removes this config's run and dataset too{others}"
    print(own if kept else "no runs or datasets are left")
    return 0


def purge(place: Place, made: Sequence[Path], sure: bool) -> int:
    """Removes the folders that this config created, on this machine and on its fleet. Returns 1 if
    the user declines, or if one of the folders was not created by this config.
    """
    here = {folder: measure(folder) for folder in made if is_run(folder) or is_dataset(folder)}
    far = place.folders()
    stays = _left_alone(folder for folder in made if folder not in here)
    sizes = {str(folder): count for folder, count in here.items()} | far
    if not sizes:
        print("this config has no run or dataset left")
        return stays
    for name, count in sizes.items():
        print(f"{name}: {size(count)}")
    if not sure and not _confirmed(f"these {len(sizes)} folders"):
        print("nothing else was removed")
        return 1
    far_left = place.remove(far)
    left = [path for folder in here for path in _remove(folder)]
    for name in (*far_left, *map(str, left)):
        print(f"left {shortened(printable(name), 255)}: trainfleet did not write it")
    gone = size(sum(sizes.values()) - sum(map(measure, left)))
    print(f"removed {gone}: this config's run and dataset")
    return stays


def _left_alone(folders: Iterable[Path]) -> int:
    """Removes empty folders, and prints those that this config did not create. Returns 1 if it
    found any, otherwise 0.
    """
    strange = []
    for folder in folders:
        with suppress(OSError):  # fails unless the folder is empty
            folder.rmdir()
        if folder.exists() or folder.is_symlink():
            strange.append(folder)
    for folder in strange:
        what = "it is a link" if folder.is_symlink() else "this config did not create it"
        print(f"left {folder}: {what}")
    return 1 if strange else 0


def _remove(folder: Path) -> list[Path]:
    """Removes trainfleet's files from a folder. Returns the remaining files."""
    if folder.parent == DATA:
        return remove_dataset(folder)
    remove(folder)
    return []


def _confirmed(what: str) -> bool:
    if not sys.stdin.isatty():
        what = "PURGE=1 needs your confirmation to remove data, but there is no terminal"
        raise TrainfleetError(what, next="make clean PURGE=1 YES=1")
    return is_agreed(f"permanently remove {what}?")
