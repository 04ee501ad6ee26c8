"""EC2 machines: `make setup` creates the stack, and `make clean` verifies that its resources are
gone.

Host keys come from AWS, never from the SSH connection that they authenticate. cloud-init prints
them to the console between two marker lines, but the console text can lag by minutes (EC2 user
guide, "Instance console output"). Until the console has the keys, they are read through the SSM
agent, which our images include. With the Session Manager plugin, SSH connections can also run
through SSM.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from ..cloud import checks, clock, permissions, plan_text
from ..cloud.calls import Calls, passing
from ..cloud.capacity import NOTHING, Paid, PrepaidCapacity
from ..cloud.inventory import OwnedResource, costing, require_seen, strangers, total, weighed
from ..cloud.stack_nodes import FleetStack, Foreseen, StackNode
from ..cloud.template import BUILDER_TYPE
from ..cloud.template_inputs import Inputs
from ..config import Config
from ..config.host_list import Host
from ..hosts import host_setup
from ..hosts.host_results import Board
from ..hosts.ssh_config import STATE
from ..plan.job import Artifact
from ..run import run_folder
from ..trust.errors import BackendError, InputError
from ..trust.validation import fit
from .base import Machines, Prospect
from .head import Head
from .node_script import artifact

BLOCK = re.compile(
    r"-----BEGIN SSH HOST KEY KEYS-----(.*?)-----END SSH HOST KEY KEYS-----", re.DOTALL
)
KEY = re.compile(
    r"\b(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa) "
    r"([A-Za-z0-9+/]{40,2000}={0,3})(?![A-Za-z0-9+/=])"
)
PRINT = "cat /etc/ssh/ssh_host_*_key.pub"
# polling interval for SSM responses in seconds, and maximum number of polls
POLL_EVERY, ANSWERS = 2.0, 15


def require_plugin() -> None:
    """Raises BackendError if a program that SSH over SSM requires is not installed."""
    for lack in checks.programs():
        raise BackendError(lack.what, next=lack.next)


def keep_keys(
    fleet: FleetStack, nodes: Sequence[StackNode], by_agent: bool
) -> tuple[Path, set[str]]:
    """Writes the nodes' host keys to a known_hosts file.

    Returns the file, and the IDs of nodes with known keys. Each instance's keys are fetched once
    and written under its current address.
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
        raise BackendError(
            "is not a list of host keys",
            where=str(path),
            why=f"{error.key}: {error.what}",
            next=f"rm {path}",
        ) from error


def learn(calls: Calls, ids: Iterable[str]) -> dict[str, list[str]]:
    """Fetches host keys from AWS and returns instance ID → keys in known_hosts format.

    Omits instances whose keys AWS does not report yet.
    """
    found = {}
    for id_ in ids:
        if keys := from_console(calls, id_) or from_agent(calls, id_):
            found[id_] = keys
    return found


def from_console(calls: Calls, id_: str) -> list[str]:
    """Returns the host keys printed on the console, or an empty list if they haven't
    appeared yet.
    """
    text = ""
    with passing("InvalidInstanceID.NotFound", "UnsupportedOperation", "UnauthorizedOperation"):
        text = str(calls("ec2", "GetConsoleOutput", InstanceId=id_).get("Output", ""))
    return keys_in("\n".join(BLOCK.findall(text)))


def from_agent(calls: Calls, id_: str) -> list[str]:
    """Returns the host keys reported by the instance's SSM agent, or an empty list if the agent
    does not respond.
    """
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
            clock.sleep(POLL_EVERY)
            said = calls(
                "ssm",
                "GetCommandInvocation",
                CommandId=sent["Command"]["CommandId"],
                InstanceId=id_,
            )
            if said["Status"] not in ("Pending", "InProgress", "Delayed"):
                if said["Status"] == "Success":
                    return keys_in(str(said.get("StandardOutputContent", "")))
                return []
    return []


def keys_in(text: str) -> list[str]:
    """Returns the distinct public keys in `text`, in the form `ssh-ed25519 AAAA...`."""
    return list(dict.fromkeys(f"{kind} {key}" for kind, key in KEY.findall(text)))


# final resource event → final state on the status board
STATES = {"made": "ok", "changed": "changed", "deleted": "changed", "kept": "ok", "done": "ok"}
KEYS_IN = 600.0  # maximum seconds to wait for all host keys
AGAIN = 10.0
ROUNDS = 3  # removal attempts; the first can miss resources that were just created


@contextlib.contextmanager
def told_of(what: str, then: str) -> Iterator[None]:
    """Warns on Ctrl-C that AWS may still be creating or deleting resources."""
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"{what}, and it may cost money\n  next: run make ls to list the resources; {then}",
            file=sys.stderr,
        )
        raise


def policies(config: Config, inputs: Inputs) -> Iterator[Artifact]:
    """Yields IAM policies that suffice to create, use and remove the config's machines."""
    for number, found in enumerate(permissions.documents(permissions.policy(config, inputs)), 1):
        yield Artifact(
            "policy.json" if number == 1 else f"policy-{number}.json",
            json.dumps(found, indent=2) + "\n",
        )


class Stacked(Machines):
    """Machines (base.py) in a CloudFormation stack. Subclasses set up the instances."""

    made = True
    paid = NOTHING  # prepaid amount for the nodes

    def __init__(self, cloud: FleetStack) -> None:
        self.cloud = cloud

    def prospect(self, hours: float | None, speed: float | None) -> Prospect:
        """Returns the planned changes, their cost, and anything that would block them."""
        lines = plan_text.describe(
            self.cloud.config, self.cloud, self.foreseen, hours, speed, self.paid
        )
        return Prospect(tuple(lines), self.changes(), unasked=bool(self.foreseen.unasked))

    @functools.cached_property
    def foreseen(self) -> Foreseen:
        """Returns the planned requests.

        They are cached, so that a plan displays the same requests that it writes to files.
        """
        return self.cloud.foresee(self.bad())

    def changes(self) -> tuple[Artifact, ...]:
        """Returns the exact requests that would create or update the stack, and an IAM policy
        allowing them.
        """
        planned = self.foreseen.requests
        if not planned:
            return ()
        requests = [artifact(number, *request) for number, request in enumerate(planned, 1)]
        bodies = [str(request["TemplateBody"]) for _, _, request in planned]
        stack = [
            Artifact("stack.yaml", yaml.safe_dump(json.loads(body), sort_keys=False))
            for body in bodies[-1:]
        ]
        return (*stack, *requests, *policies(self.cloud.config, self.foreseen.inputs))

    def bad(self) -> set[str]:
        """Returns the IDs of the instances to replace."""
        return set()

    def make(self) -> None:
        """Creates or updates the stack and displays progress."""
        with (
            told_of(
                "AWS is still working on the stack",
                "run make setup to continue, or make clean to remove it",
            ),
            Board([]) as board,
        ):
            rows: dict[str, Host] = {}

            def show(logical: str, state: str, text: str) -> None:
                board.show(
                    rows.setdefault(logical, Host(f"{logical:24}", "")),
                    STATES.get(state, state),
                    text,
                )

            self.cloud.make(self.bad(), show, board.say)
        self.__dict__.pop("foreseen", None)  # the cached plan is stale after this update

    def apply(self) -> int:
        self.make()
        return 0

    def left(self) -> list[str]:
        return [one.line() for one in self.cloud.left()]

    def costing(self) -> list[str]:
        return costing(self.cloud.left())

    @told_of("some resources still exist", "run make clean again")
    def remove(self, purge: bool) -> None:
        """Removes all resources except those with data, and verifies that no others remain.

        With `purge`, also removes those with data.

        Raises:
            BackendError: other resources remain. The message includes their cost.
        """
        for _ in range(ROUNDS):
            stay = self.cloud.remove(purge, say)
            if all(one.id in stay for one in self.cloud.left() if one.id):
                break
        prove_gone(
            self.cloud.left(),
            stay,
            self.cloud.config.fleet_name,
            self.cloud.calls,
            self.cloud.troubles,
        )


class Instances(Stacked):
    """EC2 instances that `make setup` creates and sets up."""

    system = "ubuntu2404"

    def __init__(
        self, cloud: FleetStack, head: Head, paid: Paid, ahead: PrepaidCapacity | None
    ) -> None:
        super().__init__(cloud)
        self.head, self.paid, self.ahead = head, paid, ahead

    def bad(self) -> set[str]:
        """Returns the IDs of the quarantined instances."""
        return set(self.head.quarantine.entries())

    def apply(self) -> int:
        """Creates or updates the stack, waits for the nodes, and sets them up."""
        if self.head.by_agent:
            require_plugin()
        bad = self.bad()
        if not self.cloud.begun():
            self.make()
        while self.cloud.begun():
            if code := self._build():
                return code
            self.make()
        nodes = self.cloud.await_nodes()
        self.head.quarantine.forget(bad - {node.id for node in nodes})
        self.await_keys(nodes)
        self.head.look_again()
        return host_setup.main(self.head.located)

    def _build(self) -> int:
        """Builds the Python environment on a cheap machine, so that no nodes cost money in the
        meantime. Returns an exit code.
        """
        self.await_keys(self.cloud.await_nodes(builder=True))
        self.head.look_again()
        located = self.head.located
        fleet = replace(located.fleet, nodes=1, instance_type=BUILDER_TYPE)
        return host_setup.main(replace(located, fleet=fleet), whole=False, temporary=True)

    def await_keys(self, nodes: list[StackNode]) -> None:
        """Waits until AWS has reported every node's host key.

        Raises BackendError after KEYS_IN seconds.
        """
        deadline, said = clock.now() + KEYS_IN, False
        while missing := sorted(
            {node.id for node in nodes} - keep_keys(self.cloud, nodes, self.head.by_agent)[1]
        ):
            if clock.now() > deadline:
                raise BackendError(
                    "the host key is unknown",
                    where=", ".join(missing),
                    why="neither the console nor the SSM agent reported it",
                    next="run make setup again",
                )
            if not said:
                print(
                    f"waiting for the host keys of {len(missing)} nodes; AWS reports them a few "
                    "minutes after boot"
                )
                said = True
            clock.sleep(AGAIN)

    def remove(self, purge: bool) -> None:
        super().remove(purge)
        if self.ahead:
            self.ahead.say_what_stays(say)


def prove_gone(
    found: list[OwnedResource],
    stay: set[str],
    config: str,
    calls: Calls,
    troubles: Mapping[str, str],
) -> None:
    """Verifies with two independent searches that only the resources in `stay` remain.

    Lists the remaining resources with data.

    Raises:
        BackendError: other resources remain, with their cost in the message. Also raised if the
            credentials can't list every resource type.
    """
    kept = list(weighed(calls, [one for one in found if one.id in stay]))
    for one in kept:
        if one.holds_data:
            say(f"kept {one.line()}")
    if kept:
        say(f"the kept resources cost {total(kept)}; make clean PURGE=1 removes them too")
    # entries without an ID are resource types that could not be queried
    left = [one for one in found if one.id not in stay]
    if any(one.id for one in left):
        raise _left(left, calls, troubles)
    require_seen(found, calls.region, "make clean")
    say(
        f"no {'other ' if kept else ''}resources of {config} are left in {calls.region} (two "
        "searches by tag)"
    )


def _left(left: list[OwnedResource], calls: Calls, troubles: Mapping[str, str]) -> BackendError:
    """Returns an error listing the remaining resources, the reasons and the total cost."""
    rows = [f"  {one.line()}{f': {why}' if (why := troubles.get(one.id)) else ''}" for one in left]
    rows += [f"  {line}" for line in strangers(calls, left)]
    there = [one for one in left if one.id]
    what = "\n".join(
        [f"{len(there)} resources are still in {calls.region} and cost {total(there)}", *rows]
    )
    return BackendError(
        what, next="run make ls to list them; fix the errors, then run make clean again"
    )


def say(text: str) -> None:
    print(text)
