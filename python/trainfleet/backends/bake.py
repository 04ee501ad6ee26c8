"""make image on ec2: seals one node of a fleet that is set up and idle, and makes it the image of
the next machines.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..cloud.oven import Oven
from ..hosts import job_commands, preflight
from ..hosts.facts import Facts
from ..hosts.host_results import Host, by_host, reason
from ..hosts.host_setup import last_line, send_scripts
from ..trust.errors import BackendError
from .base import Bake
from .ec2_machines import say, told_of
from .host_keys import require_plugin

if TYPE_CHECKING:
    from ..cloud.stack_nodes import FleetStack
    from .head import Head

SEALED = "/run/trainfleet-seal.sh"  # path of scripts/seal.sh while homes are empty
TIMEOUT = 300.0  # seconds for sealing


class Baking(Bake):
    """Makes an image (base.py) of one node of a stack; `head` reaches the nodes."""

    def __init__(self, cloud: FleetStack, head: Head) -> None:
        self.cloud, self.head = cloud, head

    def make(self) -> int:
        """Makes the image.

        Raises:
            BackendError, CloudError: no node is fit and idle, it can't be sealed, or EC2 can't make
                an image of it.
        """
        return _bake(self.head, Oven(self.head.config, self.cloud.calls))


def _bake(head: Head, oven: Oven) -> int:
    with told_of(
        "AWS continues with an image that was begun",
        "make image continues with it, make clean PURGE=1 removes it",
    ):
        if found := oven.begun():
            say(f"{found.id} has these versions: {found.lock}, baked {found.made}")
            image = found.id
        else:
            oven.clear(say)
            image = _baked(head, oven)
        oven.follow(image, say)
    say(f"{image} is ready; {oven.cost(image)}, until make clean PURGE=1 removes it")
    if own := head.fleet.aws.ami:
        say(f"make setup uses fleet.aws.ami, {own}; set null to use this one")
    say(
        "next: make plan shows when nodes are made from it; existing ones keep theirs "
        "until make clean"
    )
    return 0


def _baked(head: Head, oven: Oven) -> str:
    """Returns the id of a new image of one node; it may not be available yet."""
    if head.by_agent:
        require_plugin()
    host, facts = _at_rest(head)
    say(f"{host}: sealed during its snapshot, without a reboot")
    with _sealed(head, host, facts):
        image = oven.begin(host.name)
        oven.await_snapshots(image)
        oven.confirm(image)
    return image


def _at_rest(head: Head) -> tuple[Host, Facts]:
    """Returns a node that is set up, has passed its checks and has no run: the last such node, as
    the first leads runs.

    Raises:
        BackendError: there is no such node, with each node's problem.
    """
    transport = head.transport
    report = preflight.examine(transport, head.located, fabric=False)
    against = {
        host: f"in quarantine: {entry.evidence}"
        for host, entry in head.quarantine.held(transport.hosts).items()
    }
    against |= {finding.host: str(finding) for finding in report.findings if finding.host}
    fit = [host for host in report.facts if host not in against]
    if not fit:
        raise BackendError(
            by_host("no node has passed its checks", against), next="make setup, or make doctor"
        )
    host = fit[-1]
    said = transport.run(job_commands.marks(), timeout=TIMEOUT, hosts=[host]).require(
        "can't list the runs there"
    )
    if busy := job_commands.read_marks(said.ok[host].stdout, ""):
        why = f"its keys would be removed for a moment, and {', '.join(sorted(busy))} is running"
        raise BackendError(
            "an image needs an idle node",
            where=str(host),
            why=why,
            next="make stop, then make image",
        )
    return host, report.facts[host]


@contextmanager
def _sealed(head: Head, host: Host, facts: Facts) -> Iterator[None]:
    """Removes files that must not be in an image from the node's disk, for the duration of the
    `with`.
    """
    transport, sudo = head.transport, "" if facts.user == "root" else "sudo -n "
    folder, failed = send_scripts(transport, [host])
    if failed:
        raise BackendError(by_host("the scripts can't be sent", failed), next="make doctor")
    shared = shlex.quote(head.folder)
    try:
        answer = transport.ask(host, f"{sudo}{folder}/seal.sh apply {shared}", timeout=TIMEOUT)
        if reason(answer):
            raise BackendError(
                "the node can't be sealed",
                where=str(host),
                why=last_line(answer),
                next="make image again",
            )
        yield
    finally:
        opened = transport.ask(
            host, f"[ ! -e {SEALED} ] || {sudo}bash {SEALED} undo {shared}", timeout=TIMEOUT
        )
        if trouble := reason(opened):
            say(
                f"warning: {host} could not be unsealed ({trouble}): it unseals itself ten "
                "minutes after it was sealed"
            )
