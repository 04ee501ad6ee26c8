"""Every user of a host sees which run is at work on it, and of two that begin at once one is the first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainfleet.hosts import host_commands
from trainfleet.process.processes import user

MINE, OTHER = "/fsx/me:lm", "/fsx/you:other"
SCRIPT = "import sys; from trainfleet.process import processes as presence; presence.PATIENCE = 0.3; print(repr(presence.announce()), flush=True); sys.stdin.read()"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


@contextmanager
def announced(mark: str, **environment: str) -> Iterator[str]:
    """What a process says that announces a run, for as long as this lasts."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"TRAINFLEET_JOB": mark} | environment)  # fmt: skip
    assert process.stdout
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


def seen(mark: str) -> set[str]:
    """The other runs on this machine, as only the names of sockets tell."""
    text = subprocess.run(
        ["sh", "-c", host_commands.marks()], capture_output=True, text=True, check=True
    ).stdout
    return host_commands.read_marks(
        "\n".join(line for line in text.splitlines() if not line.startswith("mine")), mark
    )


def test_a_run_is_seen_as_long_as_it_lives() -> None:
    with announced(OTHER) as said:
        assert (
            said == "''"
            and f"{OTHER} (of {user()})" in seen(MINE)
            and OTHER not in str(seen(OTHER))
        )
    assert OTHER not in str(seen(MINE))


def test_another_users_run_of_the_same_name_is_another_run() -> None:
    assert host_commands.read_marks(
        f"user me\nsaid 1a2b:you:{MINE}\nsaid 1a2b:me:{MINE}", MINE
    ) == {f"{MINE} (of you)"}
    assert (
        host_commands.read_marks(
            f"Welcome to this node\nmine {MINE}\nuser me\nsaid 1a2b:me:{MINE[:7]}", MINE
        )
        == set()
    )
    assert host_commands.read_marks(f"mine {OTHER}\nuser me\nsaid 1a2b:me:{OTHER}", MINE) == {OTHER}


def test_of_two_that_must_be_alone_one_is_the_first() -> None:
    with (
        announced(MINE, TRAINFLEET_ALONE="1") as first,
        announced(OTHER, TRAINFLEET_ALONE="1") as second,
    ):
        assert first == "''" and f"{MINE} (of {user()})" in second
        with announced(OTHER) as third:
            assert third == "''", "what need not be alone may be beside it"
    with announced(OTHER, TRAINFLEET_ALONE="1") as again:
        assert again == "''"
