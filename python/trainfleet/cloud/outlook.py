"""What `make plan` says of a fleet on AWS: what would change, what it costs, what stands against it, how tokens are read."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Config
from . import changeset, checks, reading, spending
from .fleet import Fleet, Foreseen
from .prices import Prices


def describe(config: Config, fleet: Fleet, foreseen: Foreseen, hours: float | None, speed: float | None) -> Iterator[str]:
    """The lines. `hours`: of the run; `speed`: its tokens per second; None where nobody knows."""
    prices, inputs = Prices(fleet.calls), foreseen.inputs
    rows = spending.rows(config, prices, inputs.zone)
    yield from ("", f"stack {fleet.stack.name} in {inputs.zone}")
    yield from changeset.describe(foreseen.changes, not foreseen.before)
    yield from ("", "dollars an hour", *spending.describe(rows, hours))
    if prices.trouble:
        yield f"  the Pricing API was not of use: {prices.trouble}"
    found = checks.findings(config, fleet.calls, inputs)
    yield from ("", "account: nothing stands against it" if not found else "account")
    yield from (f"  {'' if finding.blocks else 'note: '}{finding}" for finding in found)
    yield from ("", "data", *reading.describe(config, speed))
