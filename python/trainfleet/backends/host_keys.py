"""What this machine needs to reach instances: their host keys, and the plug-in for SSH through SSM."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..cloud import hostkeys
from ..cloud.stack_nodes import FleetStack, StackNode
from ..nodes.state_dir import STATE
from ..run import run_folder
from ..trust.errors import BackendError, InputError
from ..trust.validation import fit


def require_plugin() -> None:
    """BackendError where this machine lacks what SSH through SSM needs."""
    for program in ("aws", "session-manager-plugin"):
        if not shutil.which(program):
            then = "install the AWS CLI and its Session Manager plugin; or open SSH with fleet.aws.ssh_from"
            raise BackendError(f"SSH through SSM needs {program}, which is not here", next=then)


def keep_keys(fleet: FleetStack, nodes: Sequence[StackNode], by_agent: bool) -> tuple[Path, set[str]]:
    """The known_hosts file of these nodes, and which of them are in it.

    Keys are learnt once an instance, and stand under its present address.
    """
    folder = STATE / fleet.stack.name
    keys = read_keys(folder / "keys.json")
    keys = {node.id: keys[node.id] for node in nodes if node.id in keys}
    keys |= hostkeys.learn(fleet.calls, [node.id for node in nodes if node.id not in keys])
    run_folder.write_json(folder / "keys.json", keys)
    names = {node.id: {node.id} if by_agent else {node.address, node.public} - {""} for node in nodes}
    lines = [f"{name} {key}\n" for id_, known in keys.items() for name in sorted(names[id_]) for key in known]
    run_folder.write_atomic(folder / "known_hosts", "".join(lines))
    return folder / "known_hosts", set(keys)


def read_keys(path: Path) -> dict[str, list[str]]:
    try:
        return fit(dict[str, list[str]], run_folder.read_json(path) or {})
    except InputError as error:
        why = f"{error.key}: {error.what}"
        raise BackendError("is no list of host keys", where=str(path), why=why, next=f"rm {path}") from error
