"""sbatch options set by trainfleet, and those set by a site through variables such as
SBATCH_ACCOUNT.

fleet.slurm.options must not contain options that trainfleet sets. The site's environment variables
are read once, when a job is planned. For sbatch, they would override options in the script. The
client therefore runs Slurm commands without them (client.py), and the script contains the resulting
options. As a result, the plan shows these options, and they apply to every start of the job.
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

OURS = {  # option → config key that sets it, or "" if trainfleet hard-codes it
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
# memory options; with fleet.exclusive, trainfleet sets them to give jobs all of a node's memory
WHOLE_NODES = ("mem", "mem-per-cpu", "mem-per-gpu")


def taken(config: Config) -> dict[str, str]:
    """Returns the sbatch options that trainfleet sets for this config."""
    return OURS | (dict.fromkeys(WHOLE_NODES, "fleet.exclusive") if config.fleet.exclusive else {})


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Yields an error for each option that trainfleet also sets.

    This includes abbreviations, which sbatch accepts (getopt_long).
    """
    ours = taken(config)
    for option in config.fleet.slurm.options:
        name = option.removeprefix("--").partition("=")[0]
        if known := next((other for other in sorted(ours) if other.startswith(name)), ""):
            says = f"use {ours[known]}" if ours[known] else "remove it"
            yield "fleet.slurm.options", f"{option}: trainfleet sets --{known} itself; {says}"


SWITCHES, WAIT = "SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH"
NAMED = {  # environment variable → option, if their names differ
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_MEM_PER_NODE": "mem",
    SWITCHES: "switches",
    "SBATCH_TIMELIMIT": "time",
    "SLURM_HINT": "hint",
}
# Options that a site may set. All other variables set one of trainfleet's options, or do not affect
# where and how a job runs.
KNOWN = re.compile(
    "account|acctg-freq|batch|bb|cluster-constraint|constraint|core-spec|cpu-freq|cpus-per-gpu|delay-boot|distribution|gpu-bind|"
    "gpu-freq|gpus|gpus-per-node|gpus-per-socket|gpus-per-task|gres|gres-flags|hint|mem|mem-bind|mem-per-cpu|mem-per-gpu|network|"
    "overcommit|partition|power|prefer|profile|qos|reservation|segment|spread-job|switches|thread-spec|threads-per-core|time|"
    "tres-bind|tres-per-task|use-min-nodes|wait-all-nodes|wckey"
)
FLAGS = ("overcommit", "spread-job", "use-min-nodes")


def apply(config: Config, environment: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Applies the site's sbatch variables to the config. Config keys take precedence.

    Returns the new config, and one note per variable that states the resulting option or why the
    variable is ignored.

    Raises:
        BackendError: a value can't be written to a batch script.
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
    """Returns the sbatch variables from the login environment of the machine with sbatch."""
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
    """Returns the option that the environment variable sets."""
    return NAMED.get(variable, variable.removeprefix("SBATCH_").lower().replace("_", "-"))


def _who_says(config: Config, name: str) -> str:
    """Returns the config key that already sets this option, or "" if the site may set it."""
    slurm, ours = config.fleet.slurm, taken(config)
    if any(f"{given}=".startswith(f"--{name}=") for given in slurm.options):
        return "fleet.slurm.options"
    key = ours.get(name, "")
    is_said = name in ours and getattr(slurm, key.removeprefix("fleet.slurm."), key) is not None
    return key or "trainfleet" if is_said or not KNOWN.fullmatch(name) else ""
