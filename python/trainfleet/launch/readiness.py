"""Prepares and examines the machines that jobs run on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..adapters import fastest, listed
from ..backends import backend_of, is_guest
from ..backends.base import BuysAhead, Can, Prospects
from ..backends.ec2_machines import Instances
from ..backends.engines import Engine
from ..config import Config
from ..errors import BackendError
from ..nodes.quarantine import Quarantine
from ..plan.bill import Bill
from ..plan.estimate import Estimate
from ..plan.fabric import fabric_settings, least_bandwidth
from ..plan.job import tokenize_job, train_job
from ..plan.request import Artifact, Request
from ..sandbox import lacks
from . import imaging, probing

if TYPE_CHECKING:
    from ..nodes.answers import Host
    from ..nodes.facts import Facts
    from ..nodes.finding import Finding
    from ..nodes.transport import Transport


def make_ready(config: Config, may_buy: bool = False) -> int:
    """Does what is missing for jobs to run; the exit code of `make setup`. `may_buy`: also what is bought ahead.

    Raises:
        BackendError: the machines are another config's.
    """
    if is_guest(config):
        what = f"its machines are those of the config {config.fleet_name}, which alone sets them up"
        raise BackendError(what, where="fleet.aws.name", next="make train, once they are there")
    backend = backend_of(config)
    if isinstance(backend, BuysAhead):
        lines, is_there = backend.obtain(may_buy)
        for line in lines:
            print(line, flush=True)
        if not is_there:
            return 1
    return backend.machines().apply()


def planned(config: Config) -> tuple[Artifact, ...]:
    """What `make_ready` would do now."""
    return () if is_guest(config) else backend_of(config).machines().changes()


def outlook(config: Config, needs: Estimate) -> tuple[list[str], tuple[Artifact, ...]]:
    """Lines on the machines that `make setup` would make, and its steps; none where it makes none."""
    if is_guest(config):
        return [f"machines are those of the config {config.fleet_name}, which makes, changes and removes them"], ()
    machines = backend_of(config).machines()
    hours = None if needs.seconds is None else needs.seconds / 3600
    if isinstance(machines, Prospects):
        return machines.prospect(hours)
    if not isinstance(machines, Instances):
        return [], ()
    train = config.train
    speed = train.steps * train.global_batch * train.sequence_length / needs.seconds if needs.seconds else None
    return list(machines.outlook(hours, speed)), machines.changes()


def awaits_setup(config: Config) -> bool:
    """Whether an engine's part of the account is not there yet, or there are no credentials to ask for it."""
    machines = backend_of(config).machines()
    return isinstance(machines, Engine) and not machines.is_there()


def is_unasked(config: Config) -> bool:
    """Whether machines would be made in an account that can't be asked, so that none of them is known."""
    machines = backend_of(config).machines()
    return isinstance(machines, Instances) and bool(machines.foreseen.unasked)


def exact(config: Config) -> list[Request]:
    """The requests that are known before there are machines: an engine's, whose nodes have no addresses in them."""
    config = imaging.named(config)
    backend = backend_of(config)
    jobs = (tokenize_job(config), train_job(config)) if isinstance(backend.machines(), Engine) else ()
    return [backend.plan(job, {}) for job in jobs]


def bill(config: Config) -> Bill | None:
    """What a run costs from set-up to teardown; None if unknown."""
    return backend_of(config).bill()


def shares_one_machine(config: Config) -> bool:
    """Whether all nodes are played by this machine, and share its cores."""
    return backend_of(config).is_here


def examine(config: Config, lift: Sequence[str]) -> int:
    """Examines the nodes after letting hosts out of quarantine; the exit code of `make doctor`."""
    for lack in lacks():
        print(f"warning: on this machine {lack}; docs/security.md")
    quarantine = Quarantine()
    for name in lift:
        print(f"let out of quarantine: {quarantine.lift(name)}")
    if Can.EXAMINE in backend_of(config).can:
        return examine_hosts(config, quarantine)
    for entry in quarantine.entries().values() if Can.LEAVE_OUT in backend_of(config).can else ():
        print(f"in quarantine: {entry}; make doctor LIFT={entry.host} lets it out")
    if found := backend_of(config).probe():
        differs, fits = probing.compare(config, found.facts)
        print("\n".join([*found.lines, *differs]), end="\n" if found.lines or differs else "")
        if not fits:
            print("next: write it into your config, then make plan")
            return 1
    return make_ready(config)


def examine_hosts(config: Config, quarantine: Quarantine) -> int:
    """A line a host with what is wrong, then the fabric, and what to type."""
    from ..backends.ssh import Ssh
    from ..nodes.board import Board
    from ..nodes.gate import examine as examine_fleet

    backend = backend_of(config)
    assert isinstance(backend, Ssh)
    with backend.transport as transport, Board(transport.hosts) as board:
        report = examine_fleet(transport, backend.located, links=True)
        held = quarantine.held(transport.hosts)
        for host in transport.hosts:
            against = report.against(host)
            for finding in against:
                if finding.blames_host:
                    quarantine.add(host, finding.message)
            said = [str(finding) for finding in against] + ([f"in quarantine: {held[host].evidence}"] if host in held else [])
            board.show(host, "FAILED" if said else "ok", "; ".join(said))
        tried, wrong = collectives(transport, backend.located, report.facts) if report.is_open else ([], [])
    lines, fits = look(config, report.facts)
    print("\n".join([*lines, *report.describe(least_bandwidth(config.fleet.node_type)), *tried]))
    if report.is_open and not held and not wrong and fits:
        print("next: make train")
        return 0
    inside = ",".join(host.name for host in quarantine.held(transport.hosts))
    print(f"next: mend what is named above{f'; then make doctor LIFT={inside}' if inside else ', then make doctor'}")
    return 1


def look(config: Config, facts: Mapping[Host, Facts]) -> tuple[list[str], bool]:
    """Lines on what the hosts have, where the config says otherwise, and their fabric's settings; whether the config fits."""
    named = {host.name: found for host, found in facts.items()}
    differs, fits = probing.compare(config, named)
    host, found = next(iter(facts.items()), (None, None))
    settings = environment(config, host, found) if host and found else ()
    return [*probing.described(named), *differs, *settings], fits


def collectives(transport: Transport, config: Config, facts: Mapping[Host, Facts]) -> tuple[list[str], list[Finding]]:
    """What Neuron's own trial of its links says, where the nodes have NeuronCores; what is wrong is among the words too."""
    from ..nodes.collectives import is_for, try_collectives
    from ..nodes.fleet import wanted_of

    wanted = wanted_of(config)
    said, wrong = try_collectives(transport, wanted, facts) if is_for(wanted) else ([], [])
    return [*said, *(f"{finding.host or 'fleet'}: {finding}" for finding in wrong)], wrong


def environment(config: Config, host: Host, facts: Facts) -> Iterable[str]:
    """The settings of the fabric, each with its reason."""
    kind = config.fleet.node_type
    if kind is None:
        return
    ports = listed(fastest(facts.ports, kind.fabric))
    for setting in fabric_settings(kind, facts.card(host), ports, alone=config.fleet.nodes == 1):
        yield f"{setting.name}={setting.value}  {setting.why}" if setting.value else f"{setting.name} not set: {setting.why}"
