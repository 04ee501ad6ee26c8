"""The options of sbatch that this program sets: fleet.slurm.options may set others, but not
these.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...config import Config

OURS = {  # option → the key that sets it, or "" for a fixed one
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
# with fleet.exclusive, a job has all of a node's memory
WHOLE_NODES = ("mem", "mem-per-cpu", "mem-per-gpu")


def taken(config: Config) -> dict[str, str]:
    """Returns OURS with what the config adds to it."""
    return OURS | (dict.fromkeys(WHOLE_NODES, "fleet.exclusive") if config.fleet.exclusive else {})


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Yields options that the program already sets. sbatch accepts an abbreviated option
    (getopt_long), so these count too.
    """
    ours = taken(config)
    for option in config.fleet.slurm.options:
        name = option.removeprefix("--").partition("=")[0]
        if known := next((other for other in sorted(ours) if other.startswith(name)), ""):
            says = f"use {ours[known]}" if ours[known] else "remove it"
            yield "fleet.slurm.options", f"{option}: the program sets --{known} itself; {says}"
