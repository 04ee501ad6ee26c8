"""Preflight: time-limited tests that nodes must pass before a multi-node job starts.

First, the nodes' facts are checked (node_checks.py). The hosts that pass must all see the same
shared folder and be able to connect to the head. An all-reduce must then reach the bandwidth
expected for the instance type. If it does not, the nodes are tested in pairs to find the slow one.
"""

from __future__ import annotations

import secrets
import shlex
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from ..config import Config
from ..config.types import Fleet
from ..hardware.node_types import NodeType
from ..node.placement import Placement, lone_rank, torchrun
from ..plan.fabric_environment import NCCL_LOGS, fabric_environment, judge_nccl, least_bandwidth
from ..process.install_paths import python_path
from ..process.rdma_adapters import fastest, listed
from ..trust.validation import Count, Range
from . import facts as reading
from .facts import Facts
from .fleet import run_together, wanted_of
from .host_results import (
    LAUNCH,
    Answers,
    Finding,
    Host,
    Implausible,
    Result,
    fitted,
    heard,
    implausible,
    sound,
)
from .install_steps import Wanted
from .node_checks import exposed, judge
from .tar import code_files, content_hash
from .transport import Transport

# bandwidth test port, one below torchrun's default so that a running job does not block it
PORT = 29399
CONNECT_SECONDS = 10
# timeout in seconds, mostly for importing torch on all nodes concurrently
FABRIC_SECONDS = 150.0
BANDWIDTH = "== bandwidth "
SLOW_SHARE = 0.5  # fraction of the median node's bandwidth below which a node is reported as slow
ALL_REDUCE_BYTES = {"cuda": 1 << 30, "neuron": 1 << 28, "cpu": 1 << 24}


Rate = Annotated[float, Range(0, 1e6)]  # GB/s


@dataclass(frozen=True)
class Bandwidth:
    """Result of the bandwidth test.

    `bandwidth` is the bus bandwidth of an all-reduce of `bytes` bytes. Each entry of `pairs`
    contains two nodes and the bandwidth between them.
    """

    bandwidth: Rate
    bytes: Count
    nodes: Count
    pairs: tuple[tuple[Count, Count, Rate], ...]


@dataclass(frozen=True)
class PreflightReport:
    """Facts and findings of a preflight, which has passed if there are no findings."""

    facts: dict[Host, Facts]
    findings: tuple[Finding, ...]
    bandwidth: Bandwidth | None
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.findings

    def against(self, host: Host) -> list[Finding]:
        return [finding for finding in self.findings if finding.host == host]

    def describe(self, least: float | None) -> Iterator[str]:
        """Yields lines about the fleet as a whole: its bandwidth, and findings without a host.

        `least` is the expected bandwidth in GB/s.
        """
        if found := self.bandwidth:
            expected = f", expected at least {least:.1f}" if least else ""
            yield (
                f"all-reduce over {found.nodes} nodes: {found.bandwidth:.2f} GB/s bus "
                f"bandwidth{expected}"
            )
        yield from exposed(self.facts)
        yield from (f"fleet: {finding}" for finding in self.findings if finding.host is None)
        yield f"checked {len(self.facts)} hosts in {self.seconds:.1f} s"


def examine(
    transport: Transport,
    config: Config,
    *,
    fabric: bool = True,
    hosts: Sequence[Host] | None = None,
    links: bool = False,
) -> PreflightReport:
    """Runs the preflight on `hosts`, or on all hosts.

    `fabric` enables the bandwidth test, which takes about as long as importing torch. `links` also
    reads the GPU topology.
    """
    began = time.monotonic()
    wanted = wanted_of(config)
    facts, findings = heard(reading.read(transport, config, hosts, links))
    findings += judge(LAUNCH, facts, wanted)
    bandwidth = None
    for test in (try_shared_folder, try_port):
        findings += test(transport, wanted, sound(facts, findings))
    fit = sound(facts, findings)
    if fabric and len(fit) > 1:
        bandwidth, more = try_fabric(transport, wanted, fit)
        findings += more
    return PreflightReport(facts, tuple(findings), bandwidth, time.monotonic() - began)


def try_shared_folder(
    transport: Transport, wanted: Wanted, facts: dict[Host, Facts]
) -> list[Finding]:
    """Checks that a token written by one node to the shared folder can be read by all others.

    The same path could otherwise refer to different disks.
    """
    folder = wanted.fleet.shared_folder
    if not folder or len(facts) < 2:
        return []
    writer, *readers = facts
    token, file = secrets.token_hex(8), shlex.quote(f"{folder}/.token")
    written = transport.run(f"echo {token} > {file}.{token}", timeout=20, hosts=[writer])
    if written.failed:
        return [
            Finding(
                writer,
                "shared",
                f"can't write to {folder}",
                "on that host, run: df -h; mount | grep lustre",
            )
        ]
    answers = transport.run(f"cat {file}.{token}", timeout=20, hosts=readers)
    transport.run(f"rm -f {file}.{token}", timeout=20, hosts=[writer])
    blind = [host for host in readers if token not in _printed(answers, host)]
    message = f"its {folder} does not have the file that {writer} wrote; the nodes do not share it"
    return [
        Finding(host, "shared", message, "on that host, run: mount | grep lustre; then make setup")
        for host in blind
    ]


def try_port(transport: Transport, wanted: Wanted, facts: dict[Host, Facts]) -> list[Finding]:
    """Checks that every node can connect to the head, as the rendezvous requires."""
    if len(facts) < 2:
        return []
    head, *others = facts
    port = wanted.fleet.rendezvous_port or PORT
    to = shlex.quote(facts[head].address(head))
    listen = f"python3 -c {shlex.quote(LISTEN)} {port} {len(others)} {CONNECT_SECONDS}"
    connect = f"bash -c {shlex.quote(CONNECT)} connect {to} {port} {CONNECT_SECONDS}"
    answers = run_together(
        transport,
        lambda host: listen if host == head else connect,
        timeout=CONNECT_SECONDS + 5,
        hosts=list(facts),
    )
    if "taken" in _printed(answers, head):
        return [
            Finding(
                head,
                "port",
                f"port {port} is already in use",
                f"on that host, run: ss -ltnp 'sport = :{port}'; or set another "
                "fleet.rendezvous_port",
            )
        ]
    shut = [host for host in others if "connected" not in _printed(answers, host)]
    message = f"can't reach the rendezvous port {port} of {head}"
    remedy = "allow all traffic between the nodes, in and out, in their security group"
    return [Finding(host, "port", message, remedy) for host in shut]


# Scripts for the port check. Each node opens and closes only one TCP connection.
LISTEN = """
import socket, sys
port, count, seconds = map(int, sys.argv[1:])
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    server.bind(("", port))
    server.listen(256)
except OSError:
    print("taken")
    sys.exit(0)
server.settimeout(seconds)
try:
    for _ in range(count):
        server.accept()[0].close()
except TimeoutError:
    pass
"""
CONNECT = """
for _ in $(seq $(($3 * 5))); do
  if (exec 3<> "/dev/tcp/$1/$2") 2> /dev/null; then echo connected; exit 0; fi
  sleep 0.2
done
"""


def try_fabric(
    transport: Transport, wanted: Wanted, facts: dict[Host, Facts]
) -> tuple[Bandwidth | None, list[Finding]]:
    """Measures the all-reduce bandwidth across the nodes. Returns the bandwidth and findings."""
    fleet, hosts = wanted.fleet, list(facts)
    code = send_code(transport, fleet, hosts)
    answers = run_together(
        transport,
        lambda host: speed_command(wanted, facts, host, code),
        timeout=FABRIC_SECONDS,
        hosts=hosts,
    )
    said = _printed(answers, hosts[0]).splitlines()
    return judge_output(said, wanted.type, hosts) or (None, _explain_silence(answers))


def judge_output(
    lines: Sequence[str], kind: NodeType | None, hosts: Sequence[Host]
) -> tuple[Bandwidth | None, list[Finding]] | None:
    """Returns the bandwidth in the first node's output and the findings, or None without a result.
    Pure.
    """
    report = next((line[len(BANDWIDTH) :] for line in lines if line.startswith(BANDWIDTH)), None)
    if report is None:
        return None
    try:
        found = read_bandwidth(report, len(hosts))
    except Implausible as error:
        return None, [
            Finding(
                hosts[0],
                "fabric",
                implausible(error, "the output of the bandwidth test").message,
                "run make doctor again",
            )
        ]
    findings = [Finding(None, "nccl", said) for said in judge_nccl(lines, kind)]
    return found, findings + judge_bandwidth(found, least_bandwidth(kind), hosts)


def read_bandwidth(text: str, nodes: int) -> Bandwidth:
    """Parses the bandwidth record that the first of `nodes` nodes printed. Raises Implausible if it
    is invalid.
    """
    found = fitted(Bandwidth, text)
    if found.nodes != nodes or any(max(pair[:2]) >= nodes for pair in found.pairs):
        raise Implausible("the number of nodes is wrong")
    return found


def speed_command(wanted: Wanted, facts: dict[Host, Facts], host: Host, code: str) -> str:
    """Returns the command that runs the bandwidth test on a node. Pure."""
    fleet, head = wanted.fleet, next(iter(facts))
    port = fleet.rendezvous_port or PORT
    environment = fabric_of(wanted, facts[host], host, len(facts)) | {
        **python_path(f"{code}/python"),
        "OMP_NUM_THREADS": "1",
        **NCCL_LOGS,
    }
    placement = Placement(
        list(facts).index(host),
        len(facts),
        facts[head].address(head),
        port,
        address=facts[host].address(host),
    )
    module, *own = speed_words(wanted)
    # skipping torchrun halves the time to simulate 64 hosts on two cores
    if fleet.ranks_per_node == 1:
        environment, start = environment | lone_rank(placement), [wanted.interpreter, "-m", module]
    else:
        start = [*torchrun(placement, fleet.ranks_per_node, module, wanted.interpreter)]
    words = [*start, *own]
    settings = [f"{name}={value}" for name, value in environment.items()]
    return f"cd / && exec {shlex.join(['env', *settings, *words])} 2>&1"


def fabric_of(wanted: Wanted, facts: Facts, host: Host, nodes: int) -> dict[str, str]:
    """Returns the environment variables that configure a host's fabric for a job with `nodes`
    nodes. Pure.
    """
    ports = listed(fastest(facts.ports, wanted.fabric))
    return fabric_environment(wanted.type, facts.card(host), ports, alone=nodes == 1)


def speed_words(wanted: Wanted) -> tuple[str, ...]:
    """Returns the module that each rank of the bandwidth test runs, and its arguments. Pure."""
    kind = wanted.type.kind if wanted.type else "cpu"
    # Neuron nodes run the test on CPUs over gloo, which still exercises the network
    device = wanted.fleet.device if wanted.fleet.device in ("cpu", "cuda") else "cpu"
    least = least_bandwidth(wanted.type)
    return (
        "trainfleet.devices.bandwidth",
        device,
        str(ALL_REDUCE_BYTES[kind]),
        str(1e9 if least is None else least),
    )


def judge_bandwidth(found: Bandwidth, least: float | None, hosts: Sequence[Host]) -> list[Finding]:
    """Returns findings about slow nodes. Pure.

    If the expected bandwidth is unknown, compares the nodes to each other.
    """
    if least is not None and found.bandwidth >= least:
        return []
    slow = slow_nodes(found)
    if slow:
        others = [rate for a, b, rate in found.pairs if a not in slow and b not in slow]
        usual = f"; the other nodes reach {statistics.median(others):.2f}" if others else ""
        remedy = "on that host, run: ip -s link; ethtool -S; replace it if they show no errors"
        said = {
            hosts[node]: f"its link reaches {rate:.3f} GB/s{usual}" for node, rate in slow.items()
        }
        return [
            Finding(host, "fabric", message, remedy, blames_host=True)
            for host, message in said.items()
        ]
    if least is None:
        return []
    message = (
        f"an all-reduce over {found.nodes} nodes reaches {found.bandwidth:.1f} GB/s; expected "
        f"{least:.1f}; no node is slower than the others"
    )
    return [
        Finding(
            None,
            "fabric",
            message,
            "check that all EFA interfaces are attached and that the nodes share a placement group",
        )
    ]


def slow_nodes(found: Bandwidth) -> dict[int, float]:
    """Returns the nodes whose best pair is slow: below SLOW_SHARE of the median node's best.

    A slow node affects all of its pairs, whereas its partners also have faster pairs.
    """
    best: dict[int, float] = {}
    for a, b, rate in found.pairs:
        best[a], best[b] = max(best.get(a, 0.0), rate), max(best.get(b, 0.0), rate)
    if len(best) < 3:  # a single pair does not reveal which node is slow
        return {}
    usual = statistics.median(best.values())
    return {node: rate for node, rate in sorted(best.items()) if rate < SLOW_SHARE * usual}


def _explain_silence(answers: Answers) -> list[Finding]:
    """Returns findings with each host's last error, if the bandwidth test produced no result."""
    failed = {
        host: failure for host, failure in answers.failed.items() if failure.kind != "timeout"
    } or answers.failed
    said = {
        host: last_error(_printed(answers, host)) or failure.message
        for host, failure in failed.items()
    }
    if not said:
        return [
            Finding(
                None, "fabric", "the bandwidth test ended without a result", "run make doctor again"
            )
        ]
    remedy = "run make setup, then make doctor"
    return [
        Finding(host, "fabric", f"the bandwidth test failed: {words[:200]}", remedy)
        for host, words in said.items()
    ]


def last_error(text: str) -> str:
    """Returns the last line that contains an error, or ""."""
    lines = [
        line.strip()
        for line in text.splitlines()
        if "Error" in line and "ChildFailedError" not in line
    ]
    return lines[-1] if lines else ""


def send_code(transport: Transport, fleet: Fleet, hosts: Sequence[Host]) -> str:
    """Copies this checkout's code to the shared folder, unless it is already there. Returns the
    code's folder.
    """
    files = code_files(fleet.backend)
    target = f"{fleet.shared_folder or ''}/code/{content_hash(files)}"
    transport.put_once(files, target, hosts=hosts)
    return target


def _printed(answers: Answers, host: Host) -> str:
    answer = answers.get(host)
    return answer.stdout if isinstance(answer, Result) else ""
