"""Verb that plans a config's jobs and estimates their requirements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..backends import backend_of, is_guest, time_limits
from ..backends.base import Prospect
from ..config import Config, Derivation, Settings
from ..config.layouts import best
from ..hardware import node_types
from ..launch import preflight, provisioning
from ..launch.calibration import experience_of
from ..launch.command import config_of, elsewhere, on_type, plan_of, settings_of
from ..launch.run_location import is_nowhere, runs_programs, say_unheard
from ..plan import sizing
from ..plan.estimate import Bill, estimate
from ..plan.job import Artifact, compiles_ahead
from ..plan.plan import Plan, make_plan
from ..plan.sizing import Bid, Size, Wish
from ..report import proposal, sizing_tables
from ..trust.errors import ConfigError
from ..trust.safe_output import SIZE
from .variables import Variables, amounts, flag, typed


def plan(variables: Variables, started: float) -> int:
    """Prints the derived settings with reasons, the estimates and the requests. OUT=folder writes
    all files and requests to a folder.
    """
    out = Path(variables["OUT"]) if "OUT" in variables else None
    if out:
        proposal.require_own(out)
    config, derived = config_of(settings_of(variables))
    bill = backend_of(config).bill()
    wish = Wish(*amounts(variables, "DAYS", "USD", "TOKENS"))
    if flag(variables, "JSON"):
        return _emit(variables, config, derived, bill)
    if wish != Wish() or flag(variables, "ANY"):
        return _compare(variables, config, bill, wish)
    prospect = _prospect(config, derived, bill)
    whole = flag(variables, "VERBOSE", default=bool(out))
    plan, changes = _planned(config, derived, bill, prospect, whole)
    if compiles_ahead(config):
        from ..launch import compiling  # imported here, because it loads the trainer

        print("\n".join(compiling.outlook(config)), end="")
    if out:
        print(f"\nwritten to {out}/: {', '.join(proposal.write(plan, changes, out))}")
    print(f"\nnext: {_next(plan, prospect)}")
    return 0


def _compare(variables: Variables, config: Config, bill: Bill | None, wish: Wish) -> int:
    """Prints a comparison of fleet sizes, or of all machines (ANY=1)."""
    if "OUT" in variables:
        message = "saves the plan of one fleet, not a comparison of fleets"
        raise ConfigError.of("OUT", message, next="make plan OUT=plan")
    sizes = _sizes(variables, config, bill, wish)
    _say(_machines(variables, config, wish) if flag(variables, "ANY") else sizes)
    return 0


def _sizes(variables: Variables, config: Config, bill: Bill | None, wish: Wish) -> Iterator[str]:
    """Yields a comparison of fleet sizes, followed by the command that plans the answer."""
    found = sizing.sizes(config, wish, bill)
    chosen = sizing.answer(found, wish, config.fleet.nodes)
    yield from sizing_tables.describe_sizes(config, found, chosen, wish)
    yield from ("", _then(variables, config, chosen, variables.get("SET", "")))


def _then(variables: Variables, config: Config, size: Size, settings: str) -> str:
    """Returns the command that plans a size with its number of tokens and a budget for them."""
    changes = {"train.steps": round(size.tokens / config.step_tokens)}
    if (usd := size.usd or 0) > (config.budget.max_usd or usd):
        changes["budget.max_usd"] = round(usd * 1.1)
    settings = SIZE.sub("", settings)
    for key, value in changes.items():
        settings = f"{re.sub(rf'(^| ){re.escape(key)}=[^ ]+', '', settings)} {key}={value}"
    words = variables | {"SET": settings.strip(), "NODES": str(size.nodes)}
    return f"next: make plan{typed(words)}"


def _next(plan: Plan, prospect: Prospect) -> str:
    if plan.requests and not prospect.awaited:
        return "make train"
    if is_guest(plan.config):
        return f"set up the machines with the config {plan.config.fleet_name}, then make train"
    if plan.config.fleet.hosts or prospect.lines:
        return "make setup"
    return "set fleet.hosts, then run make setup"


def _machines(variables: Variables, config: Config, wish: Wish) -> Iterator[str]:
    """Yields a comparison of all node types, followed by the command that selects the best one.

    Raises:
        ConfigError: TOKENS is missing, or no machine is within the limits.
    """
    if wish.tokens is None:
        what = "compares machines for a number of tokens; set TOKENS too"
        raise ConfigError.of("ANY", what, next="make plan TOKENS=1e12 ANY=1")
    sizing.require_possible(config, wish)
    settings = elsewhere(settings_of(variables), config)
    found, absent = _bids(config, settings, wish)
    if not found:
        what = "no machine can train on so many tokens within DAYS and USD"
        raise ConfigError.of("ANY", what, next=f"make plan TOKENS={wish.tokens:g} ANY=1")
    yield from sizing_tables.describe_machines(config, found, absent, wish)
    if provisioning.shares_one_machine(config):
        yield "        the next command assumes a backend; any other with such machines is as fast"
    best = sizing.best(found)
    kind = "" if best.tariff.terms == "own" else f"fleet.instance_type={best.name}"
    yield from ("", _then(variables, config, best.size, f"{settings.set} {kind}".strip()))


def _bids(config: Config, settings: Settings, wish: Wish) -> tuple[list[Bid], dict[str, str]]:
    """Returns bids for the user's own machines and all EC2 instance types, and for each type
    without a bid, the reason.
    """
    own, found, absent = config.fleet.node_type, list[Bid](), dict[str, str]()
    types = [row for row in node_types.INSTANCE_TYPES.values() if row.accelerator]
    for row in [*([own] if own and own.owned else []), *types]:
        try:
            found += sizing.bids(config if row is own else on_type(settings, row.name), wish)
        except ConfigError as error:
            first = error.problems[0]
            absent[row.name] = f"{first.key}: {first.message}" if first.key else first.message
    return found, absent


def _emit(variables: Variables, config: Config, derived: Derivation, bill: Bill | None) -> int:
    """Prints only the estimate, as JSON."""
    from ..report import json_output  # imported here, because other plans do not need it

    if {"ANY", "DAYS", "OUT", "TOKENS", "USD"} & {*variables}:
        message = "can't be combined with ANY, DAYS, OUT, TOKENS or USD"
        raise ConfigError.of("JSON", message, next="make plan JSON=1")
    needs = estimate(config, bill, experience_of(config))
    json_output.emit(json_output.plan_of(config, derived, needs))
    return 0


def _prospect(config: Config, derived: Derivation, bill: Bill | None) -> Prospect:
    """Prints the derived settings, the estimate, and the changes that `make setup` would make."""
    layouts = sizing_tables.describe_layouts(config, best(config, sizing_tables.ALTERNATIVES), bill)
    needs = estimate(config, bill, experience_of(config))
    limits = [
        f"warning: {key} {hours:g} ends the run before the predicted time"
        for key, hours in time_limits(config)
        if hours * 3600 < (needs.elapsed or 0)
    ]
    _say(
        [
            *proposal.describe(config, derived, needs),
            *limits,
            "",
            provisioning.inherited(config),
            *layouts,
        ]
    )
    preflight.require(config)
    say_unheard(config)
    prospect = provisioning.prospect(config, needs)
    _say(prospect.lines)
    return prospect


def _planned(
    config: Config, derived: Derivation, bill: Bill | None, prospect: Prospect, whole: bool
) -> tuple[Plan, Sequence[Artifact]]:
    """Prints the changes to the hosts, and the requests, which are exact only if the hosts are
    known. Returns the plan and the changes.
    """
    if prospect.unasked or is_nowhere(config) or prospect.awaited:
        requests = provisioning.exact(config) if prospect.exact else []
        print("\n".join(proposal.describe_requests(requests, (), whole)))
        whose = " with their config" * is_guest(config)
        makes = f"make setup creates them{whose}" if prospect.lines else "list them in fleet.hosts"
        print(
            "\nmake setup fills in ${...}"
            if prospect.awaited
            else f"\nhosts: none yet, so the commands are not exact; {makes}"
        )
        return make_plan(config, derived, requests, [], bill), prospect.changes
    if runs_programs(config):
        print(
            "\nhosts: not queried, so the commands are not exact; a plan does not run the "
            "ProxyCommand of fleet.ssh.config"
        )
        return make_plan(config, derived, [], [], bill), prospect.changes
    changes = prospect.changes or provisioning.planned(config)
    _say(proposal.describe_changes(changes))
    plan = plan_of(config, derived)
    print("\n".join(proposal.describe_requests(plan.requests, plan.notes, whole)))
    return plan, changes


def _say(lines: Iterable[str]) -> None:
    if text := "\n".join(lines):
        print(text)
