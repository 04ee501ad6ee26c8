"""The launcher's office: held while it works, vacant when it dies, and never held by two."""

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
from trainfleet.lease import LEFT, PATIENCE, Office, Tenure, is_held, read_tenure

ROOT = Path(__file__).parents[2]
HOLD = "import sys, time; from pathlib import Path; from trainfleet.lease import Office\nwith Office(Path(sys.argv[1])): time.sleep(60)"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def await_tenure(folder: Path) -> Tenure:
    for _ in range(200):
        if tenure := read_tenure(folder):
            return tenure
        time.sleep(0.05)
    raise AssertionError("nobody took office")


def test_it_is_held_until_the_work_ends_and_then_says_how(tmp_path: Path) -> None:
    with Office(tmp_path) as office:
        tenure = read_tenure(tmp_path)
        assert tenure and tenure.term == 1 and is_held(tenure, time.time()) and office.predecessor is None
        office.code = 0
    tenure = read_tenure(tmp_path)
    assert tenure and tenure.code == 0 and not is_held(tenure, time.time())
    with Office(tmp_path) as office:
        assert office.term == 2 and office.predecessor is None


def test_an_error_ends_it_with_code_1(tmp_path: Path) -> None:
    with pytest.raises(ValueError), Office(tmp_path) as office:
        office.code = 0
        raise ValueError
    tenure = read_tenure(tmp_path)
    assert tenure and tenure.code == 1


def test_whoever_leaves_it_to_the_next_is_found_gone_at_once(tmp_path: Path) -> None:
    with Office(tmp_path) as office:
        office.leave()
    tenure = read_tenure(tmp_path)
    assert tenure and tenure.code is None and not is_held(tenure, time.time())
    with Office(tmp_path) as office:
        assert office.predecessor == tenure
    with pytest.raises(ValueError), Office(tmp_path) as office:
        office.leave()
        raise ValueError
    assert (read_tenure(tmp_path) or tenure).code == 1, "nothing goes on"


def test_it_is_vacant_when_nobody_renews_it(tmp_path: Path) -> None:
    holder = start("-c", HOLD, str(tmp_path))
    tenure = await_tenure(tmp_path)
    time.sleep(1.3)
    assert (read_tenure(tmp_path) or tenure).time > tenure.time
    holder.kill()
    holder.communicate()
    tenure = await_tenure(tmp_path)
    assert is_held(tenure, tenure.time + PATIENCE - 1) and not is_held(tenure, tenure.time + PATIENCE + 1)


def test_whoever_was_taken_for_dead_leaves_when_it_sees_a_successor(tmp_path: Path) -> None:
    holder = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    os.kill(holder.pid, signal.SIGSTOP)
    with Office(tmp_path) as office:
        assert office.term == 2 and office.predecessor and office.predecessor.pid == holder.pid
        os.kill(holder.pid, signal.SIGCONT)
        output = holder.communicate(timeout=10)[0]
        assert holder.returncode == LEFT and "has taken over" in output
        tenure = read_tenure(tmp_path)
        assert tenure and tenure.pid == os.getpid()


STANDBY = (
    "import sys; from trainfleet import lease; from trainfleet.watch import standby\n"
    "lease.PATIENCE = standby.PATIENCE = 2.0; standby.LOOK_EVERY = standby.TYPE_AGAIN = 0.1\n"
)
STANDBY += "sys.exit(standby.main(sys.argv[1:]))"


LAUNCH = """import sys; from pathlib import Path; from trainfleet.lease import Office
tries = Path(sys.argv[1]) / "tries"
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
if len(tries.read_text()) < 3: sys.exit("a host is missing")
with Office(Path(sys.argv[1])) as office: office.code = 0
print("launched again")"""


def test_a_standby_types_the_command_again_when_the_launcher_dies(tmp_path: Path) -> None:
    """And again, when the launcher could not begin."""
    holder = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", LAUNCH, str(tmp_path))
    time.sleep(3.5)
    assert standby.poll() is None, "it takes over from a launcher that lives"
    holder.kill()
    holder.communicate()
    output = standby.communicate(timeout=15)[0]
    assert "launched again" in output and "has not been heard of" in output and standby.returncode == 0


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_standby_goes_home_when_the_work_has_ended(tmp_path: Path, code: int) -> None:
    tenure = Tenure("node0", 1, 1, time.time())
    (tmp_path / lease.FILE).write_text(json.dumps(tenure.__dict__))
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", "print('launched again')")
    time.sleep(1.0)
    (tmp_path / lease.FILE).write_text(json.dumps(tenure.__dict__ | {"code": code, "time": time.time()}))
    assert "launched again" not in standby.communicate(timeout=15)[0] and standby.returncode == 0


def test_a_standby_does_not_repeat_a_launch_that_never_began(tmp_path: Path) -> None:
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", "print('launched again')")
    assert "launched again" not in standby.communicate(timeout=15)[0]
