"""Preflight inside a Slurm job's allocation, run before the ranks start (fleet.slurm.preflight;
backends/slurm/sbatch.py).

python -m trainfleet.launch.admission               on every node: prints the node's facts
                                                    (hosts/facts.sh)
python -m trainfleet.launch.admission FOLDER START  on the first node, after the bandwidth test:
                                                    exits with 0 if the ranks may start

FOLDER is the job's folder, and START is its subfolder for the current start. Each finding goes to
the affected node's log. The verdict reads these logs (watch/catalogue/trainfleet.yaml), so later
attempts exclude faulty hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..backends import job_starts
from ..config import Config, load_resolved
from ..config.host_list import Host
from ..health.heartbeat import read_end
from ..hosts import preflight
from ..hosts.facts import SCRIPT, Facts, parse
from ..hosts.fleet import wanted_of
from ..hosts.host_results import ALLOCATED, Finding, Implausible, implausible
from ..hosts.node_checks import judge
from ..node.placement import expand_hosts
from ..plan.fabric_environment import least_bandwidth
from ..process.node_log import Log
from ..run.run_folder import Run, node_log
from ..trust import safe_output
from ..trust.errors import telling

LARGEST = 1 << 26  # maximum bytes to read from the end of a file
OPEN, SHUT = 0, 69  # exit codes: 0 lets the ranks start; 69 (EX_UNAVAILABLE) doesn't
NODES = "SLURM_JOB_NODELIST"


@telling
def main(arguments: list[str]) -> int:
    hosts = tuple(Host(name, name) for name in expand_hosts(os.environ[NODES]))
    if not arguments:
        words = [
            "sh",
            str(SCRIPT),
            str(Path.cwd()),
            sys.executable,
            "",
            *(host.name for host in hosts),
        ]
        return subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode
    folder, start = Path(arguments[0]), Path(arguments[1])
    config = load_resolved(Run(folder).config)
    report = examine(config, hosts, start)
    print("\n".join(report.describe(least_bandwidth(config.fleet.node_type))))
    for finding in report.findings:
        leave(folder, hosts, finding)
    return OPEN if report.passed else SHUT


def examine(config: Config, hosts: Sequence[Host], start: Path) -> preflight.PreflightReport:
    """Returns the preflight report for a job's nodes, based on the files they wrote to `start`."""
    facts, findings = dict[Host, Facts](), list[Finding]()
    for node, host in enumerate(hosts):
        try:
            facts[host] = parse(_text(job_starts.facts_of(start, node)))
        except Implausible as error:
            findings.append(
                Finding(
                    host,
                    "facts",
                    implausible(error, "facts.sh output").message,
                    "run sinfo -R to see its state, or use another node",
                )
            )
    config = replace(config, fleet=replace(config.fleet, shared_folder=str(Path.cwd())))
    findings += judge(ALLOCATED, facts, wanted_of(config))
    said = [
        _plain(node_log(job_starts.preflight_folder(start), node)) for node in range(len(hosts))
    ]
    bandwidth, more = preflight.judge_output(
        said[0].splitlines(), config.fleet.node_type, hosts
    ) or (
        None,
        _failed(said, hosts),
    )
    return preflight.PreflightReport(
        facts, (*findings, *more), bandwidth, time.time() - start.stat().st_ctime
    )


def leave(folder: Path, hosts: Sequence[Host], finding: Finding) -> None:
    """Prints a finding and appends it to its node's log, or to the first node's log if it affects
    all nodes.
    """
    verdict = (
        "failed"
        if finding.host is None
        else "found a hardware fault"
        if finding.blames_host
        else "found an unfit node"
    )
    print(f"{finding.host or 'all nodes'}: {finding}")
    log = Log(node_log(folder, hosts.index(finding.host) if finding.host else 0))
    log.note("watch", f"the preflight {verdict}: {finding.message}")
    log.close()


def _failed(said: Sequence[str], hosts: Sequence[Host]) -> list[Finding]:
    """Returns findings explaining why the bandwidth test produced no result, quoting each host's
    last error.
    """
    errors = {
        host: words
        for host, text in zip(hosts, said, strict=True)
        if (words := preflight.last_error(text))
    }
    if not errors:
        return [
            Finding(
                None, "fabric", "the bandwidth test ended without a result", "run make train again"
            )
        ]
    words = "; ".join(f"{host}: {error[:200]}" for host, error in errors.items())
    return [
        Finding(None, "fabric", f"the bandwidth test failed: {words}", "run make logs and sinfo -R")
    ]


def _plain(log: Path) -> str:
    """Returns a log's lines without their timestamps."""
    return "\n".join(line.partition(" | ")[2] for line in _text(log).splitlines())


def _text(path: Path) -> str:
    """Returns the end of the file's text, or "" if the file is missing."""
    try:
        return read_end(path, LARGEST)
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    safe_output.install()
    sys.exit(main(sys.argv[1:]))
