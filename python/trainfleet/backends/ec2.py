"""EC2 backend: an SSH fleet whose instances are created by a CloudFormation stack and found by tag.

A node's identity is its instance ID, even in quarantine, because AWS can reassign its address to
another machine. Host keys come from AWS (ec2_machines.py). The head does not query AWS, because it
receives a config with the hosts and the file system.

`make image` seals an idle node after setup, and creates an image of it for future machines.

Tested: all SSH operations run for real, on nodes in network namespaces, with a mock AWS account
(tests/aws). Not tested: EFA, FSx, and AWS itself.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..cloud import checks, spending, template_storage
from ..cloud.baking import Oven
from ..cloud.calls import Calls, region_of, through_agent
from ..cloud.capacity import Blocks, Paid
from ..cloud.stack_nodes import FleetStack, StackNode
from ..cloud.template_storage import log_group
from ..config import Config, Refusals
from ..hosts import host_commands, preflight
from ..hosts.facts import Facts
from ..hosts.fleet import hosts_of
from ..hosts.host_results import Host, by_host, reason
from ..hosts.host_setup import last_line, send_scripts
from ..hosts.install_steps import SCRATCH
from ..hosts.transport import Transport
from ..plan.estimate import PAID, Bill
from ..plan.job import Job
from ..run.run_folder import COPY
from ..storage.cloudwatch import LOGS
from ..trust.errors import BackendError
from .base import Can, Machines, Purchase
from .ec2_machines import Instances, keep_keys, require_plugin, say, told_of
from .head import HEAD, Head
from .ssh import Ssh

SEALED = "/run/trainfleet-seal.sh"  # copy of scripts/seal.sh on the node, used for unsealing
TIMEOUT = 300.0  # timeout in seconds for sealing a node


def _bake(head: Head, oven: Oven) -> int:
    """Creates the image from a node of the stack, reached through `head`.

    Raises:
        BackendError, CloudError: no node is healthy and idle, sealing fails, or EC2 can't create
            the image.
    """
    with told_of(
        "AWS is still creating the image",
        "run make image to continue, or make clean PURGE=1 to remove it",
    ):
        if found := oven.begun():
            say(f"{found.id} already has these versions: {found.lock}, created {found.made}")
            image = found.id
        else:
            oven.clear(say)
            image = _baked(head, oven)
        oven.follow(image, say)
    say(f"{image} is ready; {oven.cost(image)}, until make clean PURGE=1 removes it")
    if own := head.fleet.aws.ami:
        say(f"make setup uses fleet.aws.ami, {own}; set it to null to use the new image")
    say(
        "next: run make plan to see whether new nodes use this image; existing nodes keep "
        "theirs until make clean"
    )
    return 0


def _baked(head: Head, oven: Oven) -> str:
    """Returns the ID of a new image of one node. The image may still be pending."""
    if head.by_agent:
        require_plugin()
    host, facts = _at_rest(head)
    say(f"{host}: sealed during the snapshot; it does not reboot")
    with _sealed(head, host, facts):
        image = oven.begin(host.name)
        oven.await_snapshots(image)
        oven.confirm(image)
    return image


def _at_rest(head: Head) -> tuple[Host, Facts]:
    """Returns an idle node that is set up and has passed its checks.

    Picks the last candidate, because the first node leads runs.

    Raises:
        BackendError: no node qualifies. The message lists each node's problem.
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
            by_host("no node has passed its checks", against), next="run make setup, or make doctor"
        )
    host = fit[-1]
    said = transport.run(host_commands.marks(), timeout=TIMEOUT, hosts=[host]).require(
        "can't list the runs on the node"
    )
    if busy := host_commands.read_marks(said.ok[host].stdout, ""):
        raise BackendError(
            "the node is not idle",
            where=str(host),
            why=f"sealing briefly removes the node's keys, but {', '.join(sorted(busy))} is "
            "running there",
            next="run make stop, then make image",
        )
    return host, report.facts[host]


@contextmanager
def _sealed(head: Head, host: Host, facts: Facts) -> Iterator[None]:
    """Seals a node for the duration of the `with` block.

    A sealed disk is free of files that must not end up in an image, such as keys.
    """
    transport, sudo = head.transport, "" if facts.user == "root" else "sudo -n "
    folder, failed = send_scripts(transport, [host])
    if failed:
        raise BackendError(
            by_host("can't copy the scripts to the node", failed), next="make doctor"
        )
    shared = shlex.quote(head.folder)
    try:
        answer = transport.ask(host, f"{sudo}{folder}/seal.sh apply {shared}", timeout=TIMEOUT)
        if reason(answer):
            raise BackendError(
                "the node can't be sealed",
                where=str(host),
                why=last_line(answer),
                next="run make image again",
            )
        yield
    finally:
        opened = transport.ask(
            host, f"[ ! -e {SEALED} ] || {sudo}bash {SEALED} undo {shared}", timeout=TIMEOUT
        )
        if trouble := reason(opened):
            say(
                f"warning: could not unseal {host} ({trouble}); it unseals automatically ten "
                "minutes after sealing"
            )


USER = "ubuntu"  # default user of the images in docker/platforms.lock.yaml


class StackHosts(Head):
    """The hosts that currently exist in the stack that `cloud` returns."""

    def __init__(self, config: Config, cloud: Callable[[], FleetStack]) -> None:
        super().__init__(config)
        self._cloud = cloud

    @functools.cached_property
    def located(self) -> Config:
        """Returns the config with values from AWS: the running nodes in order, SSH settings, and
        the file system.
        """
        if not self.hands_over:
            return self.config
        cloud = self._cloud()
        nodes, head = cloud.nodes() or cloud.builder(), cloud.head()
        fleet = replace(
            self.fleet, hosts=(), aws=replace(self.fleet.aws, region=cloud.calls.region)
        )
        if nodes:
            known, _ = keep_keys(cloud, [*nodes, *([head] if head else [])], self.by_agent)
            jump = fleet.ssh.jump or (
                f"{self.user}@{head.public}" if head and head.public else None
            )
            ssh = replace(
                fleet.ssh,
                user=self.user,
                known_hosts=fleet.ssh.known_hosts or str(known),
                jump=jump,
            )
            hosts = tuple(f"{node.id}={self.address(node)}" for node in nodes)
            dns_name, mount_name = cloud.mount() or (fleet.fsx.dns_name, fleet.fsx.mount_name)
            fsx = replace(fleet.fsx, dns_name=dns_name, mount_name=mount_name)
            fleet = replace(fleet, hosts=hosts, ssh=ssh, fsx=fsx)
        return replace(self.config, fleet=fleet)

    @functools.cached_property
    def transport(self) -> Transport:
        region = self._cloud().calls.region
        proxy = through_agent(region) if self.by_agent else ""
        if not self.located.fleet.hosts:
            raise BackendError(
                f"{self.config.fleet_name} has no nodes in {region}", next="make setup"
            )
        return Transport(hosts_of(self.located), self.located.fleet.ssh, proxy=proxy)

    @property
    def user(self) -> str:
        return self.fleet.ssh.user or USER

    @property
    def by_agent(self) -> bool:
        """Returns whether SSH connections use SSM Session Manager, because no port is open."""
        return self.hands_over and self.fleet.aws.ssm_only

    def address(self, node: StackNode) -> str:
        return node.id if self.by_agent else node.address

    @property
    def ends(self) -> float | None:
        return self._cloud().ends()


class Ec2(Ssh):
    """Backend for EC2 instances in the config's stack (base.py)."""

    name = "ec2"
    can = Ssh.can | {Can.MACHINES}
    owned, tried_on = False, "real sshd, fake AWS"

    def __init__(self, config: Config) -> None:
        super().__init__(config, StackHosts(config, lambda: self.cloud))

    @functools.cached_property
    def cloud(self) -> FleetStack:
        """Returns the config's stack and its resources."""
        return FleetStack(self.ahead.placed() if self.ahead else self.config)

    @functools.cached_property
    def ahead(self) -> Blocks | None:
        """Returns the capacity block that `make setup` finds, purchases and uses.

        Returns None on the head, or if the config requests no block.
        """
        hours = self.fleet.aws.block_hours
        if hours is None or not self.hands_over:
            return None
        return Blocks(self.config, Calls(region_of(self.config)), hours)

    @functools.cached_property
    def paid(self) -> Paid:
        """Returns the prepaid amount per node."""
        if self.ahead:
            return self.ahead.paid()
        return Paid(float(os.environ.get(PAID, "0")), "a capacity block")

    def purchase(self) -> Purchase | None:
        return functools.partial(self._obtain, self.ahead) if self.ahead else None

    def _obtain(self, ahead: Blocks, may_buy: bool) -> tuple[list[str], bool]:
        found = ahead.obtain(may_buy, self._whole())
        for name in ("cloud", "paid"):  # drop cached values that depend on the purchased capacity
            self.__dict__.pop(name, None)
        self._head.look_again()
        return found

    def _whole(self) -> Bill | None:
        """Returns the bill without the prepaid amount."""
        return spending.of_ec2(self.config).bill(self.fleet.nodes)

    @staticmethod
    def refuse(config: Config) -> Refusals:
        yield from Ssh.refuse(config)
        yield from checks.refuse(config)
        if config.fleet.hosts and HEAD not in os.environ:  # on the head, the config lists the hosts
            yield (
                "fleet.hosts",
                "the ec2 backend creates its own machines; for existing hosts, set "
                "fleet.backend: ssh",
            )

    def extras(self, job: Job) -> dict[str, str]:
        """Returns the nodes' environment variables for the log destination and dataset copying."""
        logs = {LOGS: f"{region_of(self.config)} {log_group(self.config)}"}
        return logs | (
            {COPY: SCRATCH} if job.torchrun and template_storage.copies(self.config) else {}
        )

    def bake(self) -> Callable[[], int]:
        return functools.partial(_bake, self._head, Oven(self.config, self.cloud.calls))

    def bill(self) -> Bill | None:
        return self.paid.on(self._whole())

    def machines(self) -> Machines:
        return Instances(self.cloud, self._head, self.paid, self.ahead)
