"""buildah with images of its own, a base that mmdebstrap makes here, and a checkout that a test may change.

Without a registry, so nothing is pulled; without a daemon, so by chroot. What pip is configured with on this machine is what the build
gets, as a secret; what that names by a path of this machine is served to it over loopback. IMAGES=folder keeps what buildah made there
for the next run.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkouts import CANARY, ROOT, Checkout, Tell, buildah, reference_in

from requirement import need_program

BASE = "localhost/trainfleet-test-base:1"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where buildah keeps images: in the tests' folder, on native overlay."""
    need_program("buildah", "apt-get install buildah")
    folder = Path(os.environ.get("IMAGES") or tmp_path_factory.mktemp("images"))
    folder.mkdir(exist_ok=True)
    text = (
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    (folder / "storage.conf").write_text(text)
    yield folder
    if "IMAGES" in os.environ:
        return
    own = {**os.environ, "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}
    subprocess.run(["buildah", "rm", "--all"], env=own, check=False, capture_output=True)
    subprocess.run(
        ["umount", "--lazy", folder / "graph" / "overlay"], check=False, capture_output=True
    )
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def outside(store: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who builds: pip's configuration with a password in it, and a secret of a run's."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") or name == "PIP_CERT"
    }
    script = [sys.executable, str(ROOT / "scripts" / "pip_sources.py"), "show"]
    settings = json.loads(
        subprocess.run(script, check=True, capture_output=True, text=True).stdout
    )["values"]
    files = [part for part in ("find-links", "extra-index-url", "index-url") if part in settings]
    served = store / "served"
    served.mkdir(exist_ok=True)
    handler = functools.partial(Quiet, directory=served)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://me:{CANARY}-pip@127.0.0.1:{server.server_port}"
        lines = [
            f"{part} = {' '.join(reached(word, served, address) for word in settings[part].split())}"
            for part in files
        ]
        lines += ["retries = 1", "timeout = 60", f"trusted-host = 127.0.0.1:{server.server_port}"]
        lines += (
            [] if "extra-index-url" in settings else [f"extra-index-url = {address}/none/"]
        )  # one with a password
        lines += [
            f"constraint = {store}/none.txt"
        ]  # as companies have them: the container has no such file
        (store / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
        yield kept | {
            "PIP_CONFIG_FILE": str(store / "pip.conf"), "PYTHONPATH": str(ROOT / "python"), "HF_TOKEN": f"{CANARY}-run",
            "CONTAINERS_STORAGE_CONF": str(store / "storage.conf"), "BUILDAH_ISOLATION": "chroot",
        }  # fmt: skip
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


def reached(word: str, served: Path, address: str) -> str:
    """An address as the build can reach it."""
    path = Path(word.removeprefix("file://"))
    if not path.is_absolute():
        return word
    name = re.sub(r"[^a-z0-9]", "-", str(path))
    if not (served / name).is_symlink():
        (served / name).symlink_to(path.parent if path.name == "simple" else path)
    return f"{address}/{name}/{'simple' if path.name == 'simple' else ''}"


@pytest.fixture(scope="session")
def base(outside: dict[str, str], store: Path) -> str:
    """A small Debian, as an image. As in Debian's own ones, dpkg does not wait for the disk there."""
    need_program("mmdebstrap", "apt-get install mmdebstrap")
    if BASE in buildah(outside, "images", "--format={{.Name}}:{{.Tag}}").split():
        return BASE
    root = store / "root"
    words = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--include=ca-certificates",
        "--dpkgopt=force-unsafe-io",
    ]
    done = subprocess.run([*words, "bookworm", root], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    container = buildah(outside, "from", "scratch").strip()
    mounted = buildah(outside, "mount", container).strip()
    subprocess.run(["cp", "-a", f"{root}/.", mounted], check=True)
    buildah(outside, "umount", container)
    buildah(outside, "config", "--cmd", "/bin/bash", container)
    buildah(outside, "commit", "-q", "--rm", container, BASE)
    shutil.rmtree(root, ignore_errors=True)
    return BASE


@pytest.fixture(scope="session")
def checkout(outside: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"), outside)


@pytest.fixture(scope="session")
def built(checkout: Checkout, base: str, tell: Tell) -> tuple[str, str]:
    """The image's name, and what was said while it was built."""
    said, seconds = checkout.build(base)
    steps = [line.strip() for line in said.splitlines() if re.search(r"  \d+ s$| RUN ", line)]
    tell("\n".join([f"first build: {seconds:.0f} s; {said.splitlines()[-2]}", *steps]))
    return reference_in(said), said
