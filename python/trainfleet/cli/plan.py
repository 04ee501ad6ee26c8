"""make plan: the requests, and the derived values with their reasons; OUT=folder receives every
file and request.
"""

from __future__ import annotations

from pathlib import Path

from ..backends import backend_of
from ..config.layouts import best
from ..launch import preflight, provisioning
from ..launch.calibration import experience_of
from ..launch.command import config_of, plan_of, settings_of
from ..launch.run_location import is_nowhere, runs_programs, say_unheard
from ..plan.estimate import estimate
from ..plan.neuron_environment import compiles_ahead
from ..plan.plan import make_plan
from ..plan.sizing import Wish
from ..report import proposal, sizing_tables
from .variables import Variables, amounts, flag


def main(variables: Variables, started: float) -> int:
    if out := Path(variables["OUT"]) if "OUT" in variables else None:
        proposal.require_own(out)
    config, derived = config_of(settings_of(variables))
    bill = backend_of(config).bill()
    if (wish := Wish(*amounts(variables, "DAYS", "USD", "TOKENS"))) != Wish():
        print("\n".join(sizing_tables.answer(config, wish, bill, out)))
        return 0
    layouts = sizing_tables.describe_layouts(config, best(config, sizing_tables.ALTERNATIVES), bill)
    needs = estimate(config, bill, experience_of(config))
    print(
        "\n".join(
            [
                *proposal.describe(config, derived, needs),
                "",
                provisioning.inherited(config),
                *layouts,
            ]
        )
    )
    preflight.require(config)
    say_unheard(config)
    prospect = provisioning.prospect(config, needs)
    prospects, changes, awaits = prospect.lines, prospect.changes, prospect.awaited
    print("\n".join(prospects), end="\n" if prospects else "")
    if prospect.unasked or is_nowhere(config) or awaits:
        plan = make_plan(
            config,
            derived,
            requests := provisioning.exact(config) if prospect.exact else [],
            [],
            bill,
        )
        print("\n".join(proposal.describe_requests(requests, ())))
        makes = "make setup makes" if prospects else "fleet.hosts names"
        print(
            "\n${...} is filled in by make setup"
            if awaits
            else f"\nhosts: none yet, so no command is exact; {makes} them"
        )
    elif runs_programs(config):
        plan = make_plan(config, derived, [], [], bill)
        print(
            "\nhosts: not asked, so no command is exact: a plan does not run the ProxyCommand of "
            "fleet.ssh.config"
        )
    else:
        changes = changes or provisioning.planned(config)
        print("\n".join(proposal.describe_changes(changes)), end="\n" if changes else "")
        plan = plan_of(config, derived)
        whole = flag(
            variables, "VERBOSE", default=bool(out) or not provisioning.shares_one_machine(config)
        )
        print("\n".join(proposal.describe_requests(plan.requests, plan.notes, whole)))
    if compiles_ahead(config):
        from ..launch import compiling  # loads the trainer

        print("\n".join(compiling.outlook(config)), end="")
    if out:
        print(f"\nwritten to {out}/: {', '.join(proposal.write(plan, changes, out))}")
    setup = (
        "make setup" if config.fleet.hosts or prospects else "write fleet.hosts, then make setup"
    )
    print(f"\nnext: {'make train' if plan.requests and not awaits else setup}")
    return 0
