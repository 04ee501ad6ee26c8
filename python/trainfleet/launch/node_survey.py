"""What the nodes have, as they say it themselves, beside what the config says of them: the lines of `make doctor`."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import Config
from ..nodes import probe
from ..nodes.facts import Facts

NAMED = 8  # nodes of which a line tells


def compare(config: Config, facts: Mapping[str, Facts]) -> tuple[list[str], bool]:
    """Lines on where the config differs from the nodes, with what to write into it; and whether it may stay as it is."""
    fleet = config.fleet
    wrong = [f"{name}: {words}" for name, fact in facts.items() for words in probe.differing(fact, fleet)]
    found = next((devices for fact in facts.values() if (devices := probe.devices_of(fact))), None)
    if found is None:
        asked = fleet.device == "cuda" and bool(facts)
        return [*wrong, *(["no GPU that is known answers, and fleet.stack is cuda"] if asked else [])], not (wrong or asked)
    own, kind = fleet.accelerator, fleet.node_type
    counts = {len(fact.gpus) for fact in facts.values()}
    if kind and not wrong and counts == {kind.accelerators} and not (own and own.network is None and fleet.nodes > 1):
        return [], True
    if kind is not None and not kind.owned:
        return wrong, not wrong  # an EC2 type says it all
    says = "none of it" if kind is None else "otherwise" if wrong else "less than that"
    lines = [*wrong, f"the config says {says}; write:", *probe.block(found).splitlines()]
    if found.network == "roce":
        lines.append("  # network: ethernet, where the switches are not set up for RoCE")
    if kind is None and fleet.device == "cpu":
        return [*lines, "as it is, ranks compute on the CPU cores"], True
    return lines, not (wrong or kind is None)


def described(facts: Mapping[str, Facts]) -> list[str]:
    """What the nodes have, those that are alike together; nothing of nodes without anything but cores."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, fact in facts.items():
        if fact.gpus or set(fact.bus) & {"nvidia", "amd", "gaudi"}:
            alike.setdefault(tuple(probe.describe(fact)), []).append(name)
    lines = []
    for words, names in alike.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines += [f"{', '.join(names[:NAMED])}{more}:", *(f"  {line}" for line in words)]
    return lines
