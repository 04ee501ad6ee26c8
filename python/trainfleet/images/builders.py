"""Defines an image's content, and drives the builder (docker, podman or buildah) that builds,
inspects and pushes it.

The same checkout and platform produce the same tag on every machine.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..hosts.install_steps import environment_words, lock_name
from ..hosts.platform import DRIVER, PinnedPlatform
from ..hosts.tar import LOCKS, content_hash
from ..trust import untrusted_input
from ..trust.errors import ImageError
from ..trust.safe_output import visible

ANSWER = 60.0  # timeout for a query, in seconds
NATIVE = ("x86_64", "AMD64")  # machines that build amd64 images without --platform


@dataclass(frozen=True)
class FoundImage:
    """An image with its labels, processor architecture and layer sizes in bytes, base layer first.

    For an image in a registry, `layers` contains only the total stored size.
    """

    labels: Mapping[str, str]
    architecture: str
    layers: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.layers)


@dataclass(frozen=True)
class Builder:
    """A command-line program that builds images.

    docker and podman share most arguments, but buildah inspects images with different ones.
    """

    name: str

    def works(self) -> str:
        """Returns why the program can't be used here, or "" if it works."""
        if shutil.which(self.name) is None:
            return "is not installed"
        said = self.run("version" if self.name == "buildah" else "info")
        if said.returncode == 0:
            return ""
        return f"does not work: {last_line(said.stderr or said.stdout)}"

    def build(
        self, reference: str, arguments: Mapping[str, str], secrets: Mapping[str, str], context: str
    ) -> list[str]:
        """Returns the command that builds the image from the folder `context`.

        Secrets are passed as files, never on the command line. The Dockerfile sets the labels from
        its arguments, because `--label` breaks the cache of buildah 1.28: buildah would commit
        stages without steps again, and miss its cache for later stages
        (imagebuildah/stage_executor.go).
        """
        foreign = [] if platform.machine() in NATIVE else [f"--platform=linux/{ARCHITECTURE}"]
        own = ["--progress=plain"] if self.name == "docker" else ["--layers", "--format=docker"]
        return [
            self.name,
            "build",
            *own,
            *foreign,
            f"--file={context}/{DOCKERFILE}",
            f"--tag={reference}",
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            *(f"--secret=id={name},src={file}" for name, file in secrets.items()),
            context,
        ]

    def find(self, reference: str) -> FoundImage | None:
        """Returns the image with this name on this machine, or None if it does not exist."""
        if self.name == "buildah":
            said = self.run("inspect", "--type=image", reference)
            return _of_buildah(said.stdout) if said.returncode == 0 else None
        said = self.run("image", "inspect", reference)
        if said.returncode:
            return None
        return _of_docker(
            said.stdout,
            self.run("history", "--human=false", "--format={{.Size}}", reference).stdout,
        )

    def names(self, label: str) -> list[str]:
        """Returns the names of local images with this label, newest first."""
        form = "{{.Name}}:{{.Tag}}" if self.name == "buildah" else "{{.Repository}}:{{.Tag}}"
        said = self.run("images", f"--filter=label={label}", f"--format={form}")
        return [line for line in said.stdout.splitlines() if "<none>" not in line]

    def login(self, host: str, user: str, token: str) -> subprocess.CompletedProcess[str]:
        """Logs in to a registry. The token is passed through stdin, never on the command line."""
        return self.run("login", "--username", user, "--password-stdin", host, stdin=token)

    def push(self, reference: str, target: str) -> list[Sequence[str]]:
        """Returns the commands that push an image as `target`."""
        if self.name == "docker":
            return [["docker", "tag", reference, target], ["docker", "push", target]]
        return [[self.name, "push", reference, f"docker://{target}"]]

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs the program. If it can't be started or times out, returns a failed process instead
        of raising.
        """
        command = [self.name, *words]
        try:
            return subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ANSWER,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error) if isinstance(error, OSError) else f"no answer within {ANSWER:.0f} s"
            return subprocess.CompletedProcess(command, 1, "", why)


BUILDERS = (Builder("docker"), Builder("podman"), Builder("buildah"))


def choose() -> tuple[Builder, str]:
    """Returns the first builder that works here, and why the ones before it do not. Raises
    ImageError if no builder works.
    """
    refused: list[str] = []
    for builder in BUILDERS:
        if not (why := builder.works()):
            return builder, "; ".join(refused)
        refused.append(f"{builder.name} {why}")
    raise ImageError(
        "this machine has no working image builder",
        why="; ".join(refused),
        next="apt-get install buildah, or start the Docker daemon: systemctl start docker",
    )


def _of_buildah(text: str) -> FoundImage | None:
    record = _record(text)
    image, manifest = record.get("OCIv1") or {}, _record(str(record.get("Manifest") or "{}"))
    labels = (image.get("config") or {}).get("Labels") or {}
    layers = manifest.get("layers") or ()
    return FoundImage(
        labels,
        str(image.get("architecture", "")),
        tuple(int(layer.get("size", 0)) for layer in layers),
    )


def _of_docker(text: str, history: str) -> FoundImage | None:
    record = _record(text)
    labels = (record.get("Config") or {}).get("Labels") or {}
    sizes = [size for line in history.split() if (size := untrusted_input.whole(line))]
    return FoundImage(labels, str(record.get("Architecture", "")), tuple(reversed(sizes)))


def _record(text: str) -> dict[str, Any]:
    """Returns the JSON object in a program's output, or the first object in a JSON list. Returns {}
    for other output.
    """
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, dict) else {}


def last_line(text: str) -> str:
    """Returns the last non-blank line of a program's output."""
    lines = [line.strip() for line in visible(text).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


DOCKERFILE = "docker/Dockerfile"
NAME = "trainfleet"
TAG = "image-tag"  # name of the file with the image's tag, next to the code
LAYERS = f"{NAME}.layers"  # label that contains a hash for each layer
ARCHITECTURE = "amd64"  # processor architecture of all instance types (hardware/node_types.py)
# Inputs of each layer: files in the checkout, and Dockerfile arguments. Layers are ordered from
# rarely to frequently changed. The last layer, code, contains all files.
PARTS = {
    "system": (("scripts/build_tools.sh",), ("BASE_IMAGE",)),
    "fabric": (
        ("scripts/key.sh", "scripts/efa.sh", "scripts/ofi_nccl.sh", "scripts/neuron.sh"),
        ("EFA_VERSION", "EFA_KEY", "OFI_NCCL_VERSION", "NEURON_KEY", "NEURON_PACKAGES"),
    ),
    "python": (
        (
            *LOCKS,
            "scripts/pip_sources.py",
            "scripts/python.sh",
            "scripts/unpinned.py",
            "scripts/sbom.py",
        ),
        ("TORCH_INDEX", "OTHER_INDEX", "PYTHON_PACKAGES"),
    ),
}


@dataclass(frozen=True)
class ImageRecipe:
    """The inputs of an image.

    `arguments` are the Dockerfile's arguments, `files` maps paths in the build context to contents,
    and `lock` identifies the pinned versions.
    """

    platform: str
    lock: str
    arguments: tuple[tuple[str, str], ...]
    files: Mapping[str, bytes]

    @property
    def base(self) -> str:
        return dict(self.arguments)["BASE_IMAGE"]

    @property
    def tag(self) -> str:
        """Returns a tag that depends on everything in the image except the user and the commit."""
        arguments = {f"--{name}": value.encode() for name, value in self.arguments}
        return f"{self.platform}-{content_hash({**self.files, **arguments})}"

    @property
    def reference(self) -> str:
        """Returns the image's name on the machine that builds it."""
        return f"localhost/{NAME}:{self.tag}"

    @property
    def layers(self) -> dict[str, str]:
        """Returns a hash per layer. Each hash also covers all layers below."""
        given, found, under = dict(self.arguments), {}, self.files[DOCKERFILE]
        for name, (files, arguments) in PARTS.items():
            parts = {file: self.files[file] for file in files} | {
                key: given.get(key, "").encode() for key in arguments
            }
            found[name] = content_hash({**parts, "under": under})[:8]
            under = found[name].encode()
        return found | {"code": content_hash({**self.files, "under": under})[:8]}

    def rebuilt(self, other: str) -> list[str]:
        """Returns the layers that differ from those of an image with this LAYERS label."""
        theirs = dict(part.partition("=")[::2] for part in other.split())
        return [name for name, made in self.layers.items() if theirs.get(name) != made]


def recipe_of(platform: PinnedPlatform, base: str, files: Mapping[str, bytes]) -> ImageRecipe:
    """Returns the recipe for a platform's image. `base` overrides the platform's base image."""
    given = {name: value for name, value in _arguments(platform, base) if value}
    return ImageRecipe(platform.name, lock_name(platform), tuple(given.items()), files)


def _arguments(platform: PinnedPlatform, base: str) -> Iterator[tuple[str, str]]:
    packages = [f"{name}={version}" for name, version in platform.neuron_packages if name != DRIVER]
    _, index, other, *pins = environment_words(platform, "")
    yield "BASE_IMAGE", base or platform.base
    yield "PLATFORM", platform.name
    if platform.efa:
        yield from (
            ("EFA_VERSION", platform.efa),
            ("EFA_KEY", platform.key("efa")),
            ("OFI_NCCL_VERSION", platform.ofi_nccl),
        )
    if packages:
        yield from (("NEURON_KEY", platform.key("neuron")), ("NEURON_PACKAGES", " ".join(packages)))
    yield from (("TORCH_INDEX", index), ("OTHER_INDEX", other), ("PYTHON_PACKAGES", " ".join(pins)))


def write_context(recipe: ImageRecipe, folder: Path) -> None:
    """Writes only the image's files to `folder`, with fixed timestamps so that build caches stay
    valid.

    The tag is written to a file because buildah's cache compares Dockerfile lines without their
    arguments. Otherwise, an image with the same code but a different base or user would reuse an
    earlier image's labels and USER.
    """
    for name, content in {**recipe.files, TAG: f"{recipe.tag}\n".encode()}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if content.startswith(b"#!") else 0o644)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (0, 0))
