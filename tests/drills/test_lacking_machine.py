"""A machine that lacks something which programs take for granted: training goes on without, or the first thing said is what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from requirement import need_program
from trainfleet.run.run_folder import Run
from verbs import PACKAGES, ROOT, write_text

CONFIG = {
    "name": "lacks",
    "fleet": {"nodes": 2},
    "data": {"name": "text", "sources": ["text"], "vocab_size": 340, "validation_fraction": 0.1},
    "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
    "train": {"steps": 4, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "validate_every": 0,
              "validation_sequences": 8},
}  # fmt: skip
READ_ONLY = "mount -t tmpfs -o ro tmpfs"
DEVICES = """mkdir dev; mount -t tmpfs tmpfs dev
for device in null zero random urandom; do : > dev/$device; mount --bind /dev/$device dev/$device; done
mount --rbind dev /dev"""
WITHOUT = {  # what a shell does first, and what the verb begins with
    "environment, open files, owner's rights": ("ulimit -n 64; umask 0777", "env -i PATH=/usr/bin:/bin PYTHONPATH=$PYTHONPATH setpriv --inh-caps=-all --bounding-set=-all"),
    "a home, shared memory, a terminal, /sys": (f"{DEVICES}; {READ_ONLY} /sys; mkdir 'a space'", "env HOME=/proc/none TMPDIR='a space' PATH="),
    "a folder for temporary files": (f"mount --bind . /mnt; cd /mnt; for folder in /tmp /var/tmp /dev/shm; do {READ_ONLY} $folder; done", "env TMPDIR=/proc"),
}  # fmt: skip


def enter(
    folder: Path, verb: str, first: str, before: str = "", namespaces: str = "--mount"
) -> tuple[int, str]:
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    if not (folder / "text").exists():
        write_text(folder / "text")
    need_program("unshare", "apt-get install util-linux")
    line = f"{first}\nexec {before} {sys.executable} -m trainfleet {verb}"
    done = subprocess.run(
        ["unshare", namespaces, "sh", "-ec", line], cwd=folder, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={"PYTHONPATH": PACKAGES, "PATH": "/usr/sbin:/usr/bin:/bin", "HOME": str(folder)},
        check=False, timeout=150,
    )  # fmt: skip
    assert "Traceback" not in done.stdout and "matplotlib" not in done.stdout, done.stdout
    return done.returncode, done.stdout


@pytest.mark.parametrize(("first", "before"), WITHOUT.values(), ids=WITHOUT)
def test_training_goes_on_without(first: str, before: str, tmp_path: Path) -> None:
    code, said = enter(tmp_path, "train", first, before)
    assert code == 0 and Run(tmp_path / "runs/lacks").read_results()["status"] == "finished", said


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("mkdir gone; cd gone; rmdir ../gone", "error: this folder was removed\n  next: cd"),
        ("ulimit -f 64", "ulimit -f unlimited to remove the file size limit"),
    ],
)
def test_what_is_missing_is_said(first: str, words: str, tmp_path: Path) -> None:
    (ROOT / "README.md").touch()  # so that git would write its index anew
    code, said = enter(tmp_path, "train", first)
    assert code and words in said, said
    git = [
        "git",
        "-C",
        str(ROOT),
        "rev-parse",
        "--path-format=absolute",
        "--git-path",
        "index.lock",
    ]
    lock = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    assert not lock or not Path(lock).exists(), "what was cut off has left its lock in the checkout"


@pytest.mark.parametrize("verb", ["doctor", "plan", "train"])
def test_a_machine_that_does_not_reach_itself_is_told_of_before_ranks_wait_for_each_other(
    verb: str, tmp_path: Path
) -> None:
    code, said = enter(tmp_path, verb, ":", namespaces="--net")
    assert (
        code
        and "can't reach its loopback address 127.0.0.1: Network is unreachable" in said
        and "ip link set lo up" in said
    )
    assert not (tmp_path / "data").exists()
