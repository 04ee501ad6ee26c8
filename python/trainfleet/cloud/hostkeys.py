"""The SSH host keys of instances, from AWS itself: an instance writes them on its console, or reports them over SSM.

Never from the connection that they are to secure. cloud-init prints the keys between two lines of its own; the console's text can
take some minutes to be there (EC2 user guide, "Instance console output"). SSM needs its agent, which our images have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from . import clock
from .api_errors import passing
from .calls import Calls

BLOCK = re.compile(r"-----BEGIN SSH HOST KEY KEYS-----(.*?)-----END SSH HOST KEY KEYS-----", re.DOTALL)
KEY = re.compile(r"\b(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa) ([A-Za-z0-9+/]{40,2000}={0,3})(?![A-Za-z0-9+/=])")
PRINT = "cat /etc/ssh/ssh_host_*_key.pub"
AGAIN, ANSWERS = 2.0, 15  # seconds between two looks for SSM's answer, and how many


def learn(calls: Calls, ids: Iterable[str]) -> dict[str, list[str]]:
    """Instance id → its keys, as known_hosts has them, for those that AWS knows by now."""
    found = {}
    for id_ in ids:
        if keys := from_console(calls, id_) or from_agent(calls, id_):
            found[id_] = keys
    return found


def from_console(calls: Calls, id_: str) -> list[str]:
    """The keys on the console; none as long as they are not there."""
    text = ""
    with passing("InvalidInstanceID.NotFound", "UnsupportedOperation", "UnauthorizedOperation"):
        text = str(calls("ec2", "GetConsoleOutput", InstanceId=id_).get("Output", ""))
    return keys_in("\n".join(BLOCK.findall(text)))


def from_agent(calls: Calls, id_: str) -> list[str]:
    """The keys as the instance's SSM agent says them; none where it does not answer."""
    with passing("InvalidInstanceId", "AccessDenied", "AccessDeniedException", "InvocationDoesNotExist"):
        sent = calls("ssm", "SendCommand", InstanceIds=[id_], DocumentName="AWS-RunShellScript", Parameters={"commands": [PRINT]})
        for _ in range(ANSWERS):
            clock.sleep(AGAIN)
            said = calls("ssm", "GetCommandInvocation", CommandId=sent["Command"]["CommandId"], InstanceId=id_)
            if said["Status"] not in ("Pending", "InProgress", "Delayed"):
                return keys_in(str(said.get("StandardOutputContent", ""))) if said["Status"] == "Success" else []
    return []


def keys_in(text: str) -> list[str]:
    """Every public key in a text, once: `ssh-ed25519 AAAA...`."""
    return list(dict.fromkeys(f"{kind} {key}" for kind, key in KEY.findall(text)))
