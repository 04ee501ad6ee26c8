"""This machine's needs to reach instances: their host keys, and the plug-in for SSH through SSM.

The keys come from AWS itself, never from the connection that they secure. cloud-init prints them on
the console between two marker lines, and the console's text may appear minutes later (EC2 user
guide, "Instance console output"). SSM needs its agent, which our images have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..cloud import checks, clock
from ..cloud.api_errors import passing
from ..cloud.calls import Calls
from ..cloud.stack_nodes import FleetStack, StackNode
from ..hosts.state_dir import STATE
from ..run import run_folder
from ..trust.errors import BackendError, InputError
from ..trust.validation import fit

BLOCK = re.compile(
    r"-----BEGIN SSH HOST KEY KEYS-----(.*?)-----END SSH HOST KEY KEYS-----", re.DOTALL
)
KEY = re.compile(
    r"\b(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa) "
    r"([A-Za-z0-9+/]{40,2000}={0,3})(?![A-Za-z0-9+/=])"
)
PRINT = "cat /etc/ssh/ssh_host_*_key.pub"
AGAIN, ANSWERS = 2.0, 15  # seconds between two polls for SSM's answer, and their number


def require_plugin() -> None:
    """Raises BackendError if this machine lacks a program for SSH through SSM."""
    for lack in checks.programs():
        raise BackendError(lack.what, next=lack.next)


def keep_keys(
    fleet: FleetStack, nodes: Sequence[StackNode], by_agent: bool
) -> tuple[Path, set[str]]:
    """Returns the known_hosts file of these nodes, and which of them are in it.

    Keys are learnt once per instance, and written under its present address.
    """
    folder = STATE / fleet.stack.name
    keys = read_keys(folder / "keys.json")
    keys = {node.id: keys[node.id] for node in nodes if node.id in keys}
    keys |= learn(fleet.calls, [node.id for node in nodes if node.id not in keys])
    run_folder.write_json(folder / "keys.json", keys)
    names = {
        node.id: {node.id} if by_agent else {node.address, node.public} - {""} for node in nodes
    }
    lines = [
        f"{name} {key}\n"
        for id_, known in keys.items()
        for name in sorted(names[id_])
        for key in known
    ]
    run_folder.write_atomic(folder / "known_hosts", "".join(lines))
    return folder / "known_hosts", set(keys)


def read_keys(path: Path) -> dict[str, list[str]]:
    try:
        return fit(dict[str, list[str]], run_folder.read_json(path) or {})
    except InputError as error:
        why = f"{error.key}: {error.what}"
        raise BackendError(
            "is not a list of host keys", where=str(path), why=why, next=f"rm {path}"
        ) from error


def learn(calls: Calls, ids: Iterable[str]) -> dict[str, list[str]]:
    """Returns instance id → its keys, in the format of known_hosts, for those that AWS knows by
    now.
    """
    found = {}
    for id_ in ids:
        if keys := from_console(calls, id_) or from_agent(calls, id_):
            found[id_] = keys
    return found


def from_console(calls: Calls, id_: str) -> list[str]:
    """Returns the keys on the console; empty until they appear."""
    text = ""
    with passing("InvalidInstanceID.NotFound", "UnsupportedOperation", "UnauthorizedOperation"):
        text = str(calls("ec2", "GetConsoleOutput", InstanceId=id_).get("Output", ""))
    return keys_in("\n".join(BLOCK.findall(text)))


def from_agent(calls: Calls, id_: str) -> list[str]:
    """Returns the keys from the instance's SSM agent; empty if it does not answer."""
    with passing(
        "InvalidInstanceId", "AccessDenied", "AccessDeniedException", "InvocationDoesNotExist"
    ):
        sent = calls(
            "ssm",
            "SendCommand",
            InstanceIds=[id_],
            DocumentName="AWS-RunShellScript",
            Parameters={"commands": [PRINT]},
        )
        for _ in range(ANSWERS):
            clock.sleep(AGAIN)
            said = calls(
                "ssm",
                "GetCommandInvocation",
                CommandId=sent["Command"]["CommandId"],
                InstanceId=id_,
            )
            if said["Status"] not in ("Pending", "InProgress", "Delayed"):
                return (
                    keys_in(str(said.get("StandardOutputContent", "")))
                    if said["Status"] == "Success"
                    else []
                )
    return []


def keys_in(text: str) -> list[str]:
    """Returns every public key in a text, once: `ssh-ed25519 AAAA...`."""
    return list(dict.fromkeys(f"{kind} {key}" for kind, key in KEY.findall(text)))
