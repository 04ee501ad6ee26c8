"""make clean: stops what runs and removes what can be made again; datasets and checkpoints stay unless PURGE=1."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import BackendError, TrainfleetError
from ..report.history import size
from ..runs import COMPILED, DATA, RUNS, Run, is_locked
from . import stop
from .place import Place, place_of
from .settings import run_named
from .variables import Variables, flag

CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache", str(COMPILED))


def main(variables: Variables, started: float) -> int:
    purge, sure, run = flag(variables, "PURGE"), flag(variables, "YES"), run_named(variables)
    with place_of(variables) as place:
        try:
            place.refresh()
            if place.is_running():
                stop.end(place, run, started)
            place.end_all()
        except BackendError:
            _remove_remakeable()  # what is here can be tidied, whatever is the matter there
            raise
        _remove_remakeable()
        return _purge(place, sure) if purge else _keep(place)


def _remove_remakeable() -> None:
    busy = [folder for folder in (*_folders(RUNS), *_folders(DATA)) if is_locked(folder)]
    if busy:
        raise BackendError(
            f"still at work: {', '.join(map(str, busy))}", next=f"make stop CONFIG={busy[0]}/config.yaml, or wait for it"
        )
    removed = sum(_remove(path) for path in _remakeable())
    print(f"removed {size(removed)} that can be made again (reports, plots, caches, what was half made)")


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*") if path.is_dir())


def _remakeable() -> Iterator[Path]:
    for folder in _folders(RUNS):
        run = Run(folder)
        yield from (run.report, run.plots, run.stop, folder / "lock", *run.logs.glob("*.parts"))
        yield from run.checkpoints.glob(".step-*")
    yield from (Path(name) for name in CACHES)
    for root in ("python", "tests"):
        yield from Path(root).rglob("__pycache__")


def _all_folders(place: Place) -> dict[str, int]:
    """Every run and dataset with its bytes: those of this machine, and what the run has on its fleet."""
    return {str(folder): measure(folder) for folder in (*_folders(RUNS), *_folders(DATA))} | place.far_folders()


def _keep(place: Place) -> int:
    for folder, count in (kept := _all_folders(place)).items():
        print(f"kept {folder}: {size(count)}")
    print("next: make clean PURGE=1 removes these too" if kept else "no runs and no datasets are left")
    return 0


def _purge(place: Place, sure: bool) -> int:
    folders = _all_folders(place)
    if not folders:
        print("no runs and no datasets are left")
        return 0
    for folder, count in folders.items():
        print(f"{folder}: {size(count)}")
    if not sure and not _confirmed(len(folders)):
        print("nothing more was removed")
        return 1
    place.remove_far(far := place.far_folders())
    for folder in folders.keys() - far.keys():
        _remove(Path(folder))
    print(f"removed {size(sum(folders.values()))}: runs with their checkpoints, and datasets")
    return 0


def _confirmed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise TrainfleetError(
            "PURGE=1 asks before it removes runs and datasets, and there is no terminal to ask on",
            next="make clean PURGE=1 YES=1",
        )
    return input(f"remove these {count} folders for good? [y/N] ").strip().lower() in ("y", "yes")


def _remove(path: Path) -> int:
    """Bytes that were freed."""
    if not path.exists():
        return 0
    freed = measure(path)
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise TrainfleetError(f"can't remove {path}", why=str(error), next=f"ls -ld {path}") from error
    return freed


def measure(path: Path) -> int:
    """Bytes in a file, or in all files of a folder."""
    return sum(part.stat().st_size for part in (path.rglob("*") if path.is_dir() else [path]) if part.is_file())
