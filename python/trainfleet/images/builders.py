"""Selects docker, podman or buildah, and provides the commands that build, inspect and push
images.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..trust import untrusted_input
from ..trust.errors import ImageError
from ..trust.safe_output import visible
from .image_recipe import ARCHITECTURE, DOCKERFILE

ANSWER = 60.0  # query timeout in seconds
NATIVE = ("x86_64", "AMD64")  # machines that build amd64 images without --platform


@dataclass(frozen=True)
class LocalImage:
    """Image on this machine, with its labels, processor architecture and layer sizes in bytes, base
    layer first.
    """

    labels: Mapping[str, str]
    architecture: str
    layers: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.layers)


@dataclass(frozen=True)
class Builder:
    """Command-line program that builds images.

    docker and podman share most arguments, but buildah inspects images with different ones.
    """

    name: str

    def works(self) -> str:
        """Returns why the program can't be used here, or "" if it works."""
        if shutil.which(self.name) is None:
            return "is not installed"
        said = self.run("version" if self.name == "buildah" else "info")
        return (
            ""
            if said.returncode == 0
            else f"does not work: {last_line(said.stderr or said.stdout)}"
        )

    def build(
        self, reference: str, arguments: Mapping[str, str], secrets: Mapping[str, str], context: str
    ) -> list[str]:
        """Returns the command that builds the image from the folder `context`.

        Secrets are passed as files, never on the command line. The command does not use `--label`,
        which breaks the cache of buildah 1.28: buildah would commit stages without steps again, and
        miss its cache for later stages (imagebuildah/stage_executor.go). Instead, the Dockerfile
        sets the labels from its arguments.
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

    def find(self, reference: str) -> LocalImage | None:
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
        of raising an error.
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
    """Returns the first builder that works here, and why earlier ones do not. Raises ImageError if
    no builder works here.
    """
    refused: list[str] = []
    for builder in BUILDERS:
        if not (why := builder.works()):
            return builder, "; ".join(refused)
        refused.append(f"{builder.name} {why}")
    then = "apt-get install buildah, or start the Docker daemon: systemctl start docker"
    raise ImageError("this machine has no working image builder", why="; ".join(refused), next=then)


def _of_buildah(text: str) -> LocalImage | None:
    record = _record(text)
    image, manifest = record.get("OCIv1") or {}, _record(str(record.get("Manifest") or "{}"))
    labels, layers = (image.get("config") or {}).get("Labels") or {}, manifest.get("layers") or ()
    return LocalImage(
        labels,
        str(image.get("architecture", "")),
        tuple(int(layer.get("size", 0)) for layer in layers),
    )


def _of_docker(text: str, history: str) -> LocalImage | None:
    record = _record(text)
    labels = (record.get("Config") or {}).get("Labels") or {}
    sizes = [size for line in history.split() if (size := untrusted_input.whole(line))]
    return LocalImage(labels, str(record.get("Architecture", "")), tuple(reversed(sizes)))


def _record(text: str) -> dict[str, Any]:
    """Returns the JSON object that a program printed, or the first one in a list. Returns {} for
    other output.
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
