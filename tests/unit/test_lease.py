"""The launcher's lease: held while it works, vacant when it dies, and never held by two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfleet import lease
from trainfleet.lease import LEFT, PATIENCE, Holder, Lease, is_held, read_holder

ROOT = Path(__file__).parents[2]
HOLD = "import sys, time; from pathlib import Path; from trainfleet.lease import Lease\nwith Lease(Path(sys.argv[1])): time.sleep(60)"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def await_tenure(folder: Path) -> Holder:
    for _ in range(200):
        if holder := read_holder(folder):
            return holder
        time.sleep(0.05)
    raise AssertionError("nobody took lease")


def test_it_is_held_until_the_work_ends_and_then_says_how(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        holder = read_holder(tmp_path)
        assert holder and holder.term == 1 and is_held(holder, time.time()) and lease.predecessor is None
        lease.code = 0
    holder = read_holder(tmp_path)
    assert holder and holder.code == 0 and not is_held(holder, time.time())
    with Lease(tmp_path) as lease:
        assert lease.term == 2 and lease.predecessor is None


def test_an_error_ends_it_with_code_1(tmp_path: Path) -> None:
    with pytest.raises(ValueError), Lease(tmp_path) as lease:
        lease.code = 0
        raise ValueError
    holder = read_holder(tmp_path)
    assert holder and holder.code == 1


def test_whoever_leaves_it_to_the_next_is_found_gone_at_once(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        lease.leave()
    holder = read_holder(tmp_path)
    assert holder and holder.code is None and not is_held(holder, time.time())
    with Lease(tmp_path) as lease:
        assert lease.predecessor == holder
    with pytest.raises(ValueError), Lease(tmp_path) as lease:
        lease.leave()
        raise ValueError
    assert (read_holder(tmp_path) or holder).code == 1, "nothing goes on"


def test_it_is_vacant_when_nobody_renews_it(tmp_path: Path) -> None:
    launcher = start("-c", HOLD, str(tmp_path))
    holder = await_tenure(tmp_path)
    time.sleep(1.3)
    assert (read_holder(tmp_path) or holder).time > holder.time
    launcher.kill()
    launcher.communicate()
    holder = await_tenure(tmp_path)
    assert is_held(holder, holder.time + PATIENCE - 1) and not is_held(holder, holder.time + PATIENCE + 1)


def test_whoever_was_taken_for_dead_leaves_when_it_sees_a_successor(tmp_path: Path) -> None:
    launcher = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    os.kill(launcher.pid, signal.SIGSTOP)
    with Lease(tmp_path) as lease:
        assert lease.term == 2 and lease.predecessor and lease.predecessor.pid == launcher.pid
        os.kill(launcher.pid, signal.SIGCONT)
        output = launcher.communicate(timeout=10)[0]
        assert launcher.returncode == LEFT and "has taken over" in output
        holder = read_holder(tmp_path)
        assert holder and holder.pid == os.getpid()


STANDBY = (
    "import sys; from trainfleet import lease; from trainfleet.watch import standby\n"
    "lease.PATIENCE = standby.PATIENCE = 2.0; standby.LOOK_EVERY = standby.TYPE_AGAIN = 0.1\n"
)
STANDBY += "sys.exit(standby.main(sys.argv[1:]))"


LAUNCH = """import sys; from pathlib import Path; from trainfleet.lease import Lease
tries = Path(sys.argv[1]) / "tries"
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
if len(tries.read_text()) < 3: sys.exit("a host is missing")
with Lease(Path(sys.argv[1])) as lease: lease.code = 0
print("launched again")"""


def test_a_standby_types_the_command_again_when_the_launcher_dies(tmp_path: Path) -> None:
    """And again, when the launcher could not begin."""
    launcher = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", LAUNCH, str(tmp_path))
    time.sleep(3.5)
    assert standby.poll() is None, "it takes over from a launcher that lives"
    launcher.kill()
    launcher.communicate()
    output = standby.communicate(timeout=15)[0]
    assert "launched again" in output and "has not been heard of" in output and standby.returncode == 0


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_standby_goes_home_when_the_work_has_ended(tmp_path: Path, code: int) -> None:
    holder = Holder("node0", 1, 1, time.time())
    (tmp_path / lease.FILE).write_text(json.dumps(holder.__dict__))
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", "print('launched again')")
    time.sleep(1.0)
    (tmp_path / lease.FILE).write_text(json.dumps(holder.__dict__ | {"code": code, "time": time.time()}))
    assert "launched again" not in standby.communicate(timeout=15)[0] and standby.returncode == 0


def test_a_standby_does_not_repeat_a_launch_that_never_began(tmp_path: Path) -> None:
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", "print('launched again')")
    assert "launched again" not in standby.communicate(timeout=15)[0]
