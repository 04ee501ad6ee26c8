"""Writes the AWS part of `make plan`: stack changes, costs, obstacles, SSH and data access."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Config
from . import baking, checks, cloudformation, spending, template_storage
from .calls import Calls
from .capacity import NOTHING, Paid
from .prices import GB, TABLE, WHERE_PRICES_ARE, Prices, by_table
from .stack_nodes import FleetStack, Foreseen
from .template_inputs import Inputs, bucket_of, slug
from .template_storage import LOG_DAYS, log_group, makes_file_system


def describe(
    config: Config,
    fleet: FleetStack,
    foreseen: Foreseen,
    hours: float | None,
    speed: float | None,
    paid: Paid = NOTHING,
) -> Iterator[str]:
    """Yields the plan's lines. `hours`: length of the run; `speed`: tokens per second; None:
    unknown.
    """
    calls, inputs = fleet.calls, foreseen.inputs
    yield from ("", f"stack {fleet.stack.name} in {inputs.zone}")
    if not foreseen.unasked:
        yield from baking.describe(config, calls, inputs.image)
    yield from cloudformation.describe(foreseen.changes, not foreseen.before)
    prices = by_table() if foreseen.unasked else Prices(calls)
    costs = spending.of_ec2(config, prices, inputs.zone)
    yield from ("", "dollars an hour", *spending.describe(costs.rows, hours))
    if calls.region != WHERE_PRICES_ARE and any(row.source == TABLE for row in costs.rows):
        yield f"  {calls.region} may cost up to 50 % more than these list prices"
    if prices.trouble:
        yield f"  the Pricing API returned no prices: {prices.trouble}"
    nodes = config.fleet.nodes
    yield from spending.describe_whole(paid.on(costs.bill(nodes)), nodes, hours)
    yield from ("", *account(config, calls, inputs, foreseen.unasked))
    yield from ("", "access", f"  {access(config)}")
    yield from _data(config, inputs, speed)


def _data(config: Config, inputs: Inputs, speed: float | None) -> Iterator[str]:
    """Yields the lines about data and logs."""
    yield from ("", "data", *template_storage.describe(config, speed))
    if makes_file_system(config) and config.fleet.fsx.s3_export:
        to = f"s3://{bucket_of(config, inputs)}/{slug(config.fleet_name)}/"
        yield f"  FSx writes runs and datasets back to {to} as they change"
    kept = f"kept for {LOG_DAYS} days in CloudWatch: ${GB['logs']:.2f} a GB"
    yield from ("", "logs", f"  to the log group {log_group(config)}, {kept}")


def account(config: Config, calls: Calls, inputs: Inputs, unasked: str = "") -> Iterator[str]:
    """Yields obstacles in the account. `unasked`: why the account was not queried, in which case
    the inputs are placeholders.
    """
    if unasked:
        yield f"account: not asked, because {unasked}"
        named = f"the account {inputs.account}, the zone {inputs.zone} and the image {inputs.image}"
        yield f"  {named} are placeholders"
    found = list(checks.here(config, inputs)) if unasked else checks.findings(config, calls, inputs)
    if not unasked:
        yield "account" if found else "account: no obstacle found"
    yield from (f"  {'' if finding.blocks else 'note: '}{finding}" for finding in found)


def access(config: Config) -> str:
    """Describes how SSH reaches the nodes."""
    aws = config.fleet.aws
    if aws.ssm_only:
        return "SSH through SSM Session Manager; no port is open to the outside"
    through = f", through the head, {aws.bastion_type}" if aws.bastion_type else " only"
    return f"SSH from {', '.join(aws.allow_ssh_from)}{through}"
