"""File systems that lack an operation: what is done without it, and what still fails as it should."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_walls import FILES, PACKAGE

from trainfleet.backends.own_machines import ThisMachine
from trainfleet.data.dataset_store import only_job, open_store
from trainfleet.process import file_systems
from trainfleet.run import run_folder
from trainfleet.run.claims import claim
from trainfleet.run.run_folder import is_locked, take_lock
from trainfleet.trust.errors import DataError, RunError

LOCKLESS = [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK]


def lacks(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: int, below: Path) -> None:
    """From now on this operation fails with `code` for what is in a folder."""
    real = getattr(module, name)

    def fails(where: Any, *arguments: Any, **more: Any) -> Any:
        number = where if isinstance(where, int | Path) else where.fileno()
        path = number if isinstance(number, Path) else Path(f"/proc/self/fd/{number}").readlink()
        if path.is_relative_to(below):
            raise OSError(code, os.strerror(code))
        return real(where, *arguments, **more)

    monkeypatch.setattr(module, name, fails)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the file system that lacks something, beside the machine's own."""
    for name in ("shared", "memory"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(file_systems, "MEMORY", tmp_path / "memory")
    return tmp_path / "shared"


@pytest.mark.parametrize("code", LOCKLESS)
def test_without_locks_one_of_this_machine_stands_in(
    shared: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    lacks(monkeypatch, fcntl, "flock", code, shared)
    assert not is_locked(shared / "run")
    first = take_lock(shared / "run")
    assert (
        first
        and take_lock(shared / "run") is None
        and is_locked(shared / "run")
        and not is_locked(shared / "other")
    )
    first.close()
    assert not is_locked(shared / "run")
    store = open_store(shared / "data", None)
    with only_job(store), pytest.raises(DataError, match="another job"), only_job(store):
        pass


@pytest.mark.parametrize("code", LOCKLESS)
def test_where_no_folder_has_locks_work_goes_on_without(
    shared: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    lacks(monkeypatch, fcntl, "flock", code, shared.parent)
    with take_lock(shared / "run") or pytest.fail("locked"):
        assert not is_locked(shared / "run")
    os.close(file_systems.hold(shared / "folder"))
    file_systems.sweep([shared / "folder"])
    assert (shared / "folder").is_dir(), "it may be another process's"


def test_a_command_tells_once_that_a_file_system_has_no_locks(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a launch, which takes several locks, and in doctor; where there are locks, nothing is told."""
    for begin in (lambda: take_lock(shared / "run"), ThisMachine(1).apply):
        monkeypatch.setattr(file_systems, "_told", set())
        with monkeypatch.context() as patched:
            patched.chdir(shared)
            begin()
            assert "no locks" not in capsys.readouterr().out
            lacks(patched, fcntl, "flock", errno.ENOSYS, shared)
            begin()
            take_lock(shared / "data")
            assert capsys.readouterr().out.count(f"note: the file system of {shared}") == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_an_operation_that_fails_is_not_one_that_lacks(
    shared: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for operation in (
        lambda: take_lock(shared / "run"),
        lambda: claim(shared / "a", ""),
        lambda: run_folder.sync_folder(shared),
    ):
        with monkeypatch.context() as patched:
            for module, name in ((fcntl, "flock"), (os, "link"), (os, "fsync")):
                lacks(patched, module, name, code, shared)
            with pytest.raises((OSError, RunError)):
                operation()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_second_names_one_still_gets_a_claim(
    shared: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """FAT and some of FUSE."""
    lacks(monkeypatch, os, "link", code, shared)
    assert [claim(shared / "terms" / "1", text) for text in "ab"] == [True, False]
    assert (shared / "terms" / "1").read_text() == "a"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_folder_that_can_not_be_synced_holds_files_all_the_same(
    shared: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """CIFS, 9p and what virtual machines share with their host."""
    real: Callable[[int], None] = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    run_folder.write_atomic(shared / "run" / "config.yaml", "a")
    assert (shared / "run" / "config.yaml").read_text() == "a"


def test_one_place_decides_what_a_file_system_lacks() -> None:
    """A call of its own would not know: `file_systems` has these, and whoever may not go on without a lock."""
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in FILES
        for name in re.findall(
            r"\b(fcntl\.(?:flock|lockf)|os\.link|\.hardlink_to)\(", path.read_text()
        )
    }
    assert found == {
        "process/file_systems.py:fcntl.flock",
        "process/file_systems.py:os.link",
    }
