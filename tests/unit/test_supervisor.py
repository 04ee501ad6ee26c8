"""The supervisor: every line reaches the log with its time and rank, and nothing of the command outlives it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainfleet.health import fence, kernel_log
from trainfleet.health.watchdog import Limits
from trainfleet.node import supervisor
from trainfleet.node.supervisor import SEVERED, UNLOGGED, run
from trainfleet.plan.job import script
from trainfleet.process import node_log
from trainfleet.process.node_log import Log, stamp
from trainfleet.run.run_folder import Run, scratch

HANDLED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP)
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "python")}


def supervise(log: Path, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainfleet.node.supervisor", str(log), "--", *command],
        env=ENVIRONMENT,
    )


def await_text(path: Path, text: str) -> str:
    for _ in range(100):
        if path.exists() and text in path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came in {path}")


def await_gone(pid: int) -> None:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_output_and_exit_code_come_through(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "node-0.log"
    assert supervise(log, "sh", "-c", "echo out; echo err >&2; exit 7").wait(10) == 7
    assert supervise(log, "sh", "-c", "echo again; kill -9 $$").wait(10) == 128 + 9
    text = log.read_text()
    assert re.search(r"^agent   \d\d:\d\d:\d\d\.\d{3} \| out$", text, re.MULTILINE)
    assert "| err" in text and "| again" in text


def test_a_worker_s_line_carries_its_rank() -> None:
    assert re.fullmatch(rb"rank 12 \d\d:\d\d:\d\d\.\d{3} \| loss 3\n", stamp(b"rank 12 | loss 3\n"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_it(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "node-0.log"
    process = supervise(log, "sh", "-c", "echo pid $$; sleep 300 & echo child $!; wait")
    pids = [int(pid) for pid in re.findall(r"(?:pid|child) (\d+)", await_text(log, "child"))]
    process.send_signal(number)
    process.wait(10)
    await_gone(pids[0])
    if (
        number == signal.SIGTERM
    ):  # after SIGKILL the kernel ends the command itself; its children are torchrun's to bind
        await_gone(pids[1])


def test_it_dies_with_its_launcher(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-m', 'trainfleet.node.supervisor', {str(log)!r}, '--', 'sh', '-c', 'echo pid $$; sleep 300']).wait()"
    launcher = subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT)
    pid = int(re.search(r"pid (\d+)", await_text(log, "pid"))[1])  # type: ignore[index]
    launcher.kill()
    launcher.wait(5)
    await_gone(pid)


def detach(folder: Path, *command: str, token: str = "t1", **environment: str) -> Path:
    """Starts a command the detached way; its file, once it runs."""
    file = folder / "job"
    words = [
        sys.executable,
        "-m",
        "trainfleet.node.supervisor",
        str(folder / "node-0.log"),
        "--",
        *command,
    ]
    order = json.dumps(
        {"script": script([], folder, {}, words), "environment": environment, "token": token}
    )
    subprocess.run([sys.executable, "-m", "trainfleet.node.supervisor", "--detach", str(file)], input=order, text=True, env=ENVIRONMENT,
                   check=True, timeout=10)  # fmt: skip
    return file


def test_detached_it_outlives_who_started_it_and_leaves_its_exit_code(tmp_path: Path) -> None:
    file = detach(tmp_path, "sh", "-c", 'echo "$WORDS"; sleep 0.5; exit 5', WORDS="from stdin")
    pid, start, boot, token = file.read_text().split()
    assert (
        os.getsid(int(pid)) == int(pid)
        and boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        and start.isdigit()
        and token == "t1"
    )
    assert "from stdin" not in Path(f"/proc/{pid}/cmdline").read_text()
    assert await_text(tmp_path / "job.exit", "5").strip() == "5"
    assert "from stdin" in (tmp_path / "node-0.log").read_text()
    await_gone(int(pid))


def test_the_same_token_starts_nothing_a_second_time_and_another_does(tmp_path: Path) -> None:
    file = detach(tmp_path, "sleep", "1")
    first = file.read_text()
    assert detach(tmp_path, "sleep", "1").read_text() == first, "while it runs"
    await_text(tmp_path / "job.exit", "0")
    assert detach(tmp_path, "sleep", "1").read_text() == first, "and when it has ended"
    assert detach(tmp_path, "true", token="t2").read_text() != first
    await_text(tmp_path / "job.exit", "0")


def test_what_was_killed_with_its_token_is_started_again(tmp_path: Path) -> None:
    file = detach(tmp_path, "sleep", "30")
    pid = int(file.read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    await_gone(pid)
    detach(tmp_path, "true")
    assert int(file.read_text().split()[0]) != pid
    await_text(tmp_path / "job.exit", "0")


def test_a_script_that_fails_before_it_is_a_supervisor_leaves_its_words(tmp_path: Path) -> None:
    order = json.dumps(
        {"script": script([], tmp_path / "missing", {}, ["true"]), "environment": {}, "token": "t1"}
    )
    subprocess.run([sys.executable, "-m", "trainfleet.node.supervisor", "--detach", str(tmp_path / "job")], input=order, text=True,
                   env=ENVIRONMENT, check=True, timeout=10)  # fmt: skip
    assert "missing" in await_text(tmp_path / "job.said", "missing")
    assert not (tmp_path / "job.exit").exists()


def test_detached_it_passes_sigterm_on(tmp_path: Path) -> None:
    file = detach(
        tmp_path,
        "sh",
        "-c",
        'trap "echo bye; exit 0" TERM; echo ready; while :; do sleep 0.1; done',
    )
    await_text(tmp_path / "node-0.log", "ready")
    os.kill(int(file.read_text().split()[0]), signal.SIGTERM)
    assert await_text(tmp_path / "job.exit", "0").strip() == "0"
    assert "bye" in (tmp_path / "node-0.log").read_text()


def test_what_the_kernel_says_is_kept_when_the_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = ["6,1,1000,-;an old line about NVRM: Xid", "6,2,{now},-;NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.",
               "6,3,{now},-;eth0: link up"]  # fmt: skip
    now = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6) + 5_000_000
    monkeypatch.setattr(
        kernel_log,
        "_messages",
        lambda: [
            (int(r.split(",")[2].replace("{now}", str(now))) / 1e6, r.split(";")[1])
            for r in records
        ],
    )
    log = tmp_path / "node-0.log"
    assert run(Log(log), ["false"]) == 1
    assert [line.partition(" | ")[2] for line in log.read_text().splitlines()] == [
        "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus."
    ]
    assert log.read_text().startswith("kernel ")


def test_a_secret_does_not_reach_the_log(tmp_path: Path) -> None:
    file = detach(
        tmp_path,
        "sh",
        "-c",
        'echo "my key is $THE_KEY, really"',
        THE_KEY="canary-9f3a",
        TRAINFLEET_SECRETS="THE_KEY",
    )
    await_text(tmp_path / "job.exit", "0")
    text = (tmp_path / "node-0.log").read_text()
    assert "my key is ***, really" in text and "canary" not in text + file.read_text()


def test_a_kernel_s_log_that_may_not_be_read_is_asked_for_as_root_and_else_said_to_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "KMSG", tmp_path / "nothing")
    sudo = tmp_path / "sudo"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "journalctl").write_text("#!/bin/sh\nexit 1\n")
    sudo.write_text(
        '#!/bin/sh\n[ "$1 $2" = "-n dmesg" ] && echo "[ 9999999999.5] NVRM: Xid (PCI:0000:44:00): 79, GPU is gone"\n'
    )
    for fake in (sudo, tmp_path / "journalctl"):
        fake.chmod(0o755)
    assert [words.text for words in kernel_log.Kernel().words()] == [
        "NVRM: Xid (PCI:0000:44:00): 79, GPU is gone"
    ]
    sudo.write_text("#!/bin/sh\nexit 1\n")
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 12\noom_kill 3\n")
    monkeypatch.setattr(kernel_log, "VMSTAT", counters)
    closed = kernel_log.Kernel()
    counters.write_text("pgfault 19\noom_kill 5\n")
    said = [words.text for words in closed.words()]
    assert "can't read the kernel's log" in said[0] and said[1] == "vmstat: oom_kill 2 on this node"


def test_the_kernel_s_words_keep_their_time(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    file = Log(log)
    file.note("kernel", "nfs: server a not responding", time.time() - 3600)
    file.note("node", "now")
    early, late = (line.split()[1] for line in log.read_text().splitlines())
    assert early != late and abs(int(early[3:5]) - int(late[3:5])) <= 1


def full(folder: Path) -> Path:
    """A log on a disk that is full: every write to it fails as there."""
    log = folder / "runs" / "x" / "logs" / "node-0.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    return log


@pytest.mark.parametrize(
    ("words", "code"), [("exit 0", 0), ("exit 3", UNLOGGED), ("kill -9 $$", UNLOGGED)]
)
def test_a_log_that_can_t_be_written_ends_nothing_and_shows_in_the_exit_code_of_what_failed(
    tmp_path: Path, words: str, code: int
) -> None:
    process = supervise(
        full(tmp_path),
        "sh",
        "-c",
        f"echo one; sleep 0.3; touch {tmp_path}/went-on; echo two; {words}",
    )
    assert process.wait(20) == code and (tmp_path / "went-on").exists()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_node_that_has_lost_the_file_server_says_so_in_the_exit_code_of_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    file = Log(tmp_path / "runs/x/logs/node-0.log")
    monkeypatch.setattr(file, "_write_all", fail)
    assert run(file, ["sh", "-c", "echo one; exit 3"]) == SEVERED
    assert run(file, ["sh", "-c", "echo one"]) == 0


def test_a_log_on_a_folder_that_can_t_be_made_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder belongs")
    assert (
        supervise(
            tmp_path / "runs" / "x" / "logs" / "node-0.log", "sh", "-c", "echo one; exit 0"
        ).wait(20)
        == 0
    )


def test_when_there_is_room_again_the_log_has_what_waited_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_log, "TRY_EVERY", 0.0)
    monkeypatch.setattr(node_log, "KEPT", 160)
    log, path = full(tmp_path), tmp_path / "runs" / "x" / "logs" / "node-0.log"
    file = Log(log)
    for number in range(10):
        file.write(f"line {number} {24 * '-'}\n".encode())
    path.unlink()
    file.write(b"line 10\n")
    assert file.close()
    lines = path.read_text().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["6", "7", "8", "9", "10"]
    assert (
        "could not write this log for" in lines[-1]
        and "(No space left on device); 6 lines are lost" in lines[-1]
    )
    assert capfd.readouterr().err.count("can't write") == 1


def test_half_a_line_that_a_full_disk_took_is_ended_by_its_other_half(tmp_path: Path) -> None:
    file = Log(tmp_path / "log")

    class Short(io.FileIO):
        room = 3

        def write(self, data: Any) -> int:
            part = bytes(data)[: self.room]
            self.room -= len(part)
            if not part:
                raise OSError(28, "No space left on device")
            return super().write(part)

    file.file = Short(tmp_path / "log", "ab")
    file.write(b"whole line\n")
    assert (tmp_path / "log").read_bytes() == b"who" and file.failed
    assert file.close() and (tmp_path / "log").read_bytes().startswith(b"whole line\n")


def test_a_stop_is_passed_on_also_where_there_is_no_room_for_its_file(
    tmp_path: Path,
) -> None:
    """An empty file would be a user's request, and no later start would remove it."""
    log = full(tmp_path)
    process = supervise(
        log,
        "sh",
        "-c",
        f"trap 'touch {tmp_path}/bye; exit 0' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done",
        "torch.distributed.run",
    )
    for _ in range(200):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.05)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0 and (tmp_path / "bye").exists()
    assert not Run(tmp_path / "runs" / "x").is_asked_to_stop()


def test_ranks_print_on_their_node_s_own_disk_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "node-0.log"
    where = scratch(log)
    done = supervise(log, "sh", "-c", f"readlink {where}; echo a > {where}/a")
    assert done.wait(10) == 0
    folder = Path(log.read_text().split(" | ")[1].strip())
    assert (
        folder.name.startswith("trainfleet-scratch-")
        and not folder.exists()
        and not where.is_symlink()
    )


def test_a_scratch_that_leads_elsewhere_is_no_reason_to_remove_what_is_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("a")
    log = tmp_path / "logs" / "node-0.log"
    log.parent.mkdir()
    scratch(log).symlink_to(tmp_path / "precious")
    assert supervise(log, "true").wait(10) == 0
    assert (tmp_path / "precious" / "file").exists() and not scratch(log).is_symlink()


RANK = """import sys, time; from pathlib import Path; from trainfleet.health import fence; from trainfleet.health.heartbeat import Heart
folder = Path(sys.argv[1]); number = fence.enter(folder, 1)
heart = Heart(folder, 0, 0, 1); heart.meet(number)
for step in range(1, 4): heart.at("step", step); time.sleep(1.1)
time.sleep(600)"""


def test_where_no_launcher_watches_node_0_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the order's second start stand still: an engine has started them again, and sees a job that runs."""
    monkeypatch.setattr(supervisor.Sentry.__init__, "__defaults__", (Limits(step=1.0, steps=1.0),))
    monkeypatch.setattr(fence, "TO_LEAVE", 0.0)
    fence.enter(tmp_path, fence.begin(tmp_path))
    for name, value in {
        supervisor.WATCH: "1",
        fence.VARIABLE: "1",
        "PYTHONPATH": str(ROOT / "python"),
    }.items():
        monkeypatch.setenv(name, value)
    before = [signal.getsignal(number) for number in HANDLED]
    try:
        code = run(
            Log(tmp_path / "logs" / "node-0.log"), [sys.executable, "-c", RANK, str(tmp_path)]
        )
    finally:
        for number, handler in zip(HANDLED, before, strict=True):
            signal.signal(number, handler)
    assert code == 128 + 9
    assert re.search(
        r"^watch   .* \| no rank made progress for \d+ s",
        (tmp_path / "logs" / "node-0.log").read_text(),
        re.MULTILINE,
    )


def test_one_that_ends_late_leaves_the_scratch_of_its_successor(tmp_path: Path) -> None:
    where, later = scratch(tmp_path / "logs" / "node-0.log"), tmp_path / "later"
    with supervisor.on_own_disk(where):
        where.unlink()  # the successor begins
        where.symlink_to(later)
    assert where.readlink() == later


AGENT = """
import os, subprocess, sys, time
if sys.argv[1:] == ["rank"]:
    time.sleep(float(os.environ["LOADS"]))  # as a rank loads torch
    from trainfleet.process.processes import SUPERVISOR, die_with_parent
    die_with_parent(os.environ.get(SUPERVISOR))
    print("trains", flush=True)
    time.sleep(60)
with open("rank.log", "w") as log:
    rank = subprocess.Popen([sys.executable, __file__, "rank"], start_new_session=True, stdout=log, stderr=log)
print("rank", rank.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("loads", [0, 2], ids=["trains", "loads"])
def test_a_rank_dies_with_its_agent_even_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: int
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "LOADS", str(loads))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    process = supervise(log := tmp_path / "logs" / "node-0.log", sys.executable, "agent.py")
    rank = int(re.findall(r"rank (\d+)", await_text(log, "| rank"))[0])
    if not loads:
        await_text(tmp_path / "rank.log", "trains")
    process.kill()
    process.wait(10)
    await_gone(rank)
    assert (tmp_path / "rank.log").read_text() == ("" if loads else "trains\n")


def test_a_part_that_is_asked_to_leave_before_its_command_begins_leaves_that_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(supervisor.EXIT, str(tmp_path / "exit"))
    monkeypatch.setattr(supervisor, "die_with_parent", lambda: None)
    with pytest.raises(SystemExit):
        supervisor.run_part(lambda: sys.exit(128 + signal.SIGTERM))
    assert (tmp_path / "exit").read_text() == "143\n"
