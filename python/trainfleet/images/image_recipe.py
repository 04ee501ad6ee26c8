"""What an image is made of. Pure but for reading this checkout: the same checkout and stack make
the same tag everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..hosts.install_steps import environment_words, lock_name
from ..hosts.pins import DRIVER
from ..hosts.stack import PinnedStack
from ..hosts.tar import LOCKS, content_hash

DOCKERFILE = "docker/Dockerfile"
NAME = "trainfleet"
TAG = "image-tag"  # a file beside the code: the tag of the image that it is in
LAYERS = f"{NAME}.layers"  # a label: what each layer was made from
ARCHITECTURE = "amd64"  # of every instance type in the table (hardware/node_types.py)
# What each layer is made of, the rarest change first: files of the checkout, and arguments of the
# Dockerfile. Code is all files.
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
    """One image. `arguments` are the Dockerfile's; `files` its context, by their path; `lock` names
    the pinned versions.
    """

    stack: str
    lock: str
    arguments: tuple[tuple[str, str], ...]
    files: Mapping[str, bytes]

    @property
    def base(self) -> str:
        return dict(self.arguments)["BASE_IMAGE"]

    @property
    def tag(self) -> str:
        """Changes with any byte that goes in, but for who runs it and the commit."""
        arguments = {f"--{name}": value.encode() for name, value in self.arguments}
        return f"{self.stack}-{content_hash({**self.files, **arguments})}"

    @property
    def reference(self) -> str:
        """The image's name on the machine that built it."""
        return f"localhost/{NAME}:{self.tag}"

    @property
    def layers(self) -> dict[str, str]:
        """What each layer is made from, as a hash with all that lies under it."""
        given, found, under = dict(self.arguments), {}, self.files[DOCKERFILE]
        for name, (files, arguments) in PARTS.items():
            parts = {file: self.files[file] for file in files} | {
                key: given.get(key, "").encode() for key in arguments
            }
            found[name] = content_hash({**parts, "under": under})[:8]
            under = found[name].encode()
        return found | {"code": content_hash({**self.files, "under": under})[:8]}

    def rebuilt(self, other: str) -> list[str]:
        """The layers that are not those of an image with this label."""
        theirs = dict(part.partition("=")[::2] for part in other.split())
        return [name for name, made in self.layers.items() if theirs.get(name) != made]


def recipe_of(stack: PinnedStack, base: str, files: Mapping[str, bytes]) -> ImageRecipe:
    """Returns the recipe of a stack's image. `base`: another image than the stack's to begin
    from.
    """
    given = {name: value for name, value in _arguments(stack, base) if value}
    return ImageRecipe(stack.name, lock_name(stack), tuple(given.items()), files)


def _arguments(stack: PinnedStack, base: str) -> Iterator[tuple[str, str]]:
    packages = [f"{name}={version}" for name, version in stack.neuron_packages if name != DRIVER]
    _, index, other, *pins = environment_words(stack, "")
    yield "BASE_IMAGE", base or stack.base
    yield "STACK", stack.name
    if stack.efa:
        yield from (
            ("EFA_VERSION", stack.efa),
            ("EFA_KEY", stack.key("efa")),
            ("OFI_NCCL_VERSION", stack.ofi_nccl),
        )
    if packages:
        yield from (("NEURON_KEY", stack.key("neuron")), ("NEURON_PACKAGES", " ".join(packages)))
    yield from (("TORCH_INDEX", index), ("OTHER_INDEX", other), ("PYTHON_PACKAGES", " ".join(pins)))


def write_context(recipe: ImageRecipe, folder: Path) -> None:
    """Leaves the files that the image is made from in `folder`: those alone, with no times of the
    day, so that caches hold.

    The tag is one of them, as buildah's cache knows a step by its line and not by the arguments in
    it: with the same code and another base or user, it would take the labels and the USER of the
    image before.
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
