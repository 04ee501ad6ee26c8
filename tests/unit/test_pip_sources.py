"""pip and uv install what the locks name, whatever else their configuration asks for. pip itself is the judge."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wheels import make_wheel

SCRIPT = Path(__file__).parents[2] / "scripts" / "pip_sources.py"
PIP = [sys.executable, "-m", "pip"]
PLACES = (
    "site/pip/pip.conf",
    "home/.pip/pip.conf",
    "home/.config/pip/pip.conf",
    "chosen.conf",
    "PIP_CONSTRAINT",
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with a folder of wheels and no configuration."""
    make_wheel(tmp_path, "plain")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "XDG_"))
    }
    return kept | {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "site"), "PIP_NO_INDEX": "1",
                   "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "chosen.conf")}  # fmt: skip


def configure(folder: Path, place: str, environment: dict[str, str], line: str) -> None:
    if place.isupper():
        environment[place] = line.partition(" = ")[2]
    else:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(f"[global]\n{line}\n")
    if place.startswith("home"):
        del environment["PIP_CONFIG_FILE"]  # with one that exists, pip leaves a user's files out


def install(
    folder: Path, environment: dict[str, str], *before: str
) -> subprocess.CompletedProcess[str]:
    lock = folder / "one.lock"
    digest = hashlib.sha256((folder / "plain-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    lock.write_text(f"plain==1.0 --hash=sha256:{digest}\n")
    words = [
        *before,
        *PIP,
        "install",
        "--dry-run",
        "--no-deps",
        "--require-hashes",
        "-r",
        str(lock),
    ]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


CASES = [*((place, "constraint = contradicts.txt") for place in PLACES), ("chosen.conf", "constraint = none.txt"),
         ("chosen.conf", "target = {}/elsewhere"), ("site/pip/pip.conf", "no-binary = :all:")]  # fmt: skip
SOME = [
    case if number % 4 == 1 else pytest.param(*case, marks=pytest.mark.thorough)
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize(("place", "line"), SOME)
def test_what_stops_pip_itself_does_not_stop_an_installation(
    tmp_path: Path, place: str, line: str, environment: dict[str, str]
) -> None:
    (tmp_path / "contradicts.txt").write_text("plain==2.0\n")
    configure(
        tmp_path,
        place,
        environment,
        line.replace("= ", f"= {tmp_path}/") if ".txt" in line else line.format(tmp_path),
    )
    if ".txt" in line:
        assert install(tmp_path, environment).returncode, (
            "pip itself is not stopped, so this shows nothing"
        )
    done = install(tmp_path, environment, sys.executable, str(SCRIPT), "run")
    assert done.returncode == 0 and "Would install plain-1.0" in done.stdout, done.stderr
    told = subprocess.run(
        [sys.executable, str(SCRIPT), "check"], env=environment, capture_output=True, text=True
    ).stdout
    assert (
        f"{line.partition(' ')[0]} ({place if place.isupper() else tmp_path / place})" in told
        or place == "PIP_CONSTRAINT"
    )


def test_the_files_of_pip_are_those_that_pip_names(environment: dict[str, str]) -> None:
    del environment["PIP_CONFIG_FILE"]
    said = subprocess.run(
        [*PIP, "config", "debug"], env=environment, capture_output=True, text=True
    ).stdout
    theirs = [
        line.strip().rpartition(", exists: ")[0]
        for line in said.splitlines()
        if ", exists: " in line
    ]
    code = "import os, pip_sources; print(*pip_sources._pip_files(os.environ), sep='\\n')"
    ours = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
    )
    assert sorted(ours.stdout.split()) == sorted(theirs) and len(theirs) == 5


def test_sources_and_ways_are_kept_and_uv_gets_them_by_its_names(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """A fake uv prints its environment; the names are those of uv's page of variables."""
    certificate = tmp_path / "ca.pem"
    certificate.write_text("")
    (tmp_path / "chosen.conf").write_text(f"[global]\nindex-url = https://a/simple\nproxy = http://p:1\ncert = {certificate}\n"
                                          "trusted-host = a\n  b\n[install]\nindex-url = https://c/simple\nuser = true\n")  # fmt: skip
    (tmp_path / "site/uv").mkdir(parents=True)
    (tmp_path / "site/uv/uv.toml").write_text('constraint-dependencies = ["x<1"]\n[[index]]\nname = "e"\nurl = "https://e/simple"\n'
                                              '[[index]]\nurl = "https://d/simple"\ndefault = true\n[pip]\nindex-strategy = "unsafe-best-match"\n')  # fmt: skip
    (tmp_path / "uv").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "uv").chmod(0o755)
    environment |= {
        "NO_PROXY": "inside",
        "UV_INDEX_E_PASSWORD": "canary",
        "UV_CONSTRAINT": "none.txt",
        "PIP_TIMEOUT": "7",
    }
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "run", str(tmp_path / "uv")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    given = dict(line.partition("=")[::2] for line in ran.stdout.splitlines())
    assert {name: value for name, value in given.items() if name.startswith("UV_")} == {
        "UV_DEFAULT_INDEX": "https://d/simple", "UV_INDEX": "https://e/simple", "UV_FIND_LINKS": str(tmp_path), "UV_NO_INDEX": "1",
        "UV_INSECURE_HOST": "a b", "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_INDEX_E_PASSWORD": "canary", "UV_HTTP_TIMEOUT": "7",
        "UV_NO_CONFIG": "1",
    }  # fmt: skip
    assert (
        given["SSL_CERT_FILE"] == str(certificate)
        and given["HTTPS_PROXY"] == "http://p:1"
        and given["NO_PROXY"] == "inside"
    )
    shown = json.loads(
        subprocess.run(
            [sys.executable, str(SCRIPT), "show"], env=environment, capture_output=True, text=True
        ).stdout
    )
    assert shown["values"]["index-url"] == "https://c/simple" and set(shown["unused"]) == {
        "constraint",
        "constraint-dependencies",
        "user",
    }


@pytest.mark.parametrize(("text", "place", "words"), [
    ("[global]\nindex-url\n", "chosen.conf:2", "pip's configuration can't be read"),
    ("timeout = 3\n", "chosen.conf:1", "pip's configuration can't be read"),
    ("[global]\ntimeout = 3\ntimeout = 4\n", "chosen.conf:3", "pip's configuration can't be read"),
    ("[global]\ncert = /none/ca.pem\n", "chosen.conf", "cert names /none/ca.pem, which does not exist"),
    ("[install]\nclient-cert = /none/me.pem\n", "chosen.conf", "client-cert names /none/me.pem, which does not exist"),
])  # fmt: skip
def test_an_error_in_the_configuration_is_one_message_with_its_file(
    tmp_path: Path, text: str, place: str, words: str, environment: dict[str, str]
) -> None:
    (tmp_path / "chosen.conf").write_text(text)
    for command in (["check"], ["run", *PIP, "--version"]):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *command], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stderr.startswith(
            f"error: {words}\n  where: {tmp_path}/{place}\n"
        ), done.stderr
        assert (
            "\n  next: " in done.stderr
            and "Traceback" not in done.stderr
            and "Path(" not in done.stderr
            and not done.stdout
        )


class WantsPassword(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="wheels"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def locked_index() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WantsPassword) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def test_an_index_that_asks_for_a_password_is_told_as_one(
    tmp_path: Path, locked_index: str, environment: dict[str, str]
) -> None:
    (tmp_path / "chosen.conf").write_text(f"[global]\nindex-url = {locked_index}\n")
    del environment["PIP_NO_INDEX"], environment["PIP_FIND_LINKS"]
    done = install(tmp_path, environment, sys.executable, str(SCRIPT), "run")
    assert done.returncode and re.search(
        rf"error: the package index asks for a password\n  where: {tmp_path}/chosen.conf\n",
        done.stderr,
    )
