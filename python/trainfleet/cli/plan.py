"""Verb that plans a config's jobs and estimates their requirements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..backends import backend_of
from ..backends.base import Prospect
from ..config import Config, Derivation
from ..config.layouts import best
from ..launch import preflight, provisioning
from ..launch.calibration import experience_of
from ..launch.command import config_of, plan_of, settings_of
from ..launch.run_location import is_nowhere, runs_programs, say_unheard
from ..plan.estimate import Bill, estimate
from ..plan.job import Artifact
from ..plan.neuron_environment import compiles_ahead
from ..plan.plan import Plan, make_plan
from ..plan.sizing import Wish
from ..report import proposal, sizing_tables
from .variables import Variables, amounts, flag


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
    if wish != Wish():
        _say(sizing_tables.answer(config, wish, bill, out))
        return 0
    prospect = _prospect(config, derived, bill)
    whole = bool(out) or not provisioning.shares_one_machine(config)
    whole = flag(variables, "VERBOSE", default=whole)
    plan, changes = _planned(config, derived, bill, prospect, whole)
    if compiles_ahead(config):
        from ..launch import compiling  # deferred, because it loads the trainer

        print("\n".join(compiling.outlook(config)), end="")
    if out:
        print(f"\nwritten to {out}/: {', '.join(proposal.write(plan, changes, out))}")
    if plan.requests and not prospect.awaited:
        print("\nnext: make train")
    elif config.fleet.hosts or prospect.lines:
        print("\nnext: make setup")
    else:
        print("\nnext: set fleet.hosts, then run make setup")
    return 0


def _prospect(config: Config, derived: Derivation, bill: Bill | None) -> Prospect:
    """Prints the derived settings, the estimate, and the changes that `make setup` would make."""
    layouts = sizing_tables.describe_layouts(config, best(config, sizing_tables.ALTERNATIVES), bill)
    needs = estimate(config, bill, experience_of(config))
    _say([*proposal.describe(config, derived, needs), "", provisioning.inherited(config), *layouts])
    preflight.require(config)
    say_unheard(config)
    prospect = provisioning.prospect(config, needs)
    _say(prospect.lines)
    return prospect


def _planned(
    config: Config, derived: Derivation, bill: Bill | None, prospect: Prospect, whole: bool
) -> tuple[Plan, Sequence[Artifact]]:
    """Prints the changes to the hosts and the requests. The requests are exact if the hosts are
    known.
    """
    if prospect.unasked or is_nowhere(config) or prospect.awaited:
        requests = provisioning.exact(config) if prospect.exact else []
        print("\n".join(proposal.describe_requests(requests, ())))
        makes = "make setup creates them" if prospect.lines else "list them in fleet.hosts"
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
