"""What an instance of AWS Batch does before it takes jobs, run for real in a mount namespace; the package tool and systemd are fakes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from aws.account import Account
from aws.test_scheduler_machines import scheduler_config
from requirement import need_program
from trainfleet.cloud.scheduler_template import BOUNDARY, user_data

FAKES = {"dnf": "", "systemctl": "", "shutdown": "", "modprobe": "", "sleep": "", "chattr": "",
         "mount": 'for folder; do :; done; [ ! -e "$0.broken" ] && /usr/bin/mount -t tmpfs none "$folder"'}  # fmt: skip


def script_of(text: str) -> str:
    """The shell script in the message."""
    return text.split(f"--{BOUNDARY}")[1].partition("\n\n")[2]


@pytest.mark.parametrize(("broken", "said"), [
    ("", ""), ("mount", "fs-1.example@tcp:/abcd can not be mounted at"), ("dnf", ": dnf install -y lustre-client")])  # fmt: skip
def test_an_instance_that_can_t_mount_takes_no_jobs(
    broken: str, said: str, account: Account, tmp_path: Path
) -> None:
    need_program("unshare", "util-linux")
    folder, log, config = tmp_path / "fsx", tmp_path / "log", scheduler_config(tmp_path, "batch")
    fsx = replace(
        config.fleet.fsx, dns_name="fs-1.example", mount_name="abcd", mount_point=str(folder)
    )
    script = script_of(user_data(replace(config, fleet=replace(config.fleet, fsx=fsx)))).replace(
        "/etc/ecs", str(tmp_path)
    )
    for name, body in FAKES.items():
        (tmp_path / name).write_text(
            f'#!/bin/bash\necho "{name} $*" >> {log}\n{"exit 1" if name == broken == "dnf" else body}\n'
        )
        (tmp_path / name).chmod(0o755)
    (tmp_path / f"{broken}.broken").touch()
    words = [
        "unshare",
        "--mount",
        "bash",
        "-c",
        f"PATH={tmp_path}:$PATH; {script}\ntouch {tmp_path}/taking; touch {folder}/job",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    calls = log.read_text().splitlines()
    assert said in done.stdout and bool(done.returncode) == bool(broken), done
    assert (tmp_path / "taking").exists() == (not broken)
    assert ("systemctl mask --now ecs" in calls and "shutdown -h now" in calls) == bool(broken), (
        calls
    )
    assert not (
        folder / "job"
    ).exists()  # mounted, it went into the file system; else nobody came so far
    tries = [line for line in calls if line.startswith("mount ")]
    assert len(tries) == {"": 1, "mount": 5, "dnf": 0}[broken]
    if broken != "dnf":
        assert calls.index(f"chattr +i {folder}") < calls.index(tries[0])
