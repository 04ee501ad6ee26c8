"""Builds a plan: the derived values, the estimate and the exact requests. Has no side effects."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ..config import Config, Derived, dump_resolved
from ..trust.errors import ConfigError
from .estimate import Bill, Estimate, Experience, estimate
from .job import Artifact, Request


@dataclass(frozen=True)
class Plan:
    """Everything that a launch will do, in order, with the derived values and the estimate."""

    config: Config
    derived: tuple[Derived, ...]
    estimate: Estimate
    requests: tuple[Request, ...]
    notes: tuple[str, ...]
    asked: str = ""  # the user's config, as YAML


def make_plan(
    config: Config,
    derived: list[Derived],
    requests: list[Request],
    notes: list[str],
    bill: Bill | None,
    experience: Experience | None = None,
    asked: str = "",
) -> Plan:
    """Builds the plan for these requests. `bill` is the fleet's cost, or None if unknown.

    Raises:
        ConfigError: the estimate exceeds budget.max_usd, or the limit can't be enforced because the
            fleet's price is unknown.
    """
    needs = estimate(config, bill, experience)
    if problem := _over_budget(config, needs):
        raise ConfigError.of(
            "budget.max_usd",
            problem,
            next="raise it, or set null for no limit; run make plan to see the costs",
        )
    return Plan(config, tuple(derived), needs, tuple(requests), tuple(notes), asked)


def degrees(config: Config) -> str:
    """Formats a config's parallelism degrees, as in `32 data-parallel (state over 8, ZeRO 1) x 4
    tensor`. Omits other degrees of 1.
    """
    layout = config.train.parallelism
    state = f" (state over {layout.fsdp}, ZeRO {layout.zero_stage})" if layout.fsdp > 1 else ""
    others = [
        f"{degree} {name}"
        for name in ("tensor", "pipeline", "context")
        if (degree := getattr(layout, name)) > 1
    ]
    return " x ".join([f"{config.data_parallel} data-parallel{state}", *others])


def _over_budget(config: Config, needs: Estimate) -> str:
    limit = config.budget.max_usd
    if limit is None:
        return ""
    if needs.bill is None:
        return (
            f"${limit:,.2f}: can't be enforced, because the price of a host is unknown; set "
            "fleet.accelerator.usd_per_hour"
        )
    if needs.bill.is_free and config.fleet.node_type and config.fleet.node_type.owned:
        free = "your machines cost nothing until you set fleet.accelerator.usd_per_hour"
        return f"${limit:,.2f}: can't be enforced, because {free}"
    if needs.around > limit:
        ahead = f"{needs.bill.paid_for}, " if needs.bill.paid else ""
        return (
            f"{ahead}set-up and idle time are already estimated at ${needs.around:,.2f}, over "
            f"the limit of ${limit:,.2f}"
        )
    if needs.usd is None or needs.usd <= limit:
        # without an estimate, watch/budget.py stops the run when it reaches the limit
        return ""
    fit = int(config.train.steps * (limit - needs.around) / (needs.usd - needs.around))
    with_them = f", ${needs.around:,.2f} of it for set-up and idle time" if needs.around else ""
    what = f"the run is estimated at ${needs.usd:,.2f}{with_them}, over the limit of ${limit:,.2f}"
    return f"{what}; train.steps: {fit} fits it"


def files_of(plan: Plan, changes: Iterable[Artifact]) -> dict[str, str]:
    """Returns the contents of a plan folder by file name: the resolved config, the plan as JSON,
    and all artifacts.
    """
    record = {
        "derived": [asdict(row) for row in plan.derived],
        "estimate": asdict(plan.estimate),
        "requests": [request.record() for request in plan.requests],
    }
    files = {
        "config.yaml": dump_resolved(plan.config),
        "plan.json": json.dumps(record, indent=2) + "\n",
    }
    files |= {
        f"{request.job.kind}-{artifact.name}": artifact.text
        for request in plan.requests
        for artifact in request.artifacts
    }
    return files | {artifact.name: artifact.text for artifact in changes}
