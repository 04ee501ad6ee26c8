"""tests/nxd/check.py, which is run by hand for an hour: a port that is taken, a rank that hangs or fails costs one case at most."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[1] / "nxd"))
sys.path.append(str(Path(__file__).parents[1] / "distributed"))
import check
import ranks

MEETS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(())
dist.all_reduce(total)
print("met", int(total))
dist.destroy_process_group()
"""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program took when it had been found to be free."""
    with ExitStack() as stack:
        other = stack.enter_context(socket.socket())
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def started(tmp_path: Path, program: str, size: int = 2) -> check.Ranks:
    return check.Ranks([sys.executable, "-c", program], size, tmp_path, {})


@pytest.mark.thorough
def test_ranks_meet_though_the_port_that_was_free_is_taken(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "free_port", lambda: taken)
    found = started(tmp_path, MEETS)
    assert found.wait(100) == [0, 0], found.outputs
    assert all("met 2" in output for output in found.outputs)


def test_a_rank_that_waits_in_vain_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "AFTER_ONE", 0.5)
    began = time.monotonic()
    alone = started(
        tmp_path,
        "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '0' else time.sleep(600)",
    )
    assert alone.wait(100) == [3, -9]
    assert started(tmp_path, "import time; time.sleep(600)").wait(0.5) == [-9, -9]
    assert time.monotonic() - began < 60


def test_every_case_runs_though_one_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    one = SimpleNamespace(failed=False, say=check.Check.say)
    one.say = lambda name, good, what: check.Check.say(one, name, good, what)  # type: ignore[arg-type]

    def broken() -> None:
        raise check.Failed("a rank ended")

    check.Check.case(one, "first", broken)  # type: ignore[arg-type]
    check.Check.case(one, "second", lambda: seen.append("second"))  # type: ignore[arg-type]
    assert (
        one.failed
        and seen == ["second"]
        and "FAIL first: Failed: a rank ended" in capsys.readouterr().out
    )
