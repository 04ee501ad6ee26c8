"""EC2 instances: the SSH fleet, with hosts found by tag and machines made by a CloudFormation
stack.

A node is known by its instance id, also in quarantine, as AWS later gives its address to another
machine. Its host key comes from AWS (host_keys.py). On the head, the config that it received has
the hosts and the file system, so it asks AWS nothing.

Tested: everything that SSH does runs for real, on nodes in namespaces; AWS is a mock account
(tests/aws). Not tested: EFA, FSx, and AWS itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..cloud import data_access, spending, unsupported
from ..cloud.calls import Calls
from ..cloud.capacity import Blocks, Paid
from ..cloud.region import region_of, through_agent
from ..cloud.stack_nodes import FleetStack, StackNode
from ..cloud.template_storage import log_group
from ..config import Config
from ..hosts.fleet import hosts_of
from ..hosts.install_steps import SCRATCH
from ..hosts.transport import Transport
from ..plan.bill import PAID, Bill
from ..plan.job import Job
from ..run.run_folder import COPY
from ..storage.cloudwatch import LOGS
from ..trust.errors import BackendError
from .bake import Baking
from .base import Bake, Can, Machines, Purchase
from .ec2_machines import Instances
from .head import HEAD, Head
from .host_keys import keep_keys
from .ssh import Ssh

USER = "ubuntu"  # user of the images that the stack lock names


class StackHosts(Head):
    """The hosts that AWS has now, in the stack that `cloud` returns."""

    def __init__(self, config: Config, cloud: Callable[[], FleetStack]) -> None:
        super().__init__(config)
        self._cloud = cloud

    @functools.cached_property
    def located(self) -> Config:
        """Returns the config with AWS's current state: the running nodes in their order, the way to
        them, and the file system.
        """
        if not self.hands_over:
            return self.config
        cloud = self._cloud()
        nodes, head = cloud.nodes(), cloud.head()
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
        """Tells whether SSH goes through SSM Session Manager, as no port is open."""
        return self.hands_over and self.fleet.aws.ssm_only

    def address(self, node: StackNode) -> str:
        return node.id if self.by_agent else node.address

    @property
    def ends(self) -> float | None:
        return self._cloud().ends()


class Ec2(Ssh):
    """The instances of the config's stack, as a backend (base.py)."""

    name = "ec2"
    can = Ssh.can | {Can.MACHINES}
    owned, tried_on = False, "real sshd, fake AWS"

    def __init__(self, config: Config) -> None:
        super().__init__(config, StackHosts(config, lambda: self.cloud))

    @functools.cached_property
    def cloud(self) -> FleetStack:
        """Returns the stack and its resources."""
        return FleetStack(self.ahead.placed() if self.ahead else self.config)

    @functools.cached_property
    def ahead(self) -> Blocks | None:
        """Returns the capacity block that make setup finds, buys and uses; None if the config asks
        for none, and on the head.
        """
        hours = self.fleet.aws.block_hours
        if hours is None or not self.hands_over:
            return None
        return Blocks(self.config, Calls(region_of(self.config)), hours)

    @functools.cached_property
    def paid(self) -> Paid:
        """Returns the advance payment for each node."""
        return (
            self.ahead.paid()
            if self.ahead
            else Paid(float(os.environ.get(PAID, "0")), "a capacity block")
        )

    def purchase(self) -> Purchase | None:
        return self if self.ahead else None

    def obtain(self, may_buy: bool) -> tuple[list[str], bool]:
        """Buys the capacity block if `may_buy`, and returns its state."""
        if self.ahead is None:
            return [], True
        found = self.ahead.obtain(may_buy, self._whole())
        for name in ("cloud", "paid"):  # these depend on the capacity that is held
            self.__dict__.pop(name, None)
        self._head.look_again()
        return found

    def _whole(self) -> Bill | None:
        """Returns the bill without advance payments."""
        return spending.of_ec2(self.config).bill(self.fleet.nodes)

    @staticmethod
    def refuse(config: Config) -> Iterator[tuple[str, str]]:
        yield from Ssh.refuse(config)
        yield from unsupported.refuse(config)
        if config.fleet.hosts and HEAD not in os.environ:  # the head's config lists the hosts
            yield (
                "fleet.hosts",
                "the ec2 backend makes its machines; for your own hosts use fleet.backend ssh",
            )

    def extras(self, job: Job) -> dict[str, str]:
        """Returns where nodes send their logs, and whether they first copy the dataset to their
        disks.
        """
        logs = {LOGS: f"{region_of(self.config)} {log_group(self.config)}"}
        return logs | ({COPY: SCRATCH} if job.torchrun and data_access.copies(self.config) else {})

    def bake(self) -> Bake | None:
        return Baking(self.cloud, self._head)

    def bill(self) -> Bill | None:
        return self.paid.on(self._whole())

    def machines(self) -> Machines:
        return Instances(self.cloud, self._head, self.paid, self.ahead)
