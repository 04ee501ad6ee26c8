"""The image of the cpu stack, really built by buildah on a base that debootstrap makes here, and two nodes that train in it.

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
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from requirement import need_program
from trainfleet.images.building import pip_settings
from trainfleet.runs import Run

ROOT = Path(__file__).parents[2]
BASE = "localhost/trainfleet-test-base:1"
CANARY = "canary-5e1f77"
LINE = "# a changed line\n"
pytestmark = pytest.mark.timeout(1800)
Tell = Callable[[str], None]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where buildah keeps images: in the tests' folder, on native overlay."""
    need_program("buildah", "apt-get install buildah")
    folder = Path(os.environ.get("IMAGES") or tmp_path_factory.mktemp("images"))
    folder.mkdir(exist_ok=True)
    text = f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    (folder / "storage.conf").write_text(text)
    yield folder
    if "IMAGES" in os.environ:
        return
    own = {**os.environ, "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}
    subprocess.run(["buildah", "rm", "--all"], env=own, check=False, capture_output=True)
    subprocess.run(["buildah", "rmi", "--all", "--force"], env=own, check=False, capture_output=True)


@pytest.fixture(scope="session")
def outside(store: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who builds: pip's configuration with a password in it, and a secret of a run's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name == "PIP_CERT"}
    files = [part for part in ("find-links", "extra-index-url", "index-url") if part in pip_settings()]
    served = store / "served"
    served.mkdir(exist_ok=True)
    handler = functools.partial(Quiet, directory=served)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://me:{CANARY}-pip@127.0.0.1:{server.server_port}"
        lines = [
            f"{part} = {' '.join(reached(word, served, address) for word in pip_settings()[part].split())}" for part in files
        ]
        lines += ["retries = 1", "timeout = 60", f"trusted-host = 127.0.0.1:{server.server_port}", *lines_of_canary(address)]
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


def lines_of_canary(address: str) -> list[str]:
    """An index with a password, also where pip needs no other than the usual one."""
    return [] if "extra-index-url" in pip_settings() else [f"extra-index-url = {address}/none/"]


@pytest.fixture(scope="session")
def base(outside: dict[str, str], store: Path) -> str:
    """A small Debian, as an image."""
    need_program("debootstrap", "apt-get install debootstrap")
    if BASE in buildah(outside, "images", "--format={{.Name}}:{{.Tag}}").split():
        return BASE
    root = store / "root"
    subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", root], check=True, capture_output=True
    )
    container = buildah(outside, "from", "scratch").strip()
    mounted = buildah(outside, "mount", container).strip()
    subprocess.run(["cp", "-a", f"{root}/.", mounted], check=True)
    buildah(outside, "umount", container)
    buildah(outside, "config", "--cmd", "/bin/bash", container)
    buildah(outside, "commit", "-q", "--rm", container, BASE)
    shutil.rmtree(root, ignore_errors=True)
    return BASE


def buildah(outside: dict[str, str], *words: str) -> str:
    return subprocess.run(["buildah", *words], env=outside, check=True, capture_output=True, text=True, timeout=600).stdout


class Checkout:
    """A copy of this checkout, which a test may change."""

    def __init__(self, folder: Path, outside: dict[str, str]) -> None:
        self.folder, self.outside = folder, outside | {"PYTHONPATH": str(folder / "python")}
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"], check=True,
                                capture_output=True, text=True).stdout.split()  # fmt: skip
        for name in listed:
            if not name.startswith("tests/") and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def build(self, base: str) -> tuple[str, float]:
        """What make build says, and its seconds."""
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "trainfleet", "build", f"SET=fleet.base_image={base} fleet.secrets='[HF_TOKEN]'"],
                              cwd=self.folder, env=self.outside, capture_output=True, text=True, check=False, timeout=1800)  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr, time.monotonic() - began


def reference_in(said: str) -> str:
    return re.findall(r"(localhost/trainfleet:cpu-[0-9a-f]{16})", said)[-1]


@pytest.fixture(scope="session")
def checkout(outside: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"), outside)


@pytest.fixture(scope="session")
def built(checkout: Checkout, base: str, tell: Tell) -> tuple[str, str]:
    """The image's name, and what was said while it was built."""
    said, seconds = checkout.build(base)
    tell(f"first build: {seconds:.0f} s; {said.splitlines()[-2]}")
    return reference_in(said), said


def test_the_same_again_takes_seconds(built: tuple[str, str], checkout: Checkout, base: str, tell: Tell) -> None:
    said, seconds = checkout.build(base)
    assert seconds < 10 and reference_in(said) == built[0] and "is here" in said
    buildah(checkout.outside, "tag", built[0], "localhost/kept:1")
    buildah(checkout.outside, "rmi", built[0])  # its name alone, as it has another
    said, again = checkout.build(base)
    tell(f"second build: {seconds:.1f} s where the image is here, {again:.1f} s where only its layers are")
    assert again < 10 and reference_in(said) == built[0] and "STEP" in said


def test_a_changed_line_of_python_is_one_small_layer(built: tuple[str, str], checkout: Checkout, base: str, tell: Tell) -> None:
    before = layers(checkout.outside, built[0])
    file = checkout.folder / "python" / "trainfleet" / "seat.py"
    text = file.read_text()
    file.write_text(text + LINE)
    said, seconds = checkout.build(base)
    file.write_text(text)
    after = layers(checkout.outside, reference_in(said))
    assert reference_in(said) != built[0] and f"rebuilt: code; the rest is that of {built[0]}" in said
    same = [one for one, other in zip(before, after, strict=True) if one == other]
    assert len(same) == len(before) - 1 and before[-1][0] != after[-1][0]
    assert after[-1][1] < 10e6 < sum(size for _, size in after) / 50
    tell(
        f"a changed line: {seconds:.1f} s; layers in MB: "
        + ", ".join(f"{size / 1e6:.1f}" for _, size in after)
        + ", only the last is new"
    )


def layers(outside: dict[str, str], reference: str) -> list[tuple[str, int]]:
    """The digest and bytes of each layer."""
    manifest = json.loads(json.loads(buildah(outside, "inspect", "--type=image", reference))["Manifest"])
    return [(layer["digest"], layer["size"]) for layer in manifest["layers"]]


def test_what_it_says_of_itself(built: tuple[str, str], checkout: Checkout) -> None:
    image = json.loads(buildah(checkout.outside, "inspect", "--type=image", built[0]))["Docker"]["config"]
    labels = image["Labels"]
    assert labels["org.opencontainers.image.version"] == built[0].rpartition(":")[2] and labels["trainfleet.stack"] == "cpu"
    assert re.fullmatch(r"cpu \d{4}-\d\d-\d\d [0-9a-f]{12}", labels["trainfleet.lock"])
    assert image["User"] == "trainer" and image["Entrypoint"] == ["python", "-m"] and image["Healthcheck"]
    mounted = Path(buildah(checkout.outside, "mount", container := buildah(checkout.outside, "from", built[0]).strip()).strip())
    bill = json.loads((mounted / "opt/sbom.json").read_text())
    named = {package["name"]: package for package in bill["packages"]}
    pins = dict(re.findall(r"^([a-z0-9.-]+)==([^ ]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert (
        bill["spdxVersion"] == "SPDX-2.3" and named["libc6"] and named["torch"]["versionInfo"].partition("+")[0] == pins["torch"]
    )
    assert named["numpy"]["versionInfo"] == pins["numpy"] and len({package["SPDXID"] for package in bill["packages"]}) == len(
        bill["packages"]
    )
    assert (
        not list((mounted / "opt/trainfleet").glob("**/tests")) and (mounted / "opt/trainfleet/docker/stack.lock.yaml").exists()
    )
    buildah(checkout.outside, "rm", container)


def test_a_secret_is_in_no_layer_label_history_or_log(
    built: tuple[str, str], checkout: Checkout, store: Path, tmp_path: Path
) -> None:
    """Of the whole image, as a registry would get it."""
    assert CANARY not in built[1]
    buildah(checkout.outside, "push", "--disable-compression", built[0], f"oci:{tmp_path}/image:x")
    found, looked = [], 0
    for blob in (tmp_path / "image" / "blobs" / "sha256").iterdir():
        if tarfile.is_tarfile(blob):
            with tarfile.open(blob) as layer:
                for entry in layer:
                    content = layer.extractfile(entry).read() if entry.isfile() else b""  # type: ignore[union-attr]
                    looked += 1
                    found += [f"{blob.name[:8]}:{entry.name}"] if CANARY.encode() in content + entry.name.encode() else []
        else:
            found += [blob.name] if CANARY.encode() in blob.read_bytes() else []
    assert looked > 10_000 and not found
    kept = [path for path in (store / "graph").rglob("*.json") if CANARY in path.read_text(errors="replace")]
    assert not kept, "nor in what buildah keeps beside it"


def test_two_nodes_train_in_it_with_the_losses_of_outside(
    built: tuple[str, str], checkout: Checkout, tmp_path: Path, tell: Tell
) -> None:
    settings = {
        "name": "small", "fleet": {"nodes": 2, "secrets": ["HF_TOKEN"]},
        "train": {"steps": 8, "global_batch": 8, "sequence_length": 128}, "data": {"sources": [str(ROOT / "python")]},
    }  # fmt: skip
    home = tmp_path / "outside"
    home.mkdir()
    (home / "config.yaml").write_text(yaml.safe_dump(settings))
    words = [sys.executable, "-m", "trainfleet"]
    done = subprocess.run(
        [*words, "train"], cwd=home, env=checkout.outside, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    subprocess.run(
        [*words, "plan", f"OUT={tmp_path}/plan"], cwd=home, env=checkout.outside, check=True, capture_output=True, timeout=300
    )
    work = tmp_path / "work"
    (work / "runs" / "small").mkdir(parents=True)
    shutil.copytree(home / "data", work / "data")
    shutil.copy(home / "runs" / "small" / "config.yaml", work / "runs" / "small")
    subprocess.run(["chmod", "-R", "a+rwX", work], check=True)
    run_inside(
        built[0], [path.read_text() for path in sorted((tmp_path / "plan").glob("train-node-*.sh"))], work, checkout.outside
    )
    losses = [[line["loss"] for line in Run(folder / "runs" / "small").read_metrics()] for folder in (home, work)]
    tell(f"losses, outside and in the image: {losses[0]}")
    assert losses[0] == losses[1] and len(losses[0]) > 1
    assert Run(work / "runs" / "small").read_results()["status"] == "finished"
    written = [path for path in work.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]


def run_inside(image: str, scripts: list[str], work: Path, outside: dict[str, str]) -> None:
    """The nodes' scripts of a plan, but in the image: their environment, and their words behind its entrypoint."""
    assert len(scripts) == 2
    processes = []
    for script in scripts:
        exports = dict(re.findall(r"^export (\w+)=(.*)$", script, re.MULTILINE))
        command = shlex.split(script.replace("\\\n", " ").splitlines()[-1])
        told = [
            f"--env={name}={shlex.split(value)[0] if value else ''}" for name, value in exports.items() if name != "PYTHONPATH"
        ]
        told += ["--env=HF_TOKEN", "--env=TRAINFLEET_SECRETS=HF_TOKEN"]
        container = buildah(outside, "from", image).strip()
        own = ["--user=trainer", f"--volume={work}:/work", "--workingdir=/work"]
        words = [
            "buildah",
            "run",
            *own,
            *told,
            container,
            "--",
            "python",
            "-m",
            *command[command.index("trainfleet.entrypoint") :],
        ]
        processes.append(subprocess.Popen(words, env=outside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=900)[0] for process in processes]
    logs = [path.read_text()[-2000:] for path in (work / "runs" / "small" / "logs").glob("*.log")]
    assert [process.returncode for process in processes] == [0, 0], [*said, *logs]
