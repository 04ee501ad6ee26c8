"""The launcher's lease: held while it works, vacant when it dies, and never held by two."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainfleet.health import lease
from trainfleet.health.lease import LEFT, PATIENCE, Holder, Lease, is_held, read_holder
from trainfleet.launch import execution
from trainfleet.run import run_folder
from trainfleet.run.claims import ROOM, claim
from trainfleet.trust.errors import BackendError

ROOT = Path(__file__).parents[2]
HOLD = "import sys, time; from pathlib import Path; from trainfleet.health.lease import Lease\nwith Lease(Path(sys.argv[1])): time.sleep(60)"


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT / "python")} | environment,
                            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def await_tenure(folder: Path) -> Holder:
    for _ in range(200):
        if holder := read_holder(folder):
            return holder
        time.sleep(0.05)
    raise AssertionError("nobody took lease")


def test_it_is_held_until_the_work_ends_and_then_says_how(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        holder = read_holder(tmp_path)
        assert (
            holder
            and holder.term == 1
            and is_held(holder, time.time())
            and lease.predecessor is None
        )
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
    assert is_held(holder, holder.time + PATIENCE - 1) and not is_held(
        holder, holder.time + PATIENCE + 1
    )


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
    "import sys; from trainfleet.health import lease; from trainfleet.watch import standby\n"
    "lease.PATIENCE = standby.PATIENCE = 2.0; standby.TO_BEGIN = 6.0; standby.LOOK_EVERY = 0.1\n"
    "standby.TYPE_AGAIN = (0.1,)\n"
    "sys.exit(standby.main(sys.argv[1:]))"
)


LAUNCH = """import sys; from pathlib import Path; from trainfleet.health.lease import Lease
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
    assert (
        "launched again" in output
        and "the launcher has been silent for" in output
        and standby.returncode == 0
    )


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_standby_goes_home_when_the_work_has_ended(tmp_path: Path, code: int) -> None:
    holder = Holder("node0", 1, 1, time.time())
    (tmp_path / lease.FILE).write_text(json.dumps(holder.__dict__))
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", "print('launched again')")
    time.sleep(1.0)
    (tmp_path / lease.FILE).write_text(
        json.dumps(holder.__dict__ | {"code": code, "time": time.time()})
    )
    assert "launched again" not in standby.communicate(timeout=15)[0] and standby.returncode == 0


def test_a_standby_does_not_repeat_a_launch_that_never_began(tmp_path: Path) -> None:
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", "print('launched again')")
    said = standby.communicate(timeout=15)[0]
    assert "launched again" not in said and "no launcher started within 6 s" in said


def test_a_standby_waits_for_a_launcher_that_takes_long_to_begin(tmp_path: Path) -> None:
    """Longer than a lease lasts: its packages lie on a file system that is cold."""
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", LAUNCH, str(tmp_path))
    time.sleep(3.5)
    launcher = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    launcher.kill()
    launcher.communicate()
    assert "launched again" in standby.communicate(timeout=20)[0] and standby.returncode == 0


def test_a_standby_of_a_launch_that_is_over_goes_home(tmp_path: Path) -> None:
    """Its own start took longer than the launcher's whole work. What an earlier launcher left behind says nothing."""
    holder = Holder("node0", 1, 4, time.time(), 0)
    (tmp_path / lease.FILE).write_text(json.dumps(holder.__dict__))
    began = time.monotonic()
    standby = start("-c", STANDBY, str(tmp_path), "true", **{lease.APPOINTED: "1 3"})
    assert standby.communicate(timeout=15)[0] == "" and time.monotonic() - began < 5
    standby = start("-c", STANDBY, str(tmp_path), "true", **{lease.APPOINTED: "2 4"})
    assert "no launcher started" in standby.communicate(timeout=15)[0]


FAIL = """import os, sys, signal; from pathlib import Path; from trainfleet.trust.errors import BackendError; from trainfleet.health.lease import Lease
folder = Path(sys.argv[1]); tries = folder / "tries"
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
with Lease(folder) as lease:
    if len(tries.read_text()) == 1: raise BackendError("two hosts are missing")
    if len(tries.read_text()) == 2: raise ZeroDivisionError
    if len(tries.read_text()) == 3: os.kill(os.getpid(), signal.SIGKILL)
    lease.code = 0
    print("leads")
"""


def test_a_takeover_that_failed_with_the_lease_in_its_hand_is_tried_again(tmp_path: Path) -> None:
    """A refusal, a defect, a kill: no code is left meanwhile, at which all who follow the run would leave."""
    launcher = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", FAIL, str(tmp_path))
    time.sleep(1)
    launcher.kill()
    launcher.communicate()
    codes = set()
    while standby.poll() is None:
        codes.add(getattr(lease.newest_holder(tmp_path), "code", None))
        time.sleep(0.02)
    said = standby.communicate(timeout=15)[0]
    assert (
        standby.returncode == 0 and "leads" in said and (tmp_path / "tries").read_text() == "xxxx"
    ), said
    assert codes <= {None, 0}, codes


def test_a_successor_that_finds_the_run_finished_ends_it(tmp_path: Path) -> None:
    """The ranks had finished without a launcher: it has nothing to do, and takes no lease. All who follow wait for a code."""
    launcher = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", "print('nothing to do')")
    time.sleep(1)
    launcher.kill()
    launcher.communicate()
    assert standby.wait(15) == 0
    holder = lease.newest_holder(tmp_path)
    assert holder and holder.code == 0 and holder.term == 2


def test_a_verdict_of_the_successor_is_final(tmp_path: Path) -> None:
    launcher = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    command = FAIL.replace("BackendError", "JobFailed")
    standby = start("-c", STANDBY, str(tmp_path), sys.executable, "-c", command, str(tmp_path))
    time.sleep(1)
    launcher.kill()
    launcher.communicate()
    standby.communicate(timeout=20)
    assert standby.returncode == 1 and (tmp_path / "tries").read_text() == "x"
    assert (read_holder(tmp_path) or Holder("", 0, 0, 0)).code == 1


def test_a_request_to_stop_ends_the_tries_to_take_over(tmp_path: Path) -> None:
    launcher = start("-c", HOLD, str(tmp_path))
    await_tenure(tmp_path)
    standby = start("-c", STANDBY, str(tmp_path), "sh", "-c", "echo tried; exit 1")
    time.sleep(1)
    launcher.kill()
    launcher.communicate()
    time.sleep(4)
    (tmp_path / "stop").touch()
    said = standby.communicate(timeout=15)[0]
    assert "tried" in said and standby.returncode == 130
    assert (read_holder(tmp_path) or Holder("", 0, 0, 0)).code == 130, (
        "who follows the run must see that it is over"
    )


def test_of_two_standbys_the_one_that_was_appointed_later_stays(tmp_path: Path) -> None:
    first = start("-c", STANDBY, str(tmp_path), "true", **{lease.APPOINTED: "1 0"})
    await_standby(tmp_path, 1)
    os.kill(first.pid, signal.SIGSTOP)
    second = start("-c", STANDBY, str(tmp_path), "true", **{lease.APPOINTED: "2 0"})
    await_standby(tmp_path, 2)
    os.kill(first.pid, signal.SIGCONT)
    assert "another host is the standby now" in first.communicate(timeout=10)[0]
    assert second.poll() is None
    second.kill()
    second.communicate()


def await_standby(folder: Path, number: int) -> None:
    for _ in range(400):
        if (found := lease.newest_standby(folder)) and found.number == number:
            return
        time.sleep(0.05)
    raise AssertionError(f"number {number} does not beat")


def test_a_lock_that_outlives_its_host_keeps_nobody_from_the_lease(tmp_path: Path) -> None:
    """As at an NFS server, for 90 s; and where the file system has no locks at all, as Lustre may be mounted."""
    locked = run_folder.take_lock(tmp_path / "runs" / "x")
    assert locked
    place: Any = SimpleNamespace(lead=lambda: None, refresh=lambda: None)
    backend = SimpleNamespace(is_here=False)
    for refused in (None, OSError(errno.ENOLCK, "No locks available")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(execution, "backend_of", lambda config: backend)
            if refused:
                patch.setattr(fcntl, "flock", raising(refused))
            with execution.in_charge(None, run_folder.Run(tmp_path / "runs" / "x"), place) as held:  # type: ignore[arg-type]
                assert held.term == (2 if refused else 1)
                held.code = 0


def raising(error: OSError) -> Callable[..., None]:
    def raise_it(*_: object) -> None:
        raise error

    return raise_it


TAKE = """import sys, time; from pathlib import Path; from trainfleet.health.lease import Lease
lease = Lease(Path(sys.argv[1]))
print("ready", flush=True); sys.stdin.readline()
with lease:
    print("leads", lease.term, flush=True); time.sleep(3); lease.code = 0
"""


def test_of_many_that_want_the_lease_at_once_one_gets_it(tmp_path: Path) -> None:
    tmp_path.joinpath(lease.FILE).write_text(json.dumps(Holder("node0", 1, 3, 5.0).__dict__))
    takers = [start("-c", TAKE, str(tmp_path)) for _ in range(6)]
    for taker in takers:
        assert taker.stdout and taker.stdout.readline() == "ready\n"
    for taker in takers:
        assert taker.stdin
        taker.stdin.write("\n")
        taker.stdin.flush()
    said = [taker.communicate(timeout=60)[0] for taker in takers]
    assert sorted(taker.returncode for taker in takers) == [0, 1, 1, 1, 1, 1], said
    assert (
        sum("leads 4" in words for words in said) == 1
        and sum("is already running" in words for words in said) == 5
    ), said


def test_a_claim_that_nothing_came_of_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claimant has died before it wrote the lease; or the lease's file was removed."""
    monkeypatch.setattr(lease, "PATIENCE", 0.5)
    with Lease(tmp_path):
        pass
    claim(tmp_path / lease.TERMS / "2", "node9")
    with Lease(tmp_path) as held:
        assert held.term == 3
    (tmp_path / lease.FILE).unlink()
    with Lease(tmp_path) as held:
        assert held.term == 4


def test_a_claim_whose_answer_was_lost_is_still_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS over a network that loses packets: the link is made, and the repeated request finds it there."""
    link = os.link

    def lose_the_answer(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError

    monkeypatch.setattr(os, "link", lose_the_answer)
    assert claim(tmp_path / "1", "mine") and (tmp_path / "1").read_text() == "mine"
    assert not claim(tmp_path / "1", "another's") and [
        path.name for path in tmp_path.iterdir()
    ] == ["1"]


def test_a_client_that_remembers_where_a_name_led_sees_each_renewal(tmp_path: Path) -> None:
    """As NFS and Lustre do for seconds: the file must be the same one, of the same length, before and after a takeover."""
    with Lease(tmp_path) as held:
        descriptor = os.open(tmp_path / lease.FILE, os.O_RDONLY)
        before = json.loads(os.read(descriptor, 4096))
        held.code = 0
    with Lease(tmp_path):
        after = json.loads(os.pread(descriptor, 4096, 0))
        assert (before["term"], after["term"]) == (1, 2) and os.fstat(descriptor).st_size == ROOM
    os.close(descriptor)


def test_clocks_that_differ_by_a_day_decide_nothing(tmp_path: Path) -> None:
    """A launcher of a host that is a day ahead is not led for ever; one that is a day behind is not gone."""
    now = time.time()
    assert not is_held(Holder("node0", 1, 1, now + 86400), now)
    launcher = start("-c", HOLD.replace("import sys, time;", "import sys, time; t = time.time; time.time = lambda: t() - 86400;"),
                     str(tmp_path))  # fmt: skip
    assert not is_held(await_tenure(tmp_path), now)
    with pytest.raises(BackendError, match="is already running"):
        lease.require_vacant(tmp_path)
    launcher.kill()
    launcher.communicate()


def test_a_lease_that_can_t_be_read_for_a_while_does_not_end_its_renewal(tmp_path: Path) -> None:
    """ESTALE after a remount, EIO: reading raises, and the thread must live on."""
    with Lease(tmp_path) as held, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            lease.untrusted_input, "read_text", raising(OSError(errno.ESTALE, "Stale file handle"))
        )
        time.sleep(2.5)
        assert held.thread.is_alive()
        patch.undo()
        before = read_holder(tmp_path)
        time.sleep(1.5)
        assert read_holder(tmp_path) != before


CUT_OFF = """import os, sys, time; from pathlib import Path; from trainfleet.health import lease
lease.PATIENCE = 2.0
with lease.Lease(Path(sys.argv[1])) as held:
    held.standby = sys.argv[2]
    def fail(*arguments): raise OSError(int(sys.argv[3]), "the folder is out of reach")
    lease.untrusted_input.read_text = lease.rewrite = fail
    held.thread.join(5.0)
    print("goes on", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("fault", [errno.ESTALE, errno.EIO])
def test_a_launcher_whose_folder_is_out_of_reach_leaves_the_run_to_the_host_that_stands_by(
    tmp_path: Path, fault: int
) -> None:
    """It can't learn that this host has taken over. With nobody to take over it goes on: the folder may come back."""
    said = start("-c", CUT_OFF, str(tmp_path), "node1", str(fault))
    output = said.communicate(timeout=20)[0]
    assert (
        said.returncode == LEFT
        and "can't be read or written, so node1 takes over; this launcher exits" in output
    ), output
    alone = start("-c", CUT_OFF, str(tmp_path), "", str(fault))
    assert "goes on" in alone.communicate(timeout=20)[0] and alone.returncode == 0


THAWED = """import os, signal, sys; from pathlib import Path; from trainfleet.health.lease import Lease
lease = Lease(Path(sys.argv[1])); lease.__enter__(); lease.ended.set(); lease.thread.join()
print("frozen", flush=True); os.kill(os.getpid(), signal.SIGSTOP)
lease.confirm(); (Path(sys.argv[1]) / "harm").touch()
"""


def test_a_launcher_that_is_thawed_leaves_before_it_harms_its_successor(tmp_path: Path) -> None:
    """Whatever its thread that renews the lease does just then."""
    old = start("-c", THAWED, str(tmp_path))
    assert old.stdout and old.stdout.readline() == "frozen\n"
    with Lease(tmp_path):
        os.kill(old.pid, signal.SIGCONT)
        old.communicate(timeout=10)
    assert old.returncode == LEFT and not (tmp_path / "harm").exists()


def test_a_launcher_that_is_thawed_at_its_end_leaves_no_exit_code(tmp_path: Path) -> None:
    old = start(
        "-c", THAWED.replace("lease.confirm();", "lease.__exit__(None, None, None);"), str(tmp_path)
    )
    assert old.stdout and old.stdout.readline() == "frozen\n"
    with Lease(tmp_path):
        os.kill(old.pid, signal.SIGCONT)
        old.communicate(timeout=10)
        holder = read_holder(tmp_path)
        assert old.returncode == LEFT and holder and holder.code is None and holder.term == 2
