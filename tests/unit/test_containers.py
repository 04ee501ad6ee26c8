"""A node's part in an image on a host with Docker: a fake docker stands for it, which writes its words down and runs the module here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainfleet.backends.node_script import node_script
from trainfleet.images.ecr import misfit, pull_words
from trainfleet.node.placement import Placement
from trainfleet.node.supervisor import EXIT
from trainfleet.plan.job import Job

ROOT = Path(__file__).parents[2]
IMAGE = "mirror.example/trainfleet:cpu-1"
LOCK = "cpu 2026-11-20 0123456789ab"
# Takes docker's words apart, as `docker run` does: the variables that are named, the folder, the module.
DOCKER = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
with open(os.environ["FAKE_LOG"], "a") as log:
    print(json.dumps(words), file=log)
if words[0] == "run":
    at = words.index("{IMAGE}")
    told = {{word.partition("=")[2] for word in words[:at] if word.startswith("--env=")}}
    own = dict(word.split("=", 1) for word in told if "=" in word) | {{name: os.environ[name] for name in told if name in os.environ}}
    folder = next(word.partition("=")[2] for word in words if word.startswith("--workdir="))
    os.chdir(folder)
    os.execve("{sys.executable}", ["{sys.executable}", "-m", *words[at + 1:]], own)
answer = json.loads(os.environ["FAKE_ANSWERS"]).get(words[0] if words[0] != "image" else "image", [0, ""])
there = os.environ["FAKE_LOG"] + ".pulled"
if words[0] == "login":
    open(os.environ["FAKE_LOG"] + ".stdin", "w").write(sys.stdin.read())
if words[0] == "pull" and not answer[0]:
    open(there, "w").close()
if words[0] == "image" and not os.path.exists(there):
    sys.exit(1)
print(answer[1])
sys.exit(answer[0])
"""
PART = """
import json, os, signal, sys, time
print(json.dumps({"cwd": os.getcwd(), "words": sys.argv[1:], "environment": dict(os.environ)}), flush=True)
if sys.argv[1] == "stay":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's folder, with a docker on its PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / "part.py").write_text(PART)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return tmp_path


def script(host: Path, *words: str, platform: str = "cpu", **more: str) -> str:
    job = Job(
        "tokenize",
        "x",
        Path("data/x"),
        1,
        1,
        "part",
        words,
        False,
        secrets=("THE_KEY",),
        image=IMAGE,
    )
    environment = (
        {"PYTHONPATH": f"{ROOT / 'python'}:{host}"}
        | Placement(0, 1, "127.0.0.1").environment()
        | more
    )
    return node_script(
        job, Placement(0, 1, "127.0.0.1"), host, "python3", environment, "h", platform
    ).text


def run(host: Path, *words: str) -> subprocess.Popen[bytes]:
    (host / "node.sh").write_text(script(host, *words))
    own = {
        "THE_KEY": "canary-9",
        "TRAINFLEET_SECRETS": "THE_KEY",
        EXIT: str(host / "exit"),
        "TRAINFLEET_ATTEMPT": "3",
        "TRAINFLEET_AGAIN": "0",
    }
    return subprocess.Popen(["sh", host / "node.sh"], env=os.environ | own)


def logged(host: Path) -> list[list[str]]:
    return [json.loads(line) for line in (host / "log").read_text().splitlines()]


def test_the_node_runs_in_the_image_and_leaves_its_log_and_code(host: Path) -> None:
    assert run(host, "7", "two words", "$HOME").wait(20) == 7
    assert (host / "exit").read_text() == "7\n"
    (words,) = logged(host)
    assert (
        words[0] == "run"
        and f"--volume={host}:{host}" in words
        and "--rm" in words
        and "--network=host" in words
    )
    assert (
        words[words.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
        and "--ulimit=memlock=-1" in words
    )
    said: dict[str, Any] = json.loads(
        re.search(r"\{.*", (host / "data/x/logs/node-0.log").read_text())[0].replace("***", "-")
    )  # type: ignore[index]
    assert said["cwd"] == str(host) and said["words"] == ["7", "two words", "$HOME"]
    assert (
        said["environment"]["TRAINFLEET_ATTEMPT"] == "3" and said["environment"]["THE_KEY"] == "-"
    )


def test_no_value_of_a_secret_is_a_word_or_in_the_log(host: Path) -> None:
    run(host, "0").wait(20)
    assert (
        "canary"
        not in (host / "log").read_text()
        + (host / "data/x/logs/node-0.log").read_text()
        + (host / "node.sh").read_text()
    )
    assert "--env=THE_KEY" in logged(host)[0]


def test_sigterm_reaches_the_node_s_part(host: Path) -> None:
    process = run(host, "stay")
    for _ in range(200):
        if (log := host / "data/x/logs/node-0.log").exists() and "cwd" in log.read_text():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143 and (host / "exit").read_text() == "143\n"


def test_a_disk_of_the_node_s_own_is_given_over_where_the_dataset_is_copied_to_it(
    host: Path,
) -> None:
    (host / "node.sh").write_text(script(host, "0", TRAINFLEET_COPY="/scratch"))
    assert subprocess.run(["sh", host / "node.sh"], timeout=20, check=False).returncode == 0
    assert "--volume=/scratch:/scratch" in logged(host)[0]


def test_gpus_are_given_over_where_the_platform_has_them(host: Path) -> None:
    assert "--gpus=all" in script(host, "0", platform="cuda-volta") and "--gpus" not in script(
        host, "0", platform="neuron"
    )


def pull(
    host: Path, registry: str = "", **answers: tuple[int, str]
) -> subprocess.CompletedProcess[str]:
    own = {"FAKE_ANSWERS": json.dumps(answers)}
    return subprocess.run(
        ["sh", "-c", pull_words(IMAGE, registry)],
        env=os.environ | own,
        input="canary-token",
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_image_that_is_there_is_not_pulled(host: Path) -> None:
    (host / "log.pulled").touch()
    done = pull(host, image=(0, f"amd64 {LOCK}"))
    assert done.stdout.strip() == f"amd64 {LOCK}" and [words[0] for words in logged(host)] == [
        "image"
    ]


def test_one_that_is_not_is_pulled_with_a_login_that_does_not_stay(host: Path) -> None:
    done = pull(host, "1.dkr.ecr.x.amazonaws.com", image=(0, f"amd64 {LOCK}"))
    assert done.returncode == 0 and done.stdout.strip() == f"amd64 {LOCK}"
    assert [words[0] for words in logged(host)] == ["image", "login", "pull", "image"]
    assert (host / "log.stdin").read_text() == "canary-token" and "canary" not in (
        host / "log"
    ).read_text()


def test_one_that_can_t_be_pulled_says_why(host: Path) -> None:
    assert pull(host, pull=(1, "manifest unknown")).returncode == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [(f"amd64 {LOCK}", ""), ("amd64 <no value>", ""), ("amd64 ", ""), (f"arm64 {LOCK}", "it is built for arm64"), ("", "an unknown architecture"),
     ("amd64 cpu 2026-01-01 000000000000", "its versions are cpu 2026-01-01 000000000000, but the config's platform has " + LOCK)],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_both(words: str, told: str) -> None:
    assert told in misfit(words, LOCK) and bool(told) == bool(misfit(words, LOCK))
