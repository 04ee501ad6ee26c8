"""Runs nccom-test, AWS's benchmark of NeuronCore links: first on each node, then over EFA across
all nodes.

Documentation: awsdocs-neuron.readthedocs-hosted.com, tools/neuron-sys-tools/nccom-test (SDK 2.32,
2026-08-21). The multi-node benchmark starts its workers through MPI, so the first node needs
passwordless SSH to the others. Training needs no such access, so a failed login is reported but is
not an error. The benchmark takes minutes, so only `make doctor` runs it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from ..health.neuron_telemetry import Collective, read_collectives
from ..node.placement import PORT
from ..plan.fabric_environment import least_bandwidth
from ..trust.errors import InputError
from .facts import Facts
from .host_results import Finding, Host, HostFailure, Result
from .install_steps import Wanted
from .transport import Transport

TOOL = "/opt/aws/neuron/bin/nccom-test"
BYTES = "256MB"  # all-reduce size, large enough to measure bandwidth rather than latency
SECONDS = 300.0
FABRIC = "check that all EFA interfaces are attached and that the nodes share a placement group"


def is_for(wanted: Wanted) -> bool:
    return wanted.type is not None and wanted.type.kind == "neuron"


def command(ranks: int, hosts: Mapping[str, str] | None = None) -> str:
    """Returns the benchmark command for one node, or for several `hosts` (name → address).

    The first of `hosts` runs the command. `--check` also verifies the sums.
    """
    words = (
        f"{TOOL} allr --nworkers {ranks * len(hosts or '1')} --minbytes {BYTES} --maxbytes {BYTES} "
        "--datatype fp32 --check --non-interactive"
    )
    if not hosts:
        return words
    addresses = list(hosts.values())
    first = f"env NEURON_RT_ROOT_COMM_ID={addresses[0]}:{PORT}"
    return f"{first} {words} --nnodes {len(hosts)} --hosts {shlex.join(addresses)}"


def try_collectives(
    transport: Transport, wanted: Wanted, facts: Mapping[Host, Facts]
) -> tuple[list[str], list[Finding]]:
    """Runs the benchmarks. Returns one line per measurement, and the findings."""
    ranks, hosts = wanted.fleet.ranks_per_node, list(facts)
    answers = transport.run(f"{command(ranks)} 2>&1", timeout=SECONDS, hosts=hosts)
    said, findings = [], list[Finding]()
    then = f"on that host, run: {TOOL} -r {ranks} allr; dmesg"
    for host in hosts:
        found = read(answers.get(host))
        if isinstance(found, str):
            findings.append(Finding(host, "nccom-test", found, then, blames_host=True))
        else:
            said.append(f"{host.name}: {describe(found, ranks)}")
    if findings or len(hosts) < 2:
        return said, findings
    words = command(ranks, {host.name: facts[host].address(host) for host in hosts})
    answers = transport.run(f"{words} 2>&1", timeout=SECONDS, hosts=hosts[:1])
    line, findings = _judge(read(answers.get(hosts[0])), wanted, hosts)
    return [*said, line], findings


def _judge(
    found: Collective | str, wanted: Wanted, hosts: Sequence[Host]
) -> tuple[str, list[Finding]]:
    """Returns a line about the multi-node benchmark, and a finding if its bandwidth is low."""
    if isinstance(found, str):
        then = f"check that {hosts[0].name} can log in to the other nodes"
        return f"the multi-node test has no result: {found}; {then}", []
    count, least = len(hosts), least_bandwidth(wanted.type) or 0.0
    slow = f"an all-reduce over {count} nodes reaches {found.gbs:.1f} GB/s; expected {least:.1f}"
    findings = [Finding(None, "nccom-test", slow, FABRIC)] if found.gbs < least else []
    return f"all {count} nodes: {describe(found, wanted.fleet.ranks_per_node * count)}", findings


def read(answer: Result | HostFailure | None) -> Collective | str:
    """Returns the last measurement in a benchmark's output, or the reason why there is no
    result.
    """
    if not isinstance(answer, Result):
        return answer.message if answer else "no answer"
    try:
        found = read_collectives(answer.stdout.splitlines())[-1]
    except InputError as error:
        return error.what
    if answer.exit_code == 0:
        return found
    return f"exit code {answer.exit_code} after this result: {describe(found, 0)}"


def describe(found: Collective, ranks: int) -> str:
    over = f" over {ranks} cores" if ranks else ""
    size, bus = f"{found.bytes / 2**20:.0f} MiB", f"{found.gbs:.1f} GB/s bus bandwidth"
    return f"an all-reduce of {size}{over} takes {found.microseconds:,.0f} us, {bus}"
