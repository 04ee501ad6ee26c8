"""What this machine needs to reach instances: their host keys, and the plug-in for SSH through SSM."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from .. import runs
from ..cloud import hostkeys
from ..cloud.stack_nodes import Fleet, Node
from ..errors import BackendError, InputError
from ..nodes.state import STATE
from ..shapes import fit


def require_plugin() -> None:
    """BackendError where this machine lacks what SSH through SSM needs."""
    for program in ("aws", "session-manager-plugin"):
        if not shutil.which(program):
            next = "install the AWS CLI and its Session Manager plugin; or open SSH with fleet.aws.ssh_from"
            raise BackendError(f"SSH through SSM needs {program}, which is not here", next=next)


def keep_keys(fleet: Fleet, nodes: Sequence[Node], by_agent: bool) -> tuple[Path, set[str]]:
    """The known_hosts file of these nodes, and which of them are in it.

    Keys are learnt once an instance, and stand under its present address.
    """
    folder = STATE / fleet.stack.name
    keys = read_keys(folder / "keys.json")
    keys = {node.id: keys[node.id] for node in nodes if node.id in keys}
    keys |= hostkeys.learn(fleet.calls, [node.id for node in nodes if node.id not in keys])
    runs.write_json(folder / "keys.json", keys)
    names = {node.id: {node.id} if by_agent else {node.address, node.public} - {""} for node in nodes}
    lines = [f"{name} {key}\n" for id, known in keys.items() for name in sorted(names[id]) for key in known]
    runs.write_atomic(folder / "known_hosts", "".join(lines))
    return folder / "known_hosts", set(keys)


def read_keys(path: Path) -> dict[str, list[str]]:
    try:
        return fit(dict[str, list[str]], runs.read_json(path) or {})
    except InputError as error:
        why = f"{error.key}: {error.what}"
        raise BackendError("is no list of host keys", where=str(path), why=why, next=f"rm {path}") from error
