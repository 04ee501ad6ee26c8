"""Sets up and examines the machines that jobs run on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..backends import backend_of, is_guest
from ..backends.base import Can, Prospect
from ..cloud.repository import BUILD
from ..config import Config
from ..config.types import Devices
from ..hardware.node_types import NodeType
from ..hosts import platform, probe
from ..hosts.facts import Facts
from ..hosts.fleet import Quarantine, QuarantineEntry
from ..plan.estimate import Estimate
from ..plan.fabric_environment import fabric_settings, least_bandwidth
from ..plan.job import Artifact, Request, tokenize_job, train_job
from ..process.rdma_adapters import fastest, listed
from ..trust.errors import BackendError
from . import job_image
from .run_location import say_unheard

if TYPE_CHECKING:
    from ..backends.head import Head
    from ..hosts.facts import Facts
    from ..hosts.host_results import Finding, Host
    from ..hosts.preflight import PreflightReport
    from ..hosts.transport import Transport
NAMED = 8  # maximum number of node names per line


def make_ready(config: Config, may_buy: bool = False) -> int:
    """Sets up the machines for jobs. Returns the exit code of `make setup`. `may_buy` allows buying
    capacity in advance.

    Raises:
        BackendError: the machines belong to another config.
    """
    _require_own(config, "set them up")
    backend = backend_of(config)
    platform.require_pins(pinned(config))
    if purchase := backend.purchase():
        lines, is_there = purchase(may_buy)
        for line in lines:
            print(line)
        if not is_there:
            return 1
    return backend.machines().apply()


def pinned(config: Config) -> tuple[platform.Pin, ...]:
    """Returns the pinned packages that new machines and image builds install from package
    indexes.
    """
    return platform.pins_of(
        config, backend_of(config).machines().system, config.fleet.container == BUILD
    )


def bake(config: Config) -> int:
    """Creates a machine image from a node that is set up. Returns the exit code of `make image`.

    Raises:
        BackendError: the machines belong to another config, or the backend does not create machines
            from images.
    """
    _require_own(config, "make an image of them")
    baking = backend_of(config).bake()
    if baking is None:
        what = (
            f"the {config.fleet.backend} backend can't make machines from an image of its "
            "nodes; use ec2"
        )
        raise BackendError(
            what, where="fleet.backend", next="run make build to build the jobs' container image"
        )
    return baking()


def _require_own(config: Config, do: str) -> None:
    """Raises BackendError if the machines belong to another config. `do` names the denied action in
    the message.
    """
    if is_guest(config):
        what = f"the machines belong to the config {config.fleet_name}; only that config can {do}"
        raise BackendError(
            what, where="fleet.aws.share_fleet_of", next="run make train once the machines exist"
        )


def planned(config: Config) -> tuple[Artifact, ...]:
    """Returns the changes that `make_ready` would make now."""
    return () if is_guest(config) else backend_of(config).machines().changes()


def prospect(config: Config, needs: Estimate) -> Prospect:
    """Returns the changes that `make setup` would make, if they are predictable. Prints whether the
    package indexes have the pinned versions.
    """
    platform.report_pins(pinned(config))
    seconds = needs.seconds
    hours = None if needs.elapsed is None else needs.elapsed / 3600
    speed = config.train.steps * config.step_tokens / seconds if seconds else None
    found = backend_of(config).machines().prospect(hours, speed)
    if not is_guest(config):
        return found
    whose = f"the machines belong to the config {config.fleet_name}; only that config changes them"
    return replace(found, lines=(whose,), changes=())


def inherited(config: Config) -> str:
    """Returns the plan's line about environment variables that jobs inherit."""
    return (
        "environment inherited by jobs: "
        f"{', '.join((*backend_of(config).inherits, *config.fleet.secrets)) or 'none'}"
    )


def exact(config: Config) -> list[Request]:
    """Returns the requests for a run's jobs, for backends that can plan before machines exist."""
    config = job_image.named(config)
    backend = backend_of(config)
    return [backend.plan(job, {}) for job in (tokenize_job(config), train_job(config))]


def shares_one_machine(config: Config) -> bool:
    """Returns whether this machine simulates all nodes, so that they share its cores."""
    return backend_of(config).is_here


def examine(config: Config, lift: Sequence[str], faults: dict[str, list[str]]) -> int:
    """Releases the hosts in `lift` from quarantine, then examines the nodes. Adds each host's
    problems to `faults`. Returns the exit code of `make doctor`.
    """
    say_unheard(config)
    quarantine = Quarantine()
    for name in lift:
        print(f"released from quarantine: {quarantine.lift(name)}")
    backend = backend_of(config)
    if Can.EXAMINE in backend.can and (head := backend.head()):
        return examine_hosts(config, head, quarantine, faults)
    for entry in quarantine.entries().values() if Can.LEAVE_OUT in backend.can else ():
        print(f"in quarantine: {entry}; run make doctor LIFT={entry.host} to release it")
    if found := backend.probe():
        differs, fits = compare(config, found.facts)
        print("\n".join([*found.lines, *differs]), end="\n" if found.lines or differs else "")
        if not fits:
            print("next: copy these lines into your config, then run make plan")
            return 1
    return make_ready(config)


def examine_hosts(
    config: Config, head: Head, quarantine: Quarantine, faults: dict[str, list[str]]
) -> int:
    """Prints each host's status and problems, the state of the fabric, and the command to run next.
    Adds the problems to `faults`. Returns the exit code.
    """
    from ..hosts.host_results import Board
    from ..hosts.preflight import examine as examine_fleet

    with head.transport as transport, Board(transport.hosts) as board:
        report = examine_fleet(transport, head.located, links=True)
        held = quarantine.held(transport.hosts)
        quarantine.add_blamed(report.findings)
        for host in transport.hosts:
            faults[host.name] = said = _problems(report, host, held.get(host))
            board.show(host, "FAILED" if said else "ok", "; ".join(said))
        tried, wrong = collectives(transport, head.located, report)
    lines, fits = look(config, report.facts)
    print("\n".join([*lines, *report.describe(least_bandwidth(config.fleet.node_type)), *tried]))
    if report.passed and fits and not held and not wrong:
        print("next: make train")
        return 0
    print(_then(quarantine.held(transport.hosts)))
    return 1


def _problems(report: PreflightReport, host: Host, entry: QuarantineEntry | None) -> list[str]:
    """Returns a host's problems, and why it is in quarantine."""
    kept = [f"in quarantine: {entry.evidence}"] if entry else []
    return [*map(str, report.against(host)), *kept]


def _then(held: Mapping[Host, object]) -> str:
    names = ",".join(host.name for host in held)
    lift = f" LIFT={names}" if names else ""
    return f"next: fix the problems above, then run make doctor{lift}"


def look(config: Config, facts: Mapping[Host, Facts]) -> tuple[list[str], bool]:
    """Returns lines about the hosts, their differences from the config, and their fabric settings.
    Also returns whether the config is compatible with the hosts.
    """
    named = {host.name: found for host, found in facts.items()}
    differs, fits = compare(config, named)
    host, found = next(iter(facts.items()), (None, None))
    settings = environment(config, host, found) if host and found else ()
    return [*described(named), *differs, *settings], fits


def collectives(
    transport: Transport, config: Config, report: PreflightReport
) -> tuple[list[str], list[Finding]]:
    """Runs Neuron's link test. Returns its output and findings, both empty if the nodes have no
    NeuronCores or already have other findings.
    """
    from ..hosts.collectives import is_for, try_collectives
    from ..hosts.fleet import wanted_of

    wanted = wanted_of(config)
    if not report.passed or not is_for(wanted):
        return [], []
    said, wrong = try_collectives(transport, wanted, report.facts)
    return [*said, *(f"{finding.host or 'fleet'}: {finding}" for finding in wrong)], wrong


def environment(config: Config, host: Host, facts: Facts) -> Iterable[str]:
    """Yields the fabric settings, each with its reason."""
    kind = config.fleet.node_type
    if kind is None:
        return
    ports = listed(fastest(facts.ports, kind.fabric))
    for setting in fabric_settings(kind, facts.card(host), ports, alone=config.fleet.nodes == 1):
        yield (
            f"{setting.name}={setting.value}  {setting.why}"
            if setting.value
            else f"{setting.name} not set: {setting.why}"
        )


def compare(config: Config, facts: Mapping[str, Facts]) -> tuple[list[str], bool]:
    """Returns lines about differences between config and nodes, with suggested fixes. Also returns
    whether the config works unchanged.
    """
    fleet, kind = config.fleet, config.fleet.node_type
    wrong = [
        f"{name}: {words}" for name, fact in facts.items() for words in probe.differing(fact, fleet)
    ]
    found = next(filter(None, map(probe.devices_of, facts.values())), None)
    if found is None:
        if fleet.device != "cuda" or not facts:
            return wrong, not wrong
        return [*wrong, "the hosts have no known GPU, but fleet.platform is cuda"], False
    if kind and not kind.owned:
        return wrong, not wrong  # EC2 instance types fully define the hardware.
    if kind and not wrong and _says_all(config, kind, facts):
        return [], True
    lines = [*wrong, *_correction(config, found, bool(wrong))]
    return lines, not wrong if kind else fleet.device == "cpu"


def _correction(config: Config, found: Devices, wrong: bool) -> Iterator[str]:
    """Yields config lines, ready to copy, that describe the nodes' devices."""
    kind = config.fleet.node_type
    how = "differs from" if wrong else "does not fully describe" if kind else "does not describe"
    yield f"the config {how} the nodes' devices; add:"
    yield from probe.block(found).splitlines()
    if found.network == "roce":
        yield "  # network: ethernet, if the switches are not set up for RoCE"
    if kind is None and config.fleet.device == "cpu":
        yield "until then, ranks compute on the CPU cores"


def _says_all(config: Config, kind: NodeType, facts: Mapping[str, Facts]) -> bool:
    """Returns whether the config specifies the GPU count per node and the network between nodes."""
    own, counts = config.fleet.accelerator, {len(fact.gpus) for fact in facts.values()}
    linked = own is None or own.network is not None or config.fleet.nodes == 1
    return counts == {kind.accelerators} and linked


def described(facts: Mapping[str, Facts]) -> list[str]:
    """Returns lines that describe the nodes, grouped by identical hardware. Skips nodes without
    accelerators.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, fact in facts.items():
        if fact.gpus or set(fact.bus) & {"nvidia", "amd", "gaudi"}:
            alike.setdefault(tuple(probe.describe(fact)), []).append(name)
    lines = []
    for words, names in alike.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines += [f"{', '.join(names[:NAMED])}{more}:", *(f"  {line}" for line in words)]
    return lines
