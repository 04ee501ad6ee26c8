"""Manages the image repository in ECR: image scans, immutable tags, lifecycle rules, and pushes
that never overwrite images. Also pulls a job's image on hosts.

A failed push leaves no tag, because ECR stores layers before the manifest that refers to them.
Source: https://docs.aws.amazon.com/AmazonECR/latest/userguide/.
"""

from __future__ import annotations

import base64
import binascii
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cloud.calls import Calls, passing
from ..cloud.repository import GONE, HOST, NAME, held_as, holders
from ..cloud.template_inputs import pairs
from ..config.tables import read_table
from ..hosts.host_results import Host, by_host
from ..hosts.transport import Transport
from ..trust.errors import BackendError, CloudError, ImageError, InputError
from ..trust.untrusted_input import parse_json
from .builders import ARCHITECTURE, Builder, FoundImage, ImageRecipe, last_line
from .building import PUSHES, Say, run_builder

MANIFESTS = [
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
]

CONFIG = 1 << 20  # maximum size of an image's configuration, in bytes
SECONDS = 30
POLICY = read_table(Path(__file__).with_name("lifecycle.yaml"))
KEPT_IMAGES = POLICY["rules"][-1]["selection"]["countNumber"]


class Registry:
    """The repository of trainfleet images in an AWS account and region."""

    def __init__(self, calls: Calls, account: str, repository: str = NAME) -> None:
        self.calls, self.account, self.repository = calls, account, repository
        suffix = ".cn" if calls.region.startswith("cn-") else ""
        self.host = f"{account}.dkr.ecr.{calls.region}.amazonaws.com{suffix}"

    @classmethod
    def of(cls, reference: str) -> Registry | None:
        """Returns the registry in an image name, or None if the image is not in ECR."""
        host, _, rest = reference.partition("/")
        match = HOST.fullmatch(host)
        if match and rest:
            return cls(Calls(match[2]), match[1], rest.partition("@")[0].partition(":")[0])
        return None

    def name(self, tag: str) -> str:
        return f"{self.host}/{self.repository}:{tag}"

    def find(self, tag: str) -> FoundImage | None:
        """Returns the image with this tag or digest (`sha256:...`), or None if it does not exist.

        Raises:
            CloudError: the registry can't be queried.
            ImageError: the manifest does not describe a single-architecture image.
        """
        identity = {"imageDigest": tag} if tag.startswith("sha256:") else {"imageTag": tag}
        images: list[Any] = []
        with passing(GONE):
            images = (
                self.calls(
                    "ecr",
                    "BatchGetImage",
                    registryId=self.account,
                    repositoryName=self.repository,
                    imageIds=[identity],
                    acceptedMediaTypes=MANIFESTS,
                ).get("images")
                or []
            )
        return self._stored(str(images[0].get("imageManifest", "")), tag) if images else None

    def holder(self, image: str, owner: str = "") -> str | None:
        """Returns the tag by which a config uses this image, preferring the config `owner`. Returns
        None if no config uses the image.
        """
        held = {tag for tag, _ in holders(self.calls) if tag.partition(".")[2] == image}
        mine = held_as(owner, image)
        return mine if mine in held else min(held, default=None)

    def _share(self, theirs: str, mine: str) -> None:
        """Adds a tag to an image, so that it is kept even after other configs release it."""
        answer = self.calls(
            "ecr",
            "BatchGetImage",
            registryId=self.account,
            repositoryName=self.repository,
            imageIds=[{"imageTag": theirs}],
            acceptedMediaTypes=MANIFESTS,
        )
        for image in answer.get("images", ()):
            manifest = {key: image[key] for key in ("imageManifest", "imageManifestMediaType")}
            with passing("ImageAlreadyExistsException", "ImageTagAlreadyExistsException"):
                self.calls(
                    "ecr", "PutImage", repositoryName=self.repository, imageTag=mine, **manifest
                )

    def _stored(self, text: str, tag: str) -> FoundImage:
        try:
            manifest: Any = parse_json(text, self.name(tag))
            digest = str(manifest["config"]["digest"])
            size = sum(int(layer["size"]) for layer in manifest["layers"])
            address = self.calls(
                "ecr",
                "GetDownloadUrlForLayer",
                registryId=self.account,
                repositoryName=self.repository,
                layerDigest=digest,
            )["downloadUrl"]
            config: Any = parse_json(_download(address), self.name(tag))
            labels = {
                str(name): str(value)
                for name, value in ((config.get("config") or {}).get("Labels") or {}).items()
            }
            return FoundImage(labels, str(config.get("architecture", "")), (size,))
        except (InputError, KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ImageError(
                "is not a readable image",
                where=self.name(tag),
                why=why,
                next="run make push, or set another fleet.container",
            ) from error

    def provide(self, say: Say, tags: Mapping[str, str]) -> None:
        """Creates the repository if it is missing, with image scans, immutable tags and lifecycle
        rules.

        Raises:
            CloudError: AWS refused a request.
            ImageError: the repository exists with mutable tags.
        """
        try:
            described = self.calls(
                "ecr",
                "DescribeRepositories",
                registryId=self.account,
                repositoryNames=[self.repository],
            )
        except CloudError as error:
            if error.code != GONE:
                raise
            self._create(tags)
            say(
                f"created the repository {self.host}/{self.repository}: scans images, immutable "
                f"tags, keeps {KEPT_IMAGES} images"
            )
            return
        if (found := described["repositories"][0]).get("imageTagMutability") != "IMMUTABLE":
            why = "its tags can be overwritten, but a tag must identify one image"
            options = (
                f"--repository-name {self.repository} --image-tag-mutability IMMUTABLE "
                f"--region {self.calls.region}"
            )
            where = str(found.get("repositoryUri", self.repository))
            raise ImageError(
                "has mutable tags, which make push does not support",
                where=where,
                why=why,
                next=f"aws ecr put-image-tag-mutability {options}",
            )

    def _create(self, tags: Mapping[str, str]) -> None:
        with passing("RepositoryAlreadyExistsException"):  # another push has just created it
            self.calls(
                "ecr",
                "CreateRepository",
                repositoryName=self.repository,
                imageTagMutability="IMMUTABLE",
                imageScanningConfiguration={"scanOnPush": True},
                encryptionConfiguration={"encryptionType": "AES256"},
                tags=pairs(tags),
            )
        self.calls(
            "ecr",
            "PutLifecyclePolicy",
            registryId=self.account,
            repositoryName=self.repository,
            lifecyclePolicyText=json.dumps(POLICY),
        )

    def token(self) -> tuple[str, str]:
        """Returns a user name and a password that is valid for twelve hours. Callers must not
        display them.

        Raises CloudError if AWS refuses the request, and ImageError if the token is invalid.
        """
        granted = self.calls("ecr", "GetAuthorizationToken")["authorizationData"][0]
        try:
            user, _, password = (
                base64.b64decode(granted["authorizationToken"]).decode().partition(":")
            )
        except (binascii.Error, ValueError, KeyError) as error:
            raise ImageError(
                "AWS returned an invalid token", where=self.host, next="run the command again"
            ) from error
        return user, password

    def push(
        self, recipe: ImageRecipe, builder: Builder, say: Say, tags: Mapping[str, str], owner: str
    ) -> str:
        """Pushes a recipe's image, unless a config already uses it. Returns the image's name for
        the config `owner`.

        Raises:
            CloudError, ImageError: the push failed, and created no tag.
        """
        mine = held_as(owner, recipe.tag)
        target = self.name(mine)
        self.provide(say, tags)
        if theirs := self.holder(recipe.tag, owner):
            if stored := self.find(theirs):
                require_content(stored, recipe, self.name(theirs))
            if theirs != mine:
                self._share(theirs, mine)
        if stored := self.find(mine):
            require_content(stored, recipe, target)
            others = theirs and theirs != mine
            shared = f", shared with {str(theirs).partition('.')[0]}" if others else ""
            say(f"{target} exists: {stored.size / 1e6:,.0f} MB{shared}")
            return target
        self._send(recipe, builder, target)
        if not (stored := self.find(mine)):
            raise ImageError(
                "was pushed, but the registry does not have it",
                where=target,
                next="run make push again",
            )
        say(f"pushed {target}: {stored.size / 1e6:,.0f} MB")
        return target

    def _send(self, recipe: ImageRecipe, builder: Builder, target: str) -> None:
        user, password = self.token()
        said = builder.login(self.host, user, password)
        if said.returncode:
            raise ImageError(
                "the registry refused the login",
                where=self.host,
                why=last_line(said.stderr),
                next="allow ecr:GetAuthorizationToken, then try aws ecr describe-repositories",
            )
        for words in builder.push(recipe.reference, target):
            run_builder(builder, words, f"can't push {target}", PUSHES)


def _download(address: str) -> str:
    """Returns the text at a presigned ECR URL. Raises OSError if the download fails."""
    from urllib.request import urlopen  # only needed to read an image

    with urlopen(address, timeout=SECONDS) as stream:
        return str(stream.read(CONFIG).decode())


def require_content(stored: FoundImage, recipe: ImageRecipe, where: str) -> None:
    """Raises ImageError if a tagged image does not match its recipe, because a push can't replace
    an immutable tag.
    """
    if (said := stored.labels.get("org.opencontainers.image.version")) != recipe.tag:
        why = f"the tag in its label is {said or 'missing'}; it was pushed by hand"
        tag = where.rpartition(":")[2]
        raise ImageError(
            "has this tag, but different content",
            where=where,
            why=why,
            next=f"remove it: aws ecr batch-delete-image --repository-name {NAME} --image-ids "
            f"imageTag={tag}",
        )


PULL_TIMEOUT = 1800.0  # in seconds; long, because CUDA images are several GB in size
LABELS = """{{.Architecture}} {{index .Config.Labels "trainfleet.lock"}}"""
LOOK = f"docker image inspect --format '{LABELS}'"
NOBODY = ("", "<no value>")  # lock labels of images that trainfleet did not build


def pull(transport: Transport, hosts: Sequence[Host], image: str, lock: str) -> None:
    """Pulls the image on every host that does not have it.

    The ECR token is passed through stdin, which keeps it off command lines and out of permanent
    files.

    Raises:
        BackendError: a host can't pull the image, or the image does not match the config's
            platform. The message lists all problems by host.
    """
    registry = Registry.of(image)
    _, token = registry.token() if registry else ("", "")
    words = pull_words(image, registry.host if registry else "")
    answers = transport.run(words, stdin=token, timeout=PULL_TIMEOUT, hosts=hosts)
    answers.require(
        f"{image} can't be pulled",
        then="run docker pull on the host for details; if Docker is missing, set "
        "fleet.install_docker: true and run make setup",
    )
    said = {host: answer.stdout.strip().rpartition("\n")[2] for host, answer in answers.ok.items()}
    wrong = {host: against for host, found in said.items() if (against := misfit(found, lock))}
    if wrong:
        raise BackendError(
            by_host(f"{image} does not match the hosts or the config", wrong),
            next="set fleet.container: build, then run make push",
        )


def pull_words(image: str, registry: str) -> str:
    """Returns a shell command that inspects the image, pulling it first if it is missing."""
    look = f"{LOOK} {shlex.quote(image)}"
    fetch = f"docker pull --quiet {shlex.quote(image)} > /dev/null"
    if registry:
        own = (
            "DOCKER_CONFIG=$(mktemp -d) && export DOCKER_CONFIG && trap 'rm -rf "
            '"$DOCKER_CONFIG"\' EXIT'
        )
        fetch = (
            f"{own} && docker login --username AWS --password-stdin {shlex.quote(registry)} > "
            f"/dev/null && {fetch}"
        )
    return f"{look} 2> /dev/null || {{ {fetch} && {look}; }}"


def misfit(words: str, lock: str) -> str:
    """Returns why an image with this architecture and lock label can't be used, or "" if it can."""
    architecture, _, theirs = words.partition(" ")
    if architecture != ARCHITECTURE:
        return (
            f"it is built for {architecture or 'an unknown architecture'}, but the hosts are "
            f"{ARCHITECTURE}"
        )
    if theirs not in (*NOBODY, lock):
        return f"its versions are {theirs}, but the config's platform has {lock}"
    return ""
