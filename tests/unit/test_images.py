"""Images: what one is made of, which builder makes it, and what is told when it can't be made, pushed or used.

Fakes on PATH stand for builders here, and a fake account for ECR, whose every request is checked against AWS's models. A real build
is in tests/images.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError

from trainfleet.cloud import calls
from trainfleet.cloud.calls import Calls
from trainfleet.cloud.repository import HOST
from trainfleet.config import Config, Settings, load
from trainfleet.hosts.install_steps import lock_name
from trainfleet.hosts.platform import load_platform
from trainfleet.hosts.tar import code_files
from trainfleet.images import builders, building
from trainfleet.images.builders import (
    DOCKERFILE,
    PARTS,
    TAG,
    Builder,
    choose,
    recipe_of,
    write_context,
)
from trainfleet.images.building import BuildSteps
from trainfleet.images.ecr import MANIFESTS, Registry
from trainfleet.launch import job_image
from trainfleet.trust.errors import CloudError, ConfigError, ImageError

ROOT = Path(__file__).parents[2]
LOCK = yaml.safe_load((ROOT / "docker" / "platforms.lock.yaml").read_text())
PLATFORMS = tuple(LOCK["platforms"])
TEXT = (ROOT / DOCKERFILE).read_text()
ACCOUNT, REGION = "123456789012", "us-east-1"


def recipe(platform: str = "cpu", base: str = "", **files: str) -> Any:
    changed = {name.replace("__", "/"): text.encode() for name, text in files.items()}
    return recipe_of(load_platform(platform), base, {**code_files(""), **changed})


def config(tmp_path: Path, **fleet: Any) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "fleet": fleet}))
    return load(Settings(path))[0]


# What an image is made of


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_argument_of_a_platform_is_the_lock_s(platform: str) -> None:
    """Each version that goes into an image stands in the lock, with its source and date."""
    given = dict(recipe(platform).arguments)
    entry = json.dumps(LOCK["platforms"][platform], default=str) + json.dumps(
        LOCK["keys"], default=str
    )
    words = [word.partition("=")[2].lstrip("=").removeprefix("sha256:") if "=" in word else word
             for name, value in given.items() if name != "PLATFORM" for word in value.split()]  # fmt: skip
    assert words and all(word == "-" or word in entry for word in words), words
    assert re.fullmatch(r".+@sha256:[0-9a-f]{64}", given["BASE_IMAGE"])
    for name, value in LOCK["platforms"][platform].items():
        assert not isinstance(value, dict) or {"version", "source", "date"} <= value.keys(), name


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_dockerfile_takes_every_argument_and_has_a_stage_for_every_platform(
    platform: str,
) -> None:
    asked = set(re.findall(r"^ARG (\w+)", TEXT, re.MULTILINE))
    assert {name for name, _ in recipe(platform).arguments} | {
        "TAG",
        "LOCK",
        "COMMIT",
        "LAYERS",
        "RUN_AS",
    } <= asked
    assert re.search(rf"^FROM [\w${{}}-]+ AS {platform}$", TEXT, re.MULTILINE)


def test_the_driver_is_the_host_s() -> None:
    assert "dkms" not in dict(recipe("neuron").arguments)["NEURON_PACKAGES"]


def test_what_changes_rarely_comes_first_and_the_code_last() -> None:
    order = [TEXT.index(part) for part in ("build_tools.sh apply", "efa.sh apply", "ofi_nccl.sh apply", "neuron.sh apply",
                                           "python.sh apply", "sbom.py >", "COPY . /opt/trainfleet/", "USER ")]  # fmt: skip
    assert order == sorted(order)
    copied = {
        file
        for line in re.findall(r"^COPY (.+) /build/", TEXT, re.MULTILINE)
        for file in line.split()
    }
    assert copied == {file for files, _ in PARTS.values() for file in files}, (
        "what a layer is made from is what it copies"
    )
    assert not re.search(r"^RUN", TEXT[TEXT.index("COPY . ") :], re.MULTILINE), (
        "nothing is run, so nothing is rebuilt, behind the code"
    )


def test_nothing_of_a_secret_is_an_argument_or_lasts() -> None:
    assert not re.search(r"(?i)^(ARG|ENV).*(token|password|secret|key_id)", TEXT, re.MULTILINE)
    assert "COPY pip.conf" not in TEXT and TEXT.count("--mount=type=secret,id=pip") == 1


@pytest.mark.parametrize(
    ("changed", "rebuilt"),
    [
        ({"python__trainfleet__node__placement.py": "x"}, ["code"]),
        ({"scripts__sshd.sh": "x"}, ["code"]),
        ({"requirements.lock": "x"}, ["python", "code"]),
        ({"scripts__efa.sh": "x"}, ["fabric", "python", "code"]),
        ({"docker__Dockerfile": "FROM x"}, ["system", "fabric", "python", "code"]),
        ({}, []),
    ],
)
def test_a_change_rebuilds_its_layer_and_what_lies_on_it(
    changed: dict[str, str], rebuilt: list[str]
) -> None:
    before, after = recipe(), recipe(**changed)
    label = " ".join(f"{name}={made}" for name, made in before.layers.items())
    assert after.rebuilt(label) == rebuilt and (before.tag == after.tag) == (not changed)


def test_a_tag_is_of_its_content_alone() -> None:
    tags = {recipe(platform).tag for platform in PLATFORMS} | {
        recipe(base="mirror.example/ubuntu:24.04").tag
    }
    assert len(tags) == len(PLATFORMS) + 1 and all(
        re.fullmatch(r"[a-z-]+-[0-9a-f]{16}", tag) for tag in tags
    )


def test_the_context_has_the_code_and_no_time_of_the_day(tmp_path: Path) -> None:
    made = recipe()
    write_context(made, tmp_path / "c")
    files = {
        str(path.relative_to(tmp_path / "c"))
        for path in (tmp_path / "c").rglob("*")
        if path.is_file()
    }
    assert files == {*made.files, TAG} and (tmp_path / "c" / TAG).read_text() == f"{made.tag}\n"
    assert not any(name.startswith(("tests", "README", ".git", "runs")) for name in files)
    assert {path.stat().st_mtime for path in (tmp_path / "c").rglob("*")} == {0.0}
    assert os.access(tmp_path / "c" / "scripts" / "efa.sh", os.X_OK)


# Builders


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but what a test puts there, and the shell's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "git", "python3", "grep", "printf", "env"):
        if found := next(
            (p for p in (Path("/usr/bin") / name, Path("/bin") / name) if p.exists()), None
        ):
            (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def fake(path: Path, name: str, body: str) -> Path:
    """A program that writes down its words, one call a line, and then does the body."""
    (path / name).write_text(f'#!/bin/sh\necho "$*" >> "{path}/{name}.log"\n{body}\n')
    (path / name).chmod(0o755)
    return path / f"{name}.log"


def inspected(made: Any, **changes: Any) -> str:
    record = {
        "Config": {"Labels": {"org.opencontainers.image.version": made.tag}},
        "Architecture": "amd64",
    } | changes
    return json.dumps([record])


def test_the_first_that_works_is_taken_and_the_others_are_told(path: Path) -> None:
    fake(path, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    fake(path, "buildah", "exit 0")
    builder, why = choose()
    assert (
        builder.name == "buildah"
        and why
        == "docker does not work: Cannot connect to the Docker daemon; podman is not installed"
    )


def test_no_builder_is_told_with_what_to_install(path: Path) -> None:
    with pytest.raises(ImageError, match="no working image builder") as caught:
        choose()
    assert (
        "buildah is not installed" in caught.value.why
        and "apt-get install buildah" in caught.value.next
    )


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_an_image_that_is_here_is_not_built_again(path: Path, name: str) -> None:
    made = recipe()
    log = fake(
        path,
        name,
        f"case $1 in image) cat <<'E'\n{inspected(made)}\nE\n;; history) echo 5; echo 0; echo 70 ;; esac",
    )
    said: list[str] = []
    found = building.build(made, Builder(name), "c", said.append)
    assert found.layers == (70, 5) and "exists" in said[0] and " build" not in log.read_text()


@pytest.mark.parametrize("name", ["docker", "podman", "buildah"])
def test_a_build_is_given_arguments_secrets_by_file_and_the_context(
    path: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe()
    certificate = tmp_path / "ca.pem"
    certificate.write_text("certificates")
    for variable, value in {"CONFIG_FILE": os.devnull, "INDEX_URL": "https://me:canary-31337@index.example/simple", "CERT": certificate,
                            "CLIENT_CERT": certificate, "CONSTRAINT": "none.txt", "FIND_LINKS": "/wheels https://w.example"}.items():  # fmt: skip
        monkeypatch.setenv(f"PIP_{variable}", str(value))
    fake(path, name, f"""case "$1" in
  build) for word; do case $word in --secret=id=pip,*) cat "${{word#*src=}}" > {tmp_path}/given ;; esac; done; : > {tmp_path}/built; echo "at https://me:canary-31337@index.example" ;;
  images) ;;
  history) echo 5 ;;
  *) [ -e {tmp_path}/built ] || exit 1
     cat <<'E'
{inspected(made) if name != "buildah" else json.dumps(of_buildah(made))}
E
esac""")  # fmt: skip
    said: list[str] = []
    found = building.build(made, Builder(name), "abc+", said.append)
    line = next(
        line
        for line in (path / f"{name}.log").read_text().splitlines()
        if line.startswith("build ")
    )
    for name_, value in {
        **dict(made.arguments),
        "TAG": made.tag,
        "LOCK": made.lock,
        "COMMIT": "abc+",
    }.items():
        assert f"--build-arg={name_}={value}" in line
    assert "--build-arg=LAYERS=system=" in line and "--label" not in line
    assert (
        f"--tag={made.reference}" in line
        and f"--secret=id=ca,src={tmp_path}/ca.pem" in line
        and found.layers[-1] == 5
    )
    assert f"--secret=id=client,src={certificate}" in line and "canary" not in line
    given = (tmp_path / "given").read_text()
    assert (
        "canary-31337" in given
        and str(tmp_path) not in given
        and "constraint" not in given
        and "find-links = https://w.example\n" in given
    )
    assert "constraint" in said[1] and "find-links /wheels is ignored" in said[2]
    assert not Path(line.split()[-1]).parent.exists(), "the secret's file is gone with the context"
    assert said[0] == "layers to rebuild: system, fabric, python, code" and "built" in said[-1]
    for name in [name for name in os.environ if name.startswith(building.PASSWORD)]:
        monkeypatch.delenv(name)


def of_buildah(made: Any) -> dict[str, Any]:
    image = {
        "architecture": "amd64",
        "config": {"Labels": {"org.opencontainers.image.version": made.tag}},
    }
    return {"OCIv1": image, "Manifest": json.dumps({"layers": [{"size": 7}, {"size": 5}]})}


def test_a_password_of_pip_s_is_shown_by_no_builder(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINFLEET_SECRETS", "")
    building.hide_passwords({"extra-index-url": "https://a:canary-1@x https://b:canary-2@y"})
    fake(path, "buildah", "echo canary-1; echo canary-2 >&2; exit 3")
    with pytest.raises(ImageError):
        building.run_builder(Builder("buildah"), ["buildah", "build"], "no", building.TROUBLES)
    assert "canary" not in capsys.readouterr().out
    for name in [name for name in os.environ if name.startswith(building.PASSWORD)]:
        monkeypatch.delenv(name)


SAID = {  # words of docker, podman and buildah (their issue trackers), and what is told
    "write /var/lib/containers/tmp: no space left on device": ("the disk is full", "df -h"),
    "Error: initializing source docker://docker.io/library/ubuntu: dial tcp: lookup registry-1.docker.io: no such host":
        ("can't pull the base image B", "fleet.container_base"),
    "ERROR: pull access denied for nobody/nothing, repository does not exist or may require 'docker login'":
        ("can't pull the base image B", "fleet.container_base"),
    "Error: creating build container: short-name \"b\" did not resolve to an alias": ("can't pull the base image B", "fleet.container_base"),
    "toomanyrequests: You have reached your pull rate limit": ("can't pull the base image B", "fleet.container_base"),
    "exec /bin/bash: exec format error": ("another processor", "linux/amd64"),
    "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE": ("a downloaded file does not match the lock file", "platforms.lock.yaml"),
    "efa: can't download https://efa-installer": ("can't download its files", "pip_sources.py show"),
    'ConnectionError: Connection refused\nError: building at STEP "RUN pip": exit status 1': ("can't download its files", "pip_sources.py show"),
    "dial tcp 10.0.0.1:443: connect: connection refused": ("can't pull the base image B", "fleet.container_base"),
    "WARNING: image platform ({arm64 linux  [] }) does not match the expected platform ({amd64 linux  [] })":
        ("another processor", "linux/amd64"),
    'no image found in manifest list for architecture amd64, variant "", OS linux': ("another processor", "linux/amd64"),
    "error running container: operation not permitted": ("the builder lacks permissions", "BUILDAH_ISOLATION"),
    "something new": ("something new", "above"),
}  # fmt: skip


@pytest.mark.parametrize("line", SAID)
def test_what_a_builder_says_of_a_failure_is_explained(line: str) -> None:
    why, next = SAID[line]
    error = building.explained(
        Builder("buildah"),
        ["STEP 1", *line.splitlines()],
        "can't build the image",
        building.TROUBLES,
        "B",
    )
    assert (
        why in error.why
        and next in error.next
        and line.splitlines()[0] in error.why
        and error.where == "buildah"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [({"Architecture": "arm64"}, "for another processor"),
     ({"Config": {"Labels": {"org.opencontainers.image.version": "other"}}}, "different content"), ({"Config": {}}, "different content")],
)  # fmt: skip
def test_an_image_of_our_name_that_is_another_is_refused(
    path: Path, change: dict[str, Any], told: str
) -> None:
    made = recipe()
    fake(path, "docker", f"cat <<'E'\n{inspected(made, **change)}\nE")
    with pytest.raises(ImageError, match=told):
        building.build(made, Builder("docker"), "c", lambda _: None)


def test_one_that_was_built_and_does_not_fit_loses_its_name(path: Path) -> None:
    made = recipe()
    body = f"""case $1 in
  build) : > {path}/built ;;
  images) ;;
  *) [ -e {path}/built ] || exit 1
     cat <<'E'
{inspected(made, Architecture="arm64")}
E
esac"""
    log = fake(path, "docker", body)
    with pytest.raises(ImageError, match="for another processor"):
        building.build(made, Builder("docker"), "c", lambda _: None)
    assert log.read_text().splitlines()[-1] == f"rmi {made.reference}"


@pytest.mark.parametrize(
    ("machine", "foreign"), [("x86_64", False), ("aarch64", True), ("arm64", True)]
)
def test_what_is_built_is_for_the_fleet_s_processor(
    monkeypatch: pytest.MonkeyPatch, machine: str, foreign: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert ("--platform=linux/amd64" in Builder("docker").build("x:1", {}, {}, "c")) == foreign


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '"x"', "[1]", '{"OCIv1": null}', '{"Manifest": "x"}', '{"Manifest": "[]"}'],
)
def test_what_a_builder_says_that_is_no_image_is_no_crash(text: str) -> None:
    builders._of_buildah(text)
    builders._of_docker(text, "x\n3")


def test_a_builder_that_hangs_counts_as_one_that_does_not_work(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "ANSWER", 0.2)
    fake(path, "docker", "while :; do :; done")
    assert "no answer" in Builder("docker").works()


# As a user reads it

BUILDAH = """[1/8] STEP 1/5: FROM localhost/base:1 AS base
[1/8] STEP 2/5: ENV LANG=C.UTF-8
--> Using cache 35e15bc4a35419696299a6df71781a10fa8505ab3184dd36425977f6572a2d8b
--> 35e15bc4a35
[1/8] STEP 4/5: COPY scripts/build_tools.sh /build/scripts/
--> Using cache 1bec9f5678115a256ac788f48af7f1d9a55677de2739a884dce4a5fd9f0c46e9
--> 1bec9f56781
[8/8] STEP 7/23: RUN --mount=type=secret,id=pip,target=/etc/pip.conf     echo "${PYTHON_PACKAGES}" | xargs python.sh apply
python: /opt/venv, torch
--> 4df30bfe11e
COMMIT localhost/trainfleet:cpu-1"""
DOCKER = """#1 [internal] load build definition from Dockerfile
#1 DONE 0.0s
#4 [base 1/3] FROM localhost/base:1
#5 [base 2/3] COPY scripts/build_tools.sh /build/scripts/
#5 CACHED
#6 [image 3/7] RUN echo "${PYTHON_PACKAGES}" | xargs python.sh apply
#6 61.33 python: /opt/venv, torch
#6 DONE 61.4s"""


@pytest.mark.parametrize("text", [BUILDAH, DOCKER])
def test_a_build_is_a_line_a_step_with_what_came_of_it(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    steps = BuildSteps("x")
    for line in text.splitlines():
        steps.take(line)
        now[0] += 20
    steps.end()
    shown = [re.sub(r"^ *\d+/\d+ ", "", line) for line in capsys.readouterr().out.splitlines()]
    assert shown[:2] == [
        f"FROM localhost/base:1{' AS base' if text is BUILDAH else ''}  20 s",
        "COPY scripts/build_tools.sh /build/scripts/  (cached)",
    ]
    assert shown[2] == 'RUN echo "${PYTHON_PACKAGES}" | xargs python.sh apply'
    assert shown[3].startswith("  x | ") and shown[3].endswith("python: /opt/venv, torch")
    assert shown[4].strip() == ("80 s" if text is BUILDAH else "60 s") and len(shown) == 5, (
        "of the whole step"
    )


# ECR


class Account:
    """ECR of an account, for one repository; `refuse`: operation → error code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.repository: dict[str, Any] | None = None
        self.images: dict[str, dict[str, Any]] = {}  # tag → labels
        self.refuse: dict[str, str] = {}
        self.architecture = "amd64"
        self.answers: dict[str, Any] = {}  # operation → another answer than its own

    def respond(
        self, region: str, service: str, operation: str, request: dict[str, Any]
    ) -> dict[str, Any]:
        self.sent.append((operation, request))
        if code := self.refuse.get(operation):
            message = f"User: arn:aws:iam::{ACCOUNT}:user/x is not authorized to perform: {service}:{operation}"
            raise ClientError({"Error": {"Code": code, "Message": message}}, operation)
        return dict(
            self.answers[operation]
            if operation in self.answers
            else getattr(self, operation)(request)
        )

    def GetCallerIdentity(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"Account": ACCOUNT}

    def DescribeRepositories(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"repositories": [self._there("DescribeRepositories")]}

    def CreateRepository(self, request: dict[str, Any]) -> dict[str, Any]:
        self.repository = request
        return {}

    def PutLifecyclePolicy(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def GetAuthorizationToken(self, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "authorizationData": [
                {"authorizationToken": base64.b64encode(b"AWS:canary-token-55").decode()}
            ]
        }

    def BatchGetImage(self, request: dict[str, Any]) -> dict[str, Any]:
        self._there("BatchGetImage")
        (identity,) = request["imageIds"]
        if (self.folder / "bin" / "pushed").exists():
            tag = (self.folder / "bin" / "pushed").read_text().strip().rpartition(":")[2]
            self.images.setdefault(tag, {"org.opencontainers.image.version": tag.partition(".")[2]})
        if (tag := identity.get("imageTag") or identity["imageDigest"]) not in self.images:
            return {"images": [], "failures": [{"failureCode": "ImageNotFound"}]}
        config = {"architecture": self.architecture, "config": {"Labels": self.images[tag]}}
        (self.folder / "config.json").write_text(json.dumps(config))
        manifest = {
            "config": {"digest": "sha256:" + "c" * 64},
            "layers": [{"size": 400_000_000}, {"size": 2_000_000}],
        }
        return {
            "images": [
                {"imageManifest": json.dumps(manifest), "imageManifestMediaType": MANIFESTS[0]}
            ]
        }

    def DescribeImages(self, request: dict[str, Any]) -> dict[str, Any]:
        self._there("DescribeImages")
        return {"imageDetails": [{"imageTags": [tag]} for tag in self.images]}

    def PutImage(self, request: dict[str, Any]) -> dict[str, Any]:
        (same,) = {json.dumps(labels) for labels in self.images.values()}
        self.images[request["imageTag"]] = json.loads(same)
        return {}

    def GetDownloadUrlForLayer(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"downloadUrl": (self.folder / "config.json").as_uri()}

    def _there(self, operation: str) -> dict[str, Any]:
        if self.repository is None:
            raise ClientError(
                {"Error": {"Code": "RepositoryNotFoundException", "Message": "no"}}, operation
            )
        return self.repository


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    found = Account(tmp_path)
    monkeypatch.setattr(calls, "send", found.respond)
    return found


def registry() -> Registry:
    return Registry(Calls(REGION), ACCOUNT)


def pusher(path: Path, push: str = "") -> Path:
    """A docker whose push stores the image; its log."""
    push = push or f'echo "$2" > {path}/pushed'
    return fake(path, "docker", f"case $1 in login) cat > {path}/stdin ;; push) {push} ;; esac")


def test_a_push_makes_the_repository_logs_in_by_stdin_and_sends_once(
    path: Path, account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    made, said, log = recipe(), list[str](), pusher(path)
    target = registry().push(
        made, Builder("docker"), said.append, {"trainfleet:project": "trainfleet"}, "mine"
    )
    assert target == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/trainfleet:mine.{made.tag}"
    requests = dict(account.sent)
    assert requests["CreateRepository"]["imageTagMutability"] == "IMMUTABLE"
    assert requests["CreateRepository"]["imageScanningConfiguration"] == {"scanOnPush": True}
    assert requests["CreateRepository"]["tags"] == [
        {"Key": "trainfleet:project", "Value": "trainfleet"}
    ]
    rules = json.loads(requests["PutLifecyclePolicy"]["lifecyclePolicyText"])["rules"]
    assert {rule["selection"]["tagStatus"] for rule in rules} == {"untagged", "any"}
    words = log.read_text()
    assert (
        f"login --username AWS --password-stdin {ACCOUNT}" in words
        and f"tag {made.reference} {target}" in words
        and f"push {target}" in words
    )
    assert (path / "stdin").read_text() == "canary-token-55" and "canary" not in words + "".join(
        said
    ) + capsys.readouterr().out
    log.unlink()
    account.sent.clear()
    assert registry().push(made, Builder("docker"), said.append, {}, "mine") == target
    assert not log.exists() and "GetAuthorizationToken" not in dict(account.sent), (
        "it is there: nothing is sent"
    )
    assert "exists: 402 MB" in said[-1]


def test_an_image_that_another_config_holds_is_held_too_and_not_sent_again(
    path: Path, account: Account
) -> None:
    made, said, log = recipe(), list[str](), pusher(path)
    registry().push(made, Builder("docker"), said.append, {}, "alice")
    log.unlink()
    assert (
        registry()
        .push(made, Builder("docker"), said.append, {}, "bob")
        .endswith(f":bob.{made.tag}")
    )
    assert not log.exists() and said[-1].endswith("402 MB, shared with alice")
    assert set(account.images) == {f"alice.{made.tag}", f"bob.{made.tag}"}


PUSHED = {
    "denied: User: arn:aws:sts::1:x is not authorized to perform: ecr:InitiateLayerUpload": "the registry refused the push",
    "tag invalid: The image tag x already exists in the 'trainfleet' repository and cannot be overwritten because the tag is immutable.": "different content",
    "no basic auth credentials": "the registry refused the push",
    "write: no space left on device": "the disk is full",
    "dial tcp: i/o timeout": "can't reach the registry",
}


@pytest.mark.parametrize("words", PUSHED)
def test_a_push_that_is_refused_is_explained(path: Path, account: Account, words: str) -> None:
    made = recipe()
    pusher(path, push=f'echo "{words}"; exit 1')
    with pytest.raises(ImageError) as caught:
        registry().push(made, Builder("docker"), lambda _: None, {}, "mine")
    assert (
        PUSHED[words] in caught.value.why
        and words in caught.value.why
        and made.tag not in account.images
    )


def test_a_denied_repository_names_the_action(path: Path, account: Account) -> None:
    account.refuse["CreateRepository"] = "AccessDeniedException"
    with pytest.raises(CloudError) as caught:
        registry().push(recipe(), Builder("docker"), lambda _: None, {}, "mine")
    assert "ecr:CreateRepository" in str(caught.value)


def test_a_repository_whose_tags_can_be_overwritten_is_not_pushed_to(
    path: Path, account: Account
) -> None:
    account.repository = {"repositoryName": "trainfleet", "imageTagMutability": "MUTABLE"}
    with pytest.raises(
        ImageError, match="has mutable tags, which make push does not support"
    ) as caught:
        registry().push(recipe(), Builder("docker"), lambda _: None, {}, "mine")
    assert "put-image-tag-mutability" in caught.value.next and "GetAuthorizationToken" not in dict(
        account.sent
    )


def test_a_tag_that_somebody_pushed_by_hand_is_named(path: Path, account: Account) -> None:
    made = recipe()
    account.repository, account.images[f"mine.{made.tag}"] = {"imageTagMutability": "IMMUTABLE"}, {}
    with pytest.raises(ImageError, match="different content") as caught:
        registry().push(made, Builder("docker"), lambda _: None, {}, "mine")
    assert "batch-delete-image" in caught.value.next


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "{",
        "[]",
        '{"config": 1}',
        '{"config": {"digest": "sha256:x"}, "layers": [{"size": "x"}]}',
        '{"manifests": []}',
    ],
)
def test_what_the_registry_says_that_is_no_image_is_told(account: Account, manifest: str) -> None:
    account.answers["BatchGetImage"] = {"images": [{"imageManifest": manifest}]}
    with pytest.raises(ImageError, match="is not a readable image"):
        registry().find("x")


def test_an_image_s_name_tells_its_registry() -> None:
    found = Registry.of(f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/team/trainfleet:cuda-1")
    assert found and (found.account, found.calls.region, found.repository) == (
        ACCOUNT,
        "eu-west-1",
        "team/trainfleet",
    )
    assert Registry.of("ghcr.io/x/y:1") is None and Registry.of("ubuntu") is None
    assert HOST.fullmatch(Registry(Calls("cn-north-1"), ACCOUNT).host)


# What a config's image is


def test_build_becomes_the_name_in_ecr(account: Account, tmp_path: Path) -> None:
    given = config(tmp_path, container="build", aws={"region": REGION})
    named = job_image.named(given)
    assert named.fleet.container == registry().name(f"x.{job_image.recipe_for(given).tag}")
    assert job_image.named(given, ["a/b:1"]).fleet.container == "a/b:1", (
        "on a head, that of the job that it was given"
    )
    account.refuse["GetCallerIdentity"] = "ExpiredToken"
    assert job_image.named(given).fleet.container.startswith(
        f"ACCOUNT.dkr.ecr.{REGION}.amazonaws.com/trainfleet:x.cpu-"
    )


def test_an_image_that_is_not_there_or_does_not_fit_is_refused_before_anything_runs(
    account: Account, tmp_path: Path
) -> None:
    given = config(tmp_path, container=registry().name("cuda-1"))
    with pytest.raises(ImageError, match="not in the registry"):
        job_image.make_ready(given)
    account.repository, account.images["cuda-1"] = (
        {},
        {"trainfleet.lock": "cuda 2026-01-01 0123456789ab"},
    )
    with pytest.raises(ImageError, match="versions differ") as caught:
        job_image.make_ready(given)
    assert (
        "cuda 2026-01-01 0123456789ab" in caught.value.why
        and lock_name(load_platform(given.fleet.platform)) in caught.value.why
    )
    account.architecture = "arm64"
    with pytest.raises(ImageError, match="another processor"):
        job_image.make_ready(given)
    account.architecture, account.images["cuda-1"] = (
        "amd64",
        {"trainfleet.lock": lock_name(load_platform(given.fleet.platform))},
    )
    job_image.make_ready(given)


def test_root_runs_where_the_platform_gives_and_takes_files_as_root(tmp_path: Path) -> None:
    assert "RUN_AS" not in dict(job_image.recipe_for(config(tmp_path)).arguments)
    assert "ARG RUN_AS=trainer" in TEXT and "USER ${RUN_AS}" in TEXT


@pytest.mark.parametrize(
    "image", ["Build", "a b", "x:", "-x", "x/../y", "x:1@sha256:12", "$(touch x)", "x;y"]
)
def test_what_is_no_image_s_name_is_refused(tmp_path: Path, image: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.container"):
        config(tmp_path, container=image)


def test_the_commit_is_told_with_whether_files_differ(tmp_path: Path) -> None:
    assert building.commit_of(tmp_path) == "unknown"
    subprocess.run(["git", "-C", tmp_path, "init", "-q"], check=True)
    (tmp_path / "a").write_text("")
    done = [
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "a",
    ]
    subprocess.run(done, check=True)
    assert re.fullmatch(r"[0-9a-f]{40}\+", building.commit_of(tmp_path))
