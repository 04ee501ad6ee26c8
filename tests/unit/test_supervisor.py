"""The supervisor: every line reaches the log with its time and rank, and nothing of the command outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfleet.supervisor import stamp

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "python")}


def supervise(log: Path, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "trainfleet.supervisor", str(log), "--", *command], env=ENVIRONMENT)


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
    if number == signal.SIGTERM:  # after SIGKILL the kernel ends the command itself; its children are torchrun's to bind
        await_gone(pids[1])


def test_it_dies_with_its_launcher(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-m', 'trainfleet.supervisor', {str(log)!r}, '--', 'sh', '-c', 'echo pid $$; sleep 300']).wait()"
    launcher = subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT)
    pid = int(re.search(r"pid (\d+)", await_text(log, "pid"))[1])  # type: ignore[index]
    launcher.kill()
    launcher.wait(5)
    await_gone(pid)
