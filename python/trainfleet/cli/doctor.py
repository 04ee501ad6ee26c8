"""make doctor: is the fleet fit to train? What is wrong, by host, and what to type; LIFT=host lets one out of quarantine."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import Config, load
from ..nodes.board import Board
from ..nodes.fleet import open_fleet
from ..nodes.gate import Report, examine
from ..nodes.quarantine import Quarantine
from ..plan.fabric import fabric_settings, least_bandwidth
from . import setup
from .settings import settings_of
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, _ = load(settings_of(variables))
    if not config.fleet.reached_by_ssh:
        return setup.describe_machine(config)
    quarantine = Quarantine()
    for name in filter(None, variables.get("LIFT", "").replace(",", " ").split()):
        print(f"let out of quarantine: {quarantine.lift(name)}")
    with open_fleet(config) as transport, Board(transport.hosts) as board:
        report = examine(transport, config)
        held = quarantine.held(transport.hosts)
        for host in transport.hosts:
            against = report.against(host)
            for finding in against:
                if finding.blames_host:
                    quarantine.add(host, finding.message)
            said = [str(finding) for finding in against] + ([f"in quarantine: {held[host].evidence}"] if host in held else [])
            board.show(host, "FAILED" if said else "ok", "; ".join(said))
    print("\n".join(describe(config, report)))
    if report.is_open and not held:
        print("next: make train")
        return 0
    inside = ",".join(host.name for host in quarantine.held(transport.hosts))
    print(f"next: mend what is named above{f'; then make doctor LIFT={inside}' if inside else ', then make doctor'}")
    return 1


def describe(config: Config, report: Report) -> Iterable[str]:
    """What concerns the fleet as a whole: its fabric's settings, its bandwidth, and what is wrong with neither host."""
    card = next((facts.card(host) for host, facts in report.facts.items()), "")
    for setting in fabric_settings(config.fleet.instance_type, card) if config.fleet.instance_type else ():
        yield f"{setting.name}={setting.value}  {setting.why}" if setting.value else f"{setting.name} not set: {setting.why}"
    if report.bandwidth:
        least = least_bandwidth(config.fleet.instance_type)
        expected = f", at least {least:.1f} expected" if least else ""
        yield f"all-reduce over {report.bandwidth.nodes} nodes: {report.bandwidth.gbs:.2f} GB/s on the bus{expected}"
    yield from (f"fleet: {finding}" for finding in report.findings if finding.host is None)
    yield f"examined {len(report.facts)} hosts in {report.seconds:.1f} s"
