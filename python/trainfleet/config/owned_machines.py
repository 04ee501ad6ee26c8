"""Resolves and validates fleet.accelerator, which describes machines without an EC2 instance type.

Unset keys are filled from Slurm's gres, or else with typical values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..hardware import node_types
from ..hardware.accelerators import NAMES, NVIDIA, Accelerator, find_accelerator, unsupported
from ..trust.spelling import nearest, suggest
from ..trust.untrusted_input import show
from ..trust.validation import fit
from .types import Config, Devices, Fleet, Refusals, Rows, Values

KEY = "fleet.accelerator"
SHORT = re.compile(r"\s*(?:([0-9]{1,4}) ?[xX×*] ?)?(\S.*?)\s*", re.DOTALL)
GPUS = re.compile(
    r"(?:gres/)?gpu(?:[:=]([A-Za-z][A-Za-z0-9_.-]*))?(?:[:=]([0-9]{1,4}))?(?:\([^)]*\))?"
)
LOOK = "make doctor inspects the nodes and prints the keys to set"
# maximum ratio between specified and typical memory; beyond it, the name is assumed to be wrong
FURTHEST = 3.0


@dataclass(frozen=True)
class Gpus:
    """GPUs in a Slurm gres: the cluster's name for their type, and the number per node."""

    type: str
    count: int


def expand(text: str) -> Values:
    """Expands a shorthand for fleet.accelerator, such as `8xH100` or `h100`, to its keys."""
    match = SHORT.fullmatch(text)
    if match is None:
        return {"name": text}
    count = {"per_node": int(match[1])} if match[1] else {}
    return {"name": match[2], **count}


def gpus_of(gres: str | None) -> Gpus | None:
    """Parses the GPUs in a gres such as `gpu:8` or `gpu:h100:8(S:0-1),nvme:1`.

    Returns None if the gres contains no GPUs.
    """
    found = [
        match
        for word in re.split(r",(?![^(]*\))", gres or "")
        if (match := GPUS.fullmatch(word.strip()))
    ]
    if not found:
        return None
    return Gpus(
        next((match[1] for match in found if match[1]), ""),
        sum(int(match[2] or 1) for match in found),
    )


def node_type_of(fleet: Values) -> node_types.NodeType | None:
    """Returns the node type of a fleet that is still a dict."""
    if fleet["instance_type"] is not None:
        return node_types.instance(fleet["instance_type"])
    return fit(Devices, fleet["accelerator"]).node_type if fleet["accelerator"] else None


def settle(fleet: Values, here: bool) -> Rows:
    """Fills the accelerator's unset keys in place, and yields (key, value, reason) for each.

    `here` means that this machine simulates the fleet.
    """
    gres, gpus = fleet["slurm"]["gres"], gpus_of(fleet["slurm"]["gres"])
    if fleet["accelerator"] is None:
        row = find_accelerator(gpus.type) if gpus and fleet["instance_type"] is None else None
        if row is None or gpus is None:
            return
        fleet["accelerator"] = dict.fromkeys(Devices.__dataclass_fields__) | {
            "name": gpus.type,
            "per_node": gpus.count,
        }
        yield KEY, f"{gpus.count} x {row.label}", f"fleet.slurm.gres {gres}"
    own = fleet["accelerator"]
    if own["name"] is None and (found := _named(gpus, gres, here)):
        own["name"] = found[0]
        yield f"{KEY}.name", *found
    row = find_accelerator(own["name"] or "", _bytes(own["memory_gib"]))
    if row is None or fleet["instance_type"] is not None:
        return
    if own["per_node"] is None:
        own["per_node"], why = _count(fleet, row, gpus, here)
        yield f"{KEY}.per_node", own["per_node"], why
    yield from _assumed(own, row, fleet["nodes"], here)


def _named(gpus: Gpus | None, gres: str | None, here: bool) -> tuple[str, str] | None:
    if gpus and gpus.type:
        return gpus.type, f"fleet.slurm.gres {gres}"
    row = node_types.local_accelerator() if here else None
    return (row.label, "found on this machine") if row else None


def _count(fleet: Values, row: Accelerator, gpus: Gpus | None, here: bool) -> tuple[int, str]:
    if here and (devices := node_types.local_accelerators()):
        return devices, "counted on this machine"
    if gpus:
        return gpus.count, f"fleet.slurm.gres {fleet['slurm']['gres']}"
    if fleet["ranks_per_node"]:
        return fleet["ranks_per_node"], "fleet.ranks_per_node"
    return row.per_node, f"{row.label} nodes usually have {row.per_node}; {LOOK}"


def _assumed(own: Values, row: Accelerator, nodes: int, here: bool) -> Rows:
    """Yields (key, assumed value, reason) for each key that is still unset."""
    sizes = sorted({each.size for each in NVIDIA if each.words == row.words})
    if (
        own["memory_gib"] is None
        and len(sizes) > 1
        and not any(str(size) in own["name"] for size in sizes)
    ):
        yield (
            f"{KEY}.memory_gib",
            row.size,
            f"available with {' or '.join(map(str, sizes))}; the smallest is assumed",
        )
    if nodes == 1 or here:
        return
    usual = node_types.usual_network(row, own["per_node"], own["network"])
    if own["network"] is None:
        yield (
            f"{KEY}.network",
            "unknown",
            f"NCCL uses the fastest it finds; set one of {', '.join(node_types.FABRICS)}; {LOOK}",
        )
    if own["network_gbps"] is None:
        rails = (
            f"{row.rail} per device, the usual value"
            if usual == row.rail * own["per_node"]
            else "assumed"
        )
        yield (
            f"{KEY}.network_gbps",
            f"{usual:g}",
            f"{rails}; nodes are not checked against it; {LOOK}",
        )


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * 2**30


def check(config: Config) -> Refusals:
    """Rejects an unknown or implausible accelerator, or one that contradicts the instance type."""
    own, gpus = config.fleet.accelerator, gpus_of(config.fleet.slurm.gres)
    if gpus and config.fleet.device != "cpu" and config.fleet.ranks_per_node > gpus.count:
        gives = (
            f"fleet.slurm.gres {config.fleet.slurm.gres} gives each node {gpus.count} GPUs, "
            "and two ranks can't share one"
        )
        yield "fleet.ranks_per_node", f"{config.fleet.ranks_per_node}: {gives}"
    if own is None:
        return
    if own.name is None:
        yield f"{KEY}.name", f"null; set the accelerator, such as {KEY}: 8xh100; {LOOK}"
    elif (row := find_accelerator(own.name, _bytes(own.memory_gib))) is None:
        yield f"{KEY}.name", unknown(own.name)
    elif own.memory_gib is not None and not 1 / FURTHEST <= own.memory_gib / row.size <= FURTHEST:
        yield (
            f"{KEY}.memory_gib",
            f"{own.memory_gib:g}: {row.label} has {row.size}; remove this key or correct the name",
        )
    elif gpus and _contradict(gpus, own, row):
        yield (
            "fleet.slurm.gres",
            f"{config.fleet.slurm.gres} contradicts {KEY} ({own.per_node} x {row.label}); set one "
            "of them",
        )
    elif config.fleet.instance_type is not None:
        yield from _differing(config, own, row)


def _contradict(gpus: Gpus, own: Devices, row: Accelerator) -> bool:
    """Returns whether a gres requests more GPUs than a node has, or others."""
    return gpus.count > (own.per_node or gpus.count) or {*row.words}.isdisjoint(
        (find_accelerator(gpus.type) or row).words
    )


def untold(fleet: Fleet) -> tuple[str, str]:
    """Returns the key and error message for a fleet that does not specify its devices."""
    if fleet.device != "cuda":
        which = "so set the type of the nodes, such as trn1.32xlarge"
        return "fleet.instance_type", f"null: fleet.platform is {fleet.platform}, {which}"
    why = (
        f"fleet.slurm.gres {fleet.slurm.gres}"
        if gpus_of(fleet.slurm.gres)
        else f"fleet.platform {fleet.platform}"
    )
    what = (
        f"null: {why} means GPUs, but no key names their type, so memory and speed can't "
        "be predicted"
    )
    known = ", ".join(("h100", "a100", "l40s", "rtx-4090"))
    return (
        KEY,
        f"{what}; set {KEY}: 8xh100 ({known} ...: schema/README.md), or fleet.instance_type; "
        f"{LOOK}",
    )


def unknown(name: str) -> str:
    """Returns the error message for an unknown accelerator name.

    Recognizes EC2 instance types, unsupported devices and typos.
    """
    if name in node_types.INSTANCE_TYPES:
        return f"{name} is an EC2 type; set fleet.instance_type: {name}"
    if why := unsupported(name):
        return f"{show(name)} is {why}"
    known = suggest(name, NAMES) or f"; known: {', '.join(NAMES)}"
    return f"{show(name)} is not in the table of accelerators{known}"


def instead(name: str) -> str:
    """Suggests the right key if an invalid instance type names an accelerator, or returns ""."""
    own = expand(name)
    row = find_accelerator(own["name"])
    known = node_types.INSTANCE_TYPES
    if row is None and (nearest(name, known) or any(each.startswith(name) for each in known)):
        return ""
    if row is None:
        near = nearest(own["name"], NAMES)
        row = find_accelerator(near) if near else None
    if row is None:
        return unsupported(own["name"])
    types = [
        each.name
        for each in node_types.INSTANCE_TYPES.values()
        if each.accelerator and each.accelerator.words == row.words
    ]
    on_ec2 = f"; on EC2: {', '.join(types)}" if types else ""
    count = f"{own['per_node']}x" if "per_node" in own else ""
    return f"it is an accelerator; for your own machines, set {KEY}: {count}{row.label}{on_ec2}"


def _differing(config: Config, own: Devices, row: Accelerator) -> Refusals:
    """Yields (key, message) for each key that contradicts the instance type."""
    kind = config.fleet.node_type
    if kind is None:
        return
    device = kind.accelerator
    same = own.memory_gib is None or (
        device is not None and node_types.same_size(device, own.memory_gib)
    )
    has: dict[str, tuple[Any, bool]] = {
        "name": (
            device.label if device else "no accelerator",
            device is None or row.words != device.words,
        ),
        "per_node": (kind.accelerators, own.per_node not in (None, kind.accelerators)),
        "memory_gib": (device.size if device else 0, not same),
        "network": (kind.fabric, own.network not in (None, kind.fabric)),
        "network_gbps": (kind.network_gbps, own.network_gbps not in (None, kind.network_gbps)),
    }
    for name, (theirs, differs) in has.items():
        if differs:
            both = (
                f"fleet.instance_type {kind.name} has {theirs}; remove {KEY} or fleet.instance_type"
            )
            yield f"{KEY}.{name}", f"{getattr(own, name)}: {both}"
