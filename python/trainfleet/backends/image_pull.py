"""Pulls an image to the hosts of a fleet before a job starts in it, and checks its processor and its lock of versions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..images.ecr import Registry
from ..images.image_recipe import ARCHITECTURE
from ..nodes.host_results import Host, by_host
from ..nodes.transport import Transport
from ..trust.errors import BackendError

PULL_TIMEOUT = 1800.0  # an image of CUDA has several GB
LOOK = """docker image inspect --format '{{.Architecture}} {{index .Config.Labels "trainfleet.lock"}}'"""
NOBODY = ("", "<no value>")  # whose lock an image has that was not built here


def fetch(transport: Transport, hosts: Sequence[Host], image: str, lock: str) -> None:
    """Returns when every host has the image. AWS's token goes in by stdin, and is in no word and no file that stays.

    Raises:
        BackendError: a host can't have it, or it is not what the config's stack is; all that is wrong, by host.
    """
    registry = Registry.of(image)
    _, token = registry.token() if registry else ("", "")
    words = pull_words(image, registry.host if registry else "")
    answers = transport.run(words, stdin=token, timeout=PULL_TIMEOUT, hosts=hosts)
    remedy = "fleet.docker: true and make setup install Docker; docker pull on one of them says more"
    answers.require(f"{image} can't be had", then=remedy)
    said = {host: answer.stdout.strip().rpartition("\n")[2] for host, answer in answers.ok.items()}
    wrong = {host: against for host, found in said.items() if (against := misfit(found, lock))}
    if wrong:
        raise BackendError(by_host(f"{image} does not fit", wrong), next="make push, with fleet.image: build")


def pull_words(image: str, registry: str) -> str:
    """A shell command that inspects the image, and pulls it if it is missing."""
    look, pull = f"{LOOK} {shlex.quote(image)}", f"docker pull --quiet {shlex.quote(image)} > /dev/null"
    if registry:
        own = "DOCKER_CONFIG=$(mktemp -d) && export DOCKER_CONFIG && trap 'rm -rf \"$DOCKER_CONFIG\"' EXIT"
        pull = f"{own} && docker login --username AWS --password-stdin {shlex.quote(registry)} > /dev/null && {pull}"
    return f"{look} 2> /dev/null || {{ {pull} && {look}; }}"


def misfit(words: str, lock: str) -> str:
    """Why an image with this processor and lock can't be used; nothing when it can."""
    architecture, _, theirs = words.partition(" ")
    if architecture != ARCHITECTURE:
        return f"it is for {architecture or 'no known processor'}, the hosts are {ARCHITECTURE}"
    return f"it is of the lock {theirs}, the config's stack of {lock}" if theirs not in (*NOBODY, lock) else ""
