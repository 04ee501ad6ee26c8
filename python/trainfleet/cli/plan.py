"""make plan: what would run, with what was derived and why; OUT=folder receives every file and request."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ..config import dump_resolved, load
from ..plan.plan import Plan
from ..runs import write_atomic
from .settings import plan_for, settings_of
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    scripts = plan_hosts(variables)
    for name, text in scripts.items() if "OUT" in variables else ():
        write_atomic(Path(variables["OUT"], name), text)
    plan = plan_for(variables)
    print(describe(plan))
    if "OUT" in variables:
        folder = Path(variables["OUT"])
        print(f"\nwritten to {folder}/: {', '.join([*write(plan, folder), *scripts])}")
    print("\nnext: make train")
    return 0


def plan_hosts(variables: Variables) -> dict[str, str]:
    """On a fleet of hosts: file name → the script by which make setup would mend that host now. They are printed too."""
    config, _ = load(settings_of(variables))
    if not config.fleet.reached_by_ssh:
        return {}
    from ..nodes.setup import commands  # loads SSH

    scripts = commands(config)
    for name, text in scripts.items():
        steps = [line for line in text.splitlines() if not line.startswith(("#!", "set -e"))]
        print("\n".join([f"{name}{'' if steps else ': nothing to do'}", *(f"  {line}" for line in steps)]))
    return scripts


def describe(plan: Plan) -> str:
    """The plan for people: aligned, in the order in which it will happen."""
    config = plan.config
    world = f"{config.fleet.nodes} nodes x {config.fleet.ranks_per_node} ranks"
    lines = [f"{config.name}: {config.train.steps:,} steps on the {config.fleet.backend} backend, {world}", "", "derived"]
    width = max((len(row.key) for row in plan.derived), default=0)
    lines += [f"  {row.key:{width}}  {row.value!s:>8}  {row.why}" for row in plan.derived]
    lines += ["", "estimate", *(f"  {name:10} {text}" for name, text in _estimates(plan))]
    lines += ["", "data", *(f"  {note}" for note in plan.notes)] if plan.notes else []
    for request in plan.requests:
        lines += ["", f"{request.job.kind} ({request.job.name})"]
        lines += [
            f"  node {command.node}{f' on {command.host}' if command.host else ''}: {command.shell()}\n          > {command.log}"
            for command in request.commands
        ]
    return "\n".join(lines)


def _estimates(plan: Plan) -> list[tuple[str, str]]:
    needs, train = plan.estimate, plan.config.train
    seconds = (
        "unknown on this hardware"
        if needs.seconds is None
        else f"about {duration(needs.seconds)}, at 40 % of the hardware's peak"
    )
    usd = (
        "unknown: no list price"
        if needs.usd is None
        else f"${needs.usd:,.2f}" + (" (this machine)" if not plan.config.fleet.instance_type else "")
    )
    return [
        ("parameters", f"{needs.parameters / 1e6:,.2f} M"),
        ("memory", f"{needs.memory_bytes / 2**30:,.2f} GiB a rank"),
        ("work", f"{needs.step_flops:.2e} FLOPs a step, {train.global_batch * train.sequence_length:,} tokens a step"),
        ("time", seconds),
        ("cost", usd),
    ]


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`, `12 days`."""
    for size, unit, digits in ((86400 * 2, "days", 1), (7200, "h", 1), (100, "min", 0)):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def write(plan: Plan, folder: Path) -> list[str]:
    """The names of the files left in `folder`: the resolved config, the plan as data, and a script a node and job."""
    files = {"config.yaml": dump_resolved(plan.config), "plan.json": json.dumps(_record(plan), indent=2) + "\n"}
    for request in plan.requests:
        for command in request.commands:
            files[f"{request.job.kind}-node-{command.node}.sh"] = f"#!/bin/sh\n{command.shell()}\n"
    for name, text in files.items():
        write_atomic(folder / name, text)
    return list(files)


def _record(plan: Plan) -> dict[str, object]:
    requests = [
        {
            "kind": request.job.kind,
            "node": command.node,
            "environment": command.environment,
            "argv": command.argv,
            "log": str(command.log),
        }
        for request in plan.requests
        for command in request.commands
    ]
    return {"derived": [asdict(row) for row in plan.derived], "estimate": asdict(plan.estimate), "requests": requests}
