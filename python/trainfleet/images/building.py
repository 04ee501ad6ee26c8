"""Implements `make build`: builds a recipe's image if it is missing, and explains builder
failures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..config.tables import read_table
from ..process.install_paths import ROOT
from ..process.processes import die_with_parent
from ..trust.errors import ImageError
from ..trust.redaction import keep_secret
from ..trust.safe_output import show_at_once, shown
from .builders import ARCHITECTURE, LAYERS, PARTS, Builder, FoundImage, ImageRecipe, write_context

KEPT = 40  # final output lines that are searched for the cause of a failure
SHOWN, MOST = 6, 600  # maximum lines in a message, and characters per line
# Maps each pip option to its secret in docker/Dockerfile and the secret's path during the build.
CERTIFICATES = {
    "cert": ("ca", "/etc/ssl/certs/ca-certificates.crt"),
    "client-cert": ("client", "/run/secrets/client"),
}
ADDRESSES = ("index-url", "extra-index-url", "find-links")
PASSWORD = "TRAINFLEET_PIP_PASSWORD"
Say = Callable[[str], None]
# buildah and podman print steps as "[8/8] STEP 7/23: RUN ...", docker as "#9 [image 7/23] RUN ...".
STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP (\d+/\d+): (.+)|#\d+ \[(?:[\w-]+ )?(\d+/\d+)\] (.+)")
CACHED = re.compile(r"--> Using cache|#\d+ CACHED")
NOISE = re.compile(
    r"--> [0-9a-f]+$|#\d+ (?:DONE|\[internal\]|\[auth\]|resolve |transferring "
    r"|sha256:|extracting |exporting |naming |writing )"
    r"|(?:\[\d+/\d+\] )?COMMIT |Successfully tagged |[0-9a-f]{64}$|#\d+$|$"
)
# instructions that may take long; all others only change the image's configuration
AT_WORK = re.compile(r"FROM (?![0-9a-f]{64})|COPY|RUN")
WIDTH = 66  # maximum characters shown per instruction
NEWLINE = "\n"
LONG = 1.0  # shortest step duration that is displayed, in seconds


@dataclass(frozen=True)
class Trouble:
    """A known failure pattern in a builder's output, with its cause and a suggested command.

    If `in_steps` is false, the pattern is ignored when a step failed, because steps may contact
    hosts other than the registry.
    """

    says: str
    why: str
    next: str
    in_steps: bool = True


# buildah, docker and podman messages for a failed step
IN_STEP = re.compile(r"building at STEP|did not complete successfully|while running runtime")
TROUBLES, PUSHES = (
    tuple(Trouble(**row) for row in rows)
    for rows in read_table(Path(__file__).with_name("troubles.yaml")).values()
)


def build(recipe: ImageRecipe, builder: Builder, commit: str, say: Say) -> FoundImage:
    """Returns the local image `recipe.reference`, after building it if it is missing.

    Raises:
        ImageError: the build failed. No image with this name exists afterwards.
    """
    if found := builder.find(recipe.reference):
        say(f"{recipe.reference} exists: {describe(found)}")
        return require(found, recipe)
    newest = newest_of(recipe, builder)
    rebuilt = recipe.rebuilt(newest[1]) if newest else list(recipe.layers)
    reused = f"; other layers reused from {newest[0]}" if newest else ""
    say(f"layers to rebuild: {', '.join(rebuilt)}{reused * (len(rebuilt) < len(recipe.layers))}")
    _run_build(recipe, builder, commit, say)
    found = builder.find(recipe.reference)
    if found is None:
        raise ImageError(
            f"{builder.name} did not build {recipe.reference}", next=f"{builder.name} images"
        )
    try:
        require(found, recipe)
    except ImageError:
        builder.run("rmi", recipe.reference)
        raise
    say(f"built {recipe.reference}: {describe(found)}")
    return found


def _run_build(recipe: ImageRecipe, builder: Builder, commit: str, say: Say) -> None:
    layers = " ".join(f"{name}={made}" for name, made in recipe.layers.items())
    # buildah warns about missing arguments
    unset = {name: "" for _, names in PARTS.values() for name in names}
    own = {"TAG": recipe.tag, "LOCK": recipe.lock, "COMMIT": commit, "LAYERS": layers}
    with (
        tempfile.TemporaryDirectory(prefix="trainfleet-image-") as folder,
        secrets_in(Path(folder), say) as secrets,
    ):
        context = Path(folder) / "context"
        write_context(recipe, context)
        arguments = unset | dict(recipe.arguments) | own
        words = builder.build(recipe.reference, arguments, secrets, str(context))
        run_builder(builder, words, "can't build the image", TROUBLES, recipe.base)


def require(found: FoundImage, recipe: ImageRecipe) -> FoundImage:
    """Returns the image. Raises ImageError if its tag or processor architecture does not match the
    recipe's.
    """
    if found.architecture != ARCHITECTURE:
        why = (
            f"it is for {found.architecture or 'an unknown processor'}, but the fleet's "
            f"instances are {ARCHITECTURE}"
        )
        then = "build on x86_64, or set fleet.container_base to an image for linux/amd64"
        raise ImageError("is for another processor", where=recipe.reference, why=why, next=then)
    if (said := found.labels.get("org.opencontainers.image.version", "missing")) != recipe.tag:
        why, then = f"the tag in its label is {said}", "remove that image, then run make build"
        raise ImageError(
            "has this tag, but different content", where=recipe.reference, why=why, next=then
        )
    return found


def newest_of(recipe: ImageRecipe, builder: Builder) -> tuple[str, str] | None:
    """Returns the name and the LAYERS label of the newest local image for the recipe's platform, or
    None if no local image has that label.
    """
    for name in builder.names(f"trainfleet.platform={recipe.platform}"):
        found = builder.find(name)
        if found and (label := found.labels.get(LAYERS)):
            return name, label
    return None


def describe(found: FoundImage) -> str:
    """Describes an image by its size, layer count and code layer size."""
    last = f"; the last one is {found.layers[-1] / 1e6:,.1f} MB" if found.layers else ""
    return f"{found.size / 1e6:,.0f} MB in {len(found.layers)} layers{last}"


def run_builder(
    builder: Builder, words: Sequence[str], what: str, troubles: Sequence[Trouble], base: str = ""
) -> None:
    """Runs a builder command and shows its output. If the command fails, raises an ImageError with
    the cause and the last lines of output.
    """
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    )
    last, steps = deque[str](maxlen=KEPT), BuildSteps(builder.name)
    assert process.stdout is not None
    for line in map(str.rstrip, process.stdout):
        last.append(line)
        steps.take(line)
    steps.end()
    if process.wait():
        raise explained(builder, list(last), what, troubles, base)


def explained(
    builder: Builder, lines: list[str], what: str, troubles: Sequence[Trouble], base: str
) -> ImageError:
    """Returns an error that explains a failure from the builder's output."""
    said = [
        f"{line[:MOST]} ..." if len(line) > MOST else line
        for line in lines
        if not NOISE.match(line.strip())
    ][-SHOWN:]
    text = "\n".join(lines)
    for trouble in troubles:
        if re.search(trouble.says, text, re.IGNORECASE) and (
            trouble.in_steps or not IN_STEP.search(text)
        ):
            why, then = (
                text.format(builder=builder.name, base=base) for text in (trouble.why, trouble.next)
            )
            return ImageError(what, where=builder.name, why="\n    ".join([why, *said]), next=then)
    return ImageError(
        what,
        where=builder.name,
        why="\n    ".join(said) or "no output",
        next="read its output above",
    )


@contextmanager
def secrets_in(folder: Path, say: Say) -> Iterator[dict[str, str]]:
    """Yields the secret files for a build: a pip.conf with package sources, and certificates."""
    settings = package_sources(say)
    found = {}
    for name, (secret, target) in CERTIFICATES.items():
        if name in settings:
            found[secret], settings[name] = settings[name], target
    hide_passwords(settings)
    file = folder / "pip.conf"
    file.touch(mode=0o600)
    file.write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    )
    try:
        yield found | {"pip": str(file)}
    finally:
        file.unlink(missing_ok=True)


def package_sources(say: Say) -> dict[str, str]:
    """Returns the pip options for the package sources that a build can reach. Prints the names of
    ignored options.

    Raises:
        ImageError: the configuration can't be read, names a missing certificate, or leaves no
            reachable source.
    """
    script = str(ROOT / "scripts" / "pip_sources.py")
    found = json.loads(
        subprocess.run(
            [sys.executable, script, "show"], capture_output=True, text=True, check=True
        ).stdout
    )
    if refused := found.get("refused"):
        raise ImageError(
            refused["what"], where=refused["where"], why=refused["why"], next=refused["next"]
        )
    if found["unused"]:
        say(
            "pip options ignored, because the lock pins each file: "
            f"{', '.join(sorted(found['unused']))}"
        )
    values: dict[str, str] = {
        name: value for name, value in found["values"].items() if name not in ADDRESSES
    }
    values |= {
        name: kept
        for name in ADDRESSES
        if (kept := reachable(name, found["values"].get(name, ""), say))
    }
    if (
        values.get("no-index", "").lower() in ("1", "true", "yes", "on")
        and "find-links" not in values
    ):
        raise ImageError(
            "pip's no-index is set, and the build can't reach any other package source",
            where=found["places"]["no-index"],
            next="serve the folder of wheels over HTTP, and set find-links to its address",
        )
    return values


def reachable(name: str, addresses: str, say: Say) -> str:
    """Returns an option's addresses without local folders, and prints the folders it drops."""
    local = [word for word in addresses.split() if "://" not in word or word.startswith("file:")]
    if local:
        say(f"{name} {', '.join(local)} is ignored: the build can't reach folders on this machine")
    return " ".join(word for word in addresses.split() if word not in local)


def hide_passwords(settings: Mapping[str, str]) -> None:
    """Registers the passwords in these addresses for redaction in all output of this process."""
    addresses = [word for value in settings.values() for word in value.split() if "://" in word]
    passwords = [found for address in addresses if (found := urlsplit(address).password)]
    for number, password in enumerate(passwords):
        os.environ[f"{PASSWORD}_{number}"] = password
    keep_secret(f"{PASSWORD}_{number}" for number in range(len(passwords)))


def commit_of(root: Path = ROOT) -> str:
    """Returns this checkout's commit, followed by + if there are uncommitted changes, or
    `unknown`.
    """
    said = [
        subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    ]
    if said[0].returncode == 0:
        return said[0].stdout.strip() + ("+" if said[1].stdout.strip() else "")
    return "unknown"


class BuildSteps:
    """Prints a builder's output. A running step's line stays open until the step prints something
    or ends.
    """

    def __init__(self, builder: str) -> None:
        self.builder, self.runs, self.open, self.began = builder, False, False, 0.0

    def take(self, text: str) -> None:
        """Processes a line of the builder's output."""
        if match := STEP.match(text):
            self.end()
            number, instruction = (part for part in match.groups() if part)
            if AT_WORK.match(instruction):
                show_at_once(f"  {number:>5} {short(shown(instruction))}")
                self.runs, self.open, self.began = True, True, time.monotonic()
        elif CACHED.match(text):
            self.end("(cached)")
        elif not NOISE.match(text):
            print(f"{NEWLINE if self.open else ''}  {self.builder} | {shown(text)}")
            self.open = False

    def end(self, how: str = "") -> None:
        """Ends the running step's line with `how`, or else with the step's duration."""
        seconds = time.monotonic() - self.began
        outcome = how or (f"{seconds:.0f} s" if seconds > LONG else "")
        if self.runs and (self.open or outcome):
            print(f"  {outcome}".rstrip() if self.open else f"{'':8}{outcome}")
        self.runs = self.open = False


def short(text: str) -> str:
    """Returns an instruction as one line, shortened and without mount options."""
    text = re.sub(r" --mount=\S+", "", " ".join(text.split()))
    return text if len(text) < WIDTH else f"{text[: WIDTH - 4]} ..."
