"""Defines an image's content. The same checkout and platform produce the same tag on every
machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..hosts.install_steps import environment_words, lock_name
from ..hosts.pins import DRIVER
from ..hosts.platform import PinnedPlatform
from ..hosts.tar import LOCKS, content_hash

DOCKERFILE = "docker/Dockerfile"
NAME = "trainfleet"
TAG = "image-tag"  # file with the image's tag, next to the code
LAYERS = f"{NAME}.layers"  # label with a hash of each layer
ARCHITECTURE = "amd64"  # processor architecture of all instance types (hardware/node_types.py)
# Inputs of each layer: files in the checkout and Dockerfile arguments. Layers are ordered from
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
    """Inputs of an image.

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
        """Returns a hash per layer that also covers all layers below it."""
        given, found, under = dict(self.arguments), {}, self.files[DOCKERFILE]
        for name, (files, arguments) in PARTS.items():
            parts = {file: self.files[file] for file in files} | {
                key: given.get(key, "").encode() for key in arguments
            }
            found[name] = content_hash({**parts, "under": under})[:8]
            under = found[name].encode()
        return found | {"code": content_hash({**self.files, "under": under})[:8]}

    def rebuilt(self, other: str) -> list[str]:
        """Returns the layers that differ from those of an image with this label."""
        theirs = dict(part.partition("=")[::2] for part in other.split())
        return [name for name, made in self.layers.items() if theirs.get(name) != made]


def recipe_of(platform: PinnedPlatform, base: str, files: Mapping[str, bytes]) -> ImageRecipe:
    """Returns the recipe of a platform's image. `base`, if set, replaces the platform's base
    image.
    """
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
    """Writes only the image's files to `folder`, with fixed timestamps so that build caches remain
    valid.

    One of the files contains the tag, because buildah's cache compares Dockerfile lines without
    their arguments. Otherwise, an image with the same code but another base or user would get an
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
