"""What make build and make push say when a real buildah, disk or registry refuses: one message, and no image half there."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkouts import ROOT, buildah
from registry import DENIED, TAKEN, TOKEN, USER, Registry, serving

from requirement import missing, need_program
from trainfleet.cloud import calls
from trainfleet.cloud.calls import Calls
from trainfleet.hosts.platform import load_platform
from trainfleet.hosts.tar import code_files
from trainfleet.images import ecr
from trainfleet.images.builders import Builder, ImageRecipe, recipe_of
from trainfleet.trust.errors import ImageError

BASE = "localhost/small:1"


def own_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment in which buildah keeps images in `folder`; also that of this process."""
    need_program("buildah", "apt-get install buildah")
    settings = (
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    (folder / "storage.conf").write_text(settings)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "python"))
    return dict(os.environ)


def make_image(outside: dict[str, str], name: str, *words: str) -> None:
    """An image of one small file; `words` of buildah config."""
    container = buildah(outside, "from", "scratch").strip()
    buildah(outside, "copy", container, str(ROOT / "LICENSE"), "/")
    buildah(outside, "config", *(words or ("--author=x",)), container)
    buildah(outside, "commit", "-q", "--rm", container, name)


def refused_build(folder: Path, outside: dict[str, str], base: str) -> str:
    """What `make build` says of a base with which it fails. No image has a name of ours then."""
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"name": "x", "fleet": {"container_base": base}})
    )
    words = [sys.executable, "-m", "trainfleet", "build"]
    done = subprocess.run(
        words, cwd=folder, env=outside, capture_output=True, text=True, check=False, timeout=120
    )
    assert (
        done.returncode == 1
        and "Traceback" not in done.stderr
        and done.stderr.startswith("error: ")
    ), done.stderr
    assert "buildah: can't build the image\n  why: " in done.stderr and "\n  next: " in done.stderr
    assert "localhost/trainfleet" not in buildah(outside, "images")
    return done.stderr


def test_a_base_that_can_t_be_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused_build(tmp_path, own_store(tmp_path, monkeypatch), "localhost:1/none:1")
    assert (
        "why: can't pull the base image localhost:1/none:1" in said and "connection refused" in said
    )
    assert "next: set fleet.container_base to an image from a mirror, or to a local image" in said


def test_a_base_for_another_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = own_store(tmp_path, monkeypatch)
    make_image(outside, BASE, "--arch=arm64")
    assert "why: the base image is for another processor" in refused_build(tmp_path, outside, BASE)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=False, capture_output=True
    ).returncode:
        missing("a small disk can't be mounted here; be root")
    try:
        outside = own_store(disk, monkeypatch)
        make_image(outside, BASE)
        with open(disk / "all", "wb") as file:
            file.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - 20_000))
        said = refused_build(tmp_path, outside, BASE)
        assert (
            "why: the disk is full" in said
            and "next: check with df -h; remove old images with buildah image prune" in said
        )
    finally:
        subprocess.run(["umount", "--lazy", disk], check=False)


@pytest.fixture
def pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Registry, ImageRecipe]]:
    """A registry, and the recipe of an image that is here under its name; ECR's requests are answered of that registry."""
    recipe = recipe_of(load_platform("cpu"), "", code_files(""))
    outside = own_store(tmp_path, monkeypatch)
    make_image(outside, recipe.reference, f"--label=org.opencontainers.image.version={recipe.tag}")
    with serving() as registry:
        (tmp_path / ".config" / "containers").mkdir(parents=True)
        settings = f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n'
        (tmp_path / ".config" / "containers" / "registries.conf").write_text(settings)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))

        def send(
            region: str, service: str, operation: str, request: dict[str, Any]
        ) -> dict[str, Any]:
            found = registry.manifests.get(f"mine.{recipe.tag}", b"").decode()
            token = base64.b64encode(f"{USER}:{TOKEN}".encode()).decode()
            return {
                "DescribeRepositories": {"repositories": [{"imageTagMutability": "IMMUTABLE"}]},
                "DescribeImages": {"imageDetails": [{"imageTags": list(registry.manifests)}]},
                "BatchGetImage": {"images": [{"imageManifest": found}] if found else []},
                "GetAuthorizationToken": {"authorizationData": [{"authorizationToken": token}]},
                "GetDownloadUrlForLayer": {
                    "downloadUrl": f"http://{registry.host}/signed/{request.get('layerDigest')}"
                },
            }[operation]

        monkeypatch.setattr(calls, "send", send)
        yield registry, recipe


def push(registry: Registry, recipe: ImageRecipe, said: list[str]) -> str:
    theirs = ecr.Registry(Calls("us-east-1"), "1" * 12)
    theirs.host = registry.host
    return theirs.push(recipe, Builder("buildah"), said.append, {}, "mine")


def test_a_push_sends_the_image_once(
    pushed: tuple[Registry, ImageRecipe], capfd: pytest.CaptureFixture[str]
) -> None:
    registry, recipe = pushed
    said: list[str] = []
    assert push(registry, recipe, said) == f"{registry.host}/trainfleet:mine.{recipe.tag}"
    manifest = json.loads(registry.manifests[f"mine.{recipe.tag}"])
    assert {
        layer["digest"] for layer in [*manifest["layers"], manifest["config"]]
    } == registry.blobs.keys()
    held = dict(registry.blobs)
    push(registry, recipe, said)
    assert (
        said[0].startswith(f"pushed {registry.host}")
        and "exists" in said[1]
        and registry.blobs == held
    )
    out, err = capfd.readouterr()
    assert TOKEN not in out + err


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (("POST", "/uploads/", 403, "DENIED", DENIED), "the registry refused the push"),
        (
            ("PUT", "/manifests/", 400, "TAG_INVALID", TAKEN),
            "the tag exists with different content, and tags are immutable",
        ),
    ],
)
def test_a_push_that_is_refused(
    pushed: tuple[Registry, ImageRecipe], refused: tuple[str, str, int, str, str], why: str
) -> None:
    registry, recipe = pushed
    method, path, status, code, message = refused
    registry.refuses[method, path] = (status, code, message)
    with pytest.raises(ImageError, match="can't push ") as caught:
        push(registry, recipe, [])
    assert (
        caught.value.why.startswith(why)
        and message.split(" on ")[0] in caught.value.why
        and caught.value.next
    )
    assert not registry.manifests, "nothing has its tag"


def test_a_login_that_is_refused(pushed: tuple[Registry, ImageRecipe]) -> None:
    registry, recipe = pushed
    registry.refuses["GET", "/v2/"] = (
        403,
        "DENIED",
        "Your authorization token has expired. Reauthenticate and try again.",
    )
    with pytest.raises(ImageError, match="the registry refused the login") as caught:
        push(registry, recipe, [])
    assert "Reauthenticate" in caught.value.why or "403" in caught.value.why
    assert not registry.blobs
