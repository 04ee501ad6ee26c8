"""sbatch options: those that this program sets, which fleet.slurm.options may not set, and those of
a site. A site sets options by variables such as SBATCH_ACCOUNT, which are read once, when a job is
planned.

In sbatch, such variables override the options of a script. So the client's commands run without
them (client.py), and the script contains the options that apply. A plan therefore shows them, and
every start of the job has them.

Source: slurm.schedmd.com, sbatch.html, INPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...config import Config
from ...trust import untrusted_input
from ...trust.errors import BackendError
from .client import SlurmClient

OURS = {  # option → the key that sets it, or "" if its value is fixed
    "job-name": "name",
    "nodes": "fleet.nodes",
    "exclusive": "fleet.exclusive",
    "partition": "fleet.slurm.partition",
    "account": "fleet.slurm.account",
    "qos": "fleet.slurm.qos",
    "time": "fleet.slurm.time_limit_minutes",
    "constraint": "fleet.slurm.constraint",
    "reservation": "fleet.slurm.reservation",
    "gres": "fleet.slurm.gres",
    "signal": "fleet.slurm.warn_before_seconds",
    "requeue": "fleet.slurm.requeue",
    "no-requeue": "fleet.slurm.requeue",
    "container": "fleet.slurm.container_runtime",
    "container-id": "fleet.slurm.container_runtime",
    "chdir": "fleet.shared_folder",
    **dict.fromkeys(
        (
            "ntasks",
            "ntasks-per-node",
            "tasks-per-node",
            "exclude",
            "dependency",
            "kill-on-invalid-dep",
        ),
        "",
    ),
    **dict.fromkeys(
        (
            "output",
            "error",
            "input",
            "open-mode",
            "comment",
            "export",
            "export-file",
            "get-user-env",
        ),
        "",
    ),
    **dict.fromkeys(
        ("array", "wrap", "test-only", "wait", "parsable", "quiet", "help", "usage", "version"), ""
    ),
    **dict.fromkeys(("clusters", "no-kill", "uid", "gid", "ignore-pbs"), ""),
}
# Memory options. With fleet.exclusive, the program sets them, because a job then has all of a
# node's memory.
WHOLE_NODES = ("mem", "mem-per-cpu", "mem-per-gpu")


def taken(config: Config) -> dict[str, str]:
    """Returns the options that the program sets for this config."""
    return OURS | (dict.fromkeys(WHOLE_NODES, "fleet.exclusive") if config.fleet.exclusive else {})


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Yields options that the program already sets. Abbreviated options count too, because sbatch
    accepts them (getopt_long).
    """
    ours = taken(config)
    for option in config.fleet.slurm.options:
        name = option.removeprefix("--").partition("=")[0]
        if known := next((other for other in sorted(ours) if other.startswith(name)), ""):
            says = f"use {ours[known]}" if ours[known] else "remove it"
            yield "fleet.slurm.options", f"{option}: trainfleet sets --{known} itself; {says}"


SWITCHES, WAIT = "SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH"
NAMED = {  # variable → option, if their names differ
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_MEM_PER_NODE": "mem",
    SWITCHES: "switches",
    "SBATCH_TIMELIMIT": "time",
    "SLURM_HINT": "hint",
}
# Options that a site may set. Other variables set the program's own options, or affect neither
# where nor how a job runs.
KNOWN = re.compile(
    "account|acctg-freq|batch|bb|cluster-constraint|constraint|core-spec|cpu-freq|cpus-per-gpu|delay-boot|distribution|gpu-bind|"
    "gpu-freq|gpus|gpus-per-node|gpus-per-socket|gpus-per-task|gres|gres-flags|hint|mem|mem-bind|mem-per-cpu|mem-per-gpu|network|"
    "overcommit|partition|power|prefer|profile|qos|reservation|segment|spread-job|switches|thread-spec|threads-per-core|time|"
    "tres-bind|tres-per-task|use-min-nodes|wait-all-nodes|wckey"
)
FLAGS = ("overcommit", "spread-job", "use-min-nodes")


def apply(config: Config, environment: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Returns the config with the site's value for each unset key. Also returns a note for each
    variable that states what the variable sets, or that it is not used.

    Raises:
        BackendError: a value can't be written to a script.
    """
    slurm, notes = config.fleet.slurm, list[str]()
    for variable, value in sorted(environment.items()):
        name = option_of(variable)
        if value in ("no", "0") if name in FLAGS else not value:
            continue
        if key := _who_says(config, name):
            notes.append(f"{variable} is ignored: {key} sets this option")
            continue
        if re.search(r"[^!-~]|[\\'\"#]", value):
            what, then = (
                f"{untrusted_input.show(value)} can't be written to a batch script",
                f"unset {variable}",
            )
            raise BackendError(
                what, where=variable, next=f"{then}, and set the key in fleet.slurm instead"
            )
        option = f"--{name}" if name in FLAGS else f"--{name}={value}"
        notes.append(f"{variable} sets {option}")
        own: dict[str, Any] = (
            {"partition": value} if name == "partition" else {"options": (*slurm.options, option)}
        )
        slurm = replace(slurm, **own)
    return replace(config, fleet=replace(config.fleet, slurm=slurm)), notes


def read(engine: SlurmClient) -> dict[str, str]:
    """Returns the variables for sbatch from a login environment on the machine that has sbatch."""
    entries = engine.ask(["env", "-0"], "", None).out.split("\0")
    found = {
        name.rpartition("\n")[2]: value
        for name, _, value in (entry.partition("=") for entry in entries)
    }
    said = {
        name: value
        for name, value in found.items()
        if re.fullmatch("SBATCH_[A-Z0-9_]+|SLURM_HINT", name)
    }
    if (wait := said.pop(WAIT, "")) and SWITCHES in said:  # WAIT has no effect without SWITCHES
        said[SWITCHES] += f"@{wait}"
    return said


def option_of(variable: str) -> str:
    """Returns the name of the option that a variable sets."""
    return NAMED.get(variable, variable.removeprefix("SBATCH_").lower().replace("_", "-"))


def _who_says(config: Config, name: str) -> str:
    """Returns the key that already sets this option; "" if the site may set it."""
    slurm, ours = config.fleet.slurm, taken(config)
    if any(f"{given}=".startswith(f"--{name}=") for given in slurm.options):
        return "fleet.slurm.options"
    key = ours.get(name, "")
    is_said = name in ours and getattr(slurm, key.removeprefix("fleet.slurm."), key) is not None
    return key or "trainfleet" if is_said or not KNOWN.fullmatch(name) else ""
