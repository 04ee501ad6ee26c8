"""The machines of the ec2 backend: make setup creates a stack, and make clean proves that nothing
of it is left.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Mapping

import yaml

from ..cloud import clock, permissions, plan_text
from ..cloud.calls import Calls
from ..cloud.capacity import NOTHING, Paid, PrepaidCapacity
from ..cloud.inventory import OwnedResource, costing, require_seen, total, weighed
from ..cloud.stack_nodes import FleetStack, Foreseen, StackNode
from ..cloud.sweep import strangers
from ..cloud.template_inputs import Inputs
from ..config import Config
from ..config.host_list import Host
from ..hosts import host_setup
from ..hosts.host_table import Board
from ..plan.request import Artifact
from ..trust.errors import BackendError
from .base import Machines, Prospect
from .head import Head
from .host_keys import keep_keys, require_plugin
from .request_json import artifact

# the board's last ones
STATES = {"made": "ok", "changed": "changed", "deleted": "changed", "kept": "ok", "done": "ok"}
KEYS_IN = 600.0  # seconds until the last console has its host keys
AGAIN = 10.0
ROUNDS = 3  # of a removal, as what was made a moment ago may not be seen in the first


@contextlib.contextmanager
def told_of(what: str, then: str) -> Iterator[None]:
    """Ctrl-C ends this program, and nothing that AWS was asked for: that is said."""
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"{what}, and it may cost money\n  next: make ls shows what there is; {then}",
            file=sys.stderr,
            flush=True,
        )
        raise


def policies(config: Config, inputs: Inputs) -> Iterator[Artifact]:
    """What is enough for whoever makes, runs and removes what the config says, as policies that IAM
    takes.
    """
    for number, found in enumerate(permissions.documents(permissions.policy(config, inputs)), 1):
        name = "policy.json" if number == 1 else f"policy-{number}.json"
        yield Artifact(name, json.dumps(found, indent=2) + "\n")


class Stacked(Machines):
    """Machines (base.py) that are a stack: all but what is done on them once they are there."""

    made = True
    paid = NOTHING  # ahead, for their nodes

    def __init__(self, cloud: FleetStack) -> None:
        self.cloud = cloud

    def prospect(self, hours: float | None, speed: float | None) -> Prospect:
        """What would change, what it costs, and what stands against it."""
        lines = plan_text.describe(
            self.cloud.config, self.cloud, self.foreseen, hours, speed, self.paid
        )
        return Prospect(tuple(lines), self.changes(), unasked=bool(self.foreseen.unasked))

    @functools.cached_property
    def foreseen(self) -> Foreseen:
        """Looked at once: what a plan shows is what it writes."""
        return self.cloud.foresee(self.bad())

    def changes(self) -> tuple[Artifact, ...]:
        """The very request that would make or change the stack, and a policy that is enough for
        whoever sends it.
        """
        planned = self.foreseen.requests
        if not planned:
            return ()
        requests = [artifact(number, *request) for number, request in enumerate(planned, 1)]
        bodies = [str(request["TemplateBody"]) for _, _, request in planned]
        stack = [
            Artifact("stack.yaml", yaml.safe_dump(json.loads(body), sort_keys=False))
            for body in bodies
        ]
        return (*stack, *requests, *policies(self.cloud.config, self.foreseen.inputs))

    def bad(self) -> set[str]:
        """The ids of instances that are to be replaced."""
        return set()

    def make(self) -> None:
        """Makes the stack as it should be, and shows how that goes."""
        with (
            told_of(
                "AWS goes on with what was begun", "make setup goes on with it, make clean ends it"
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
        self.__dict__.pop("foreseen", None)  # it is what was foreseen before

    def apply(self) -> int:
        self.make()
        return 0

    def left(self) -> list[str]:
        return [one.line() for one in self.cloud.left()]

    def costing(self) -> list[str]:
        return costing(self.cloud.left())

    @told_of("not all of it is gone", "make clean goes on with it")
    def remove(self, purge: bool) -> None:
        """Takes all down, says what stays because it holds data, and proves that nothing else is
        left.

        Raises:
            BackendError: something else is left; what, and what it costs.
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
    """Those of the ec2 backend: hosts, which setup makes ready."""

    system = "ubuntu2404"

    def __init__(
        self, cloud: FleetStack, head: Head, paid: Paid, ahead: PrepaidCapacity | None
    ) -> None:
        super().__init__(cloud)
        self.head, self.paid, self.ahead = head, paid, ahead

    def bad(self) -> set[str]:
        """The ids of instances in quarantine."""
        return set(self.head.quarantine.entries())

    def apply(self) -> int:
        """Makes the stack as it should be, waits for its nodes, and sets them up."""
        if self.head.by_agent:
            require_plugin()
        bad = self.bad()
        self.make()
        nodes = self.cloud.await_nodes()
        self.head.quarantine.forget(bad - {node.id for node in nodes})
        self.await_keys(nodes)
        self.head.look_again()
        return host_setup.main(self.head.located)

    def await_keys(self, nodes: list[StackNode]) -> None:
        """Returns once every node's host key is known from AWS; BackendError where it does not tell
        one.
        """
        deadline, said = clock.now() + KEYS_IN, False
        while missing := sorted(
            {node.id for node in nodes} - keep_keys(self.cloud, nodes, self.head.by_agent)[1]
        ):
            if clock.now() > deadline:
                why = "neither its console nor its SSM agent says it"
                raise BackendError(
                    "the host key is not known",
                    where=", ".join(missing),
                    why=why,
                    next="make setup again",
                )
            if not said:
                print(
                    f"waiting for the host keys of {len(missing)} nodes; AWS tells them minutes "
                    "after their boot",
                    flush=True,
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
    """Says what of a config was kept because it holds data, and that nothing else is there; by two
    looks that agree.

    Raises:
        BackendError: something else is left; what, and what it costs; or these credentials may not
            look at all that there may be.
    """
    kept = list(weighed(calls, [one for one in found if one.id in stay]))
    for one in kept:
        if one.holds_data:
            say(f"kept {one.line()}")
    if kept:
        say(f"what is kept costs {total(kept)}; make clean PURGE=1 removes it too")
    left = [one for one in found if one.id not in stay]  # what was not looked at has no id
    if any(one.id for one in left):
        raise _left(left, calls, troubles)
    require_seen(found, calls.region, "make clean")
    say(
        f"nothing {'else ' if kept else ''}of {config} is left in {calls.region}: looked for by "
        "tag, twice"
    )


def _left(left: list[OwnedResource], calls: Calls, troubles: Mapping[str, str]) -> BackendError:
    """What is left, why, and what it costs."""
    rows = [f"  {one.line()}{f': {why}' if (why := troubles.get(one.id)) else ''}" for one in left]
    rows += [f"  {line}" for line in strangers(calls, left)]
    there = [one for one in left if one.id]
    what = "\n".join(
        [f"{len(there)} things are left in {calls.region}, which cost {total(there)}", *rows]
    )
    return BackendError(what, next="make ls shows it; mend what AWS names, then make clean again")


def say(text: str) -> None:
    print(text, flush=True)
