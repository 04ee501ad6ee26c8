"""The head of a fleet, as seen from the machine where commands are typed: it takes over the run, and this machine may go away.

The launcher runs on the first host, in the shared folder, in a session of its own: a laptop may be closed. A second host stands
by (watch/standby.py). Commands typed here only read the run folder there, or write a request to it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..config import Config, dump_resolved
from ..config.types import Ssh
from ..errors import BackendError
from ..origin import python_path
from ..plan.request import Request, script
from . import jobs
from .answers import Host, Result
from .facts import Facts
from .gate import send_code
from .transport import Transport

HEADS = 2  # hosts that can be the head: the first, and one that stands by
TIMEOUT = 60.0
ORDER = "launch.json"  # in the run folder, beside launch.yaml: the requests that the launcher is to carry out
KNOWN_HOSTS = "{}/known_hosts"  # in the run folder: a fleet's runs have hosts of their own
KEY = "~/.ssh/id_trainfleet"  # scripts/head_key.sh makes it too
ADMIT = """umask 077
f=~/.ssh/authorized_keys
mkdir -p ~/.ssh && touch "$f"
while read -r key; do grep -qxF -- "$key" "$f" || echo "$key" >> "$f"; done"""


class Head:
    """The fleet's head as seen from here."""

    def __init__(self, transport: Transport, config: Config, python: str, code: str) -> None:
        self.transport, self.config, self.python, self.code = transport, config, python, code
        self.folder = config.fleet.shared_folder or ""
        self.name, self.run = f"{config.name}-launcher", f"runs/{config.name}"

    def prepare(self, facts: Mapping[Host, Facts], order: Sequence[Request], asked: str) -> None:
        """Sends code, config, requests, host keys and the head's public key: all that the launcher needs.

        `facts` are of the hosts to use, in order; `order` is what the launcher is to execute, as it is;
        `asked` the config that was asked for, which it leaves in the run folder.
        """
        hosts = list(facts)
        send_code(self.transport, self.folder, hosts)
        self.open_doors(hosts[:HEADS], hosts)
        keys = "".join(self.host_key(host, facts[host]) for host in hosts)
        config = dump_resolved(self.config_there(facts))
        requests = json.dumps({"requests": [request.record() for request in order]}) + "\n"
        files = {KNOWN_HOSTS.format(self.run): keys, f"{self.run}/launch.yaml": config, f"{self.run}/{ORDER}": requests,
                 f"{self.run}/given.yaml": asked}  # fmt: skip
        answers = self.transport.put({name: text.encode() for name, text in files.items()}, self.folder, hosts=hosts[:1])
        answers.require(f"can't write in {self.folder}")

    def config_there(self, facts: Mapping[Host, Facts]) -> Config:
        """The config as the head needs it: the hosts by the addresses that they have among themselves, and its own key."""
        hosts = tuple(f"{host.name}={facts[host].address(host)}:{host.port}" for host in facts)
        user = next(iter(facts.values())).user
        ssh = Ssh(user=user, key=KEY, jump=None, known_hosts=KNOWN_HOSTS.format(self.run), fingerprints=(), config=None)
        return replace(self.config, fleet=replace(self.config.fleet, hosts=hosts, ssh=ssh))

    def host_key(self, host: Host, facts: Facts) -> str:
        """The key that this host has shown us, as known_hosts has it, under its address among the nodes."""
        key, address = self.transport.server_key(host), facts.address(host)
        name = address if host.port == 22 else f"[{address}]:{host.port}"
        return f"{name} {key.get_name()} {key.get_base64()}\n"

    def open_doors(self, heads: Sequence[Host], hosts: Iterable[Host]) -> None:
        """Each head has a key of its own, made there, and every host lets it in; other keys are left as they are."""
        make = f"test -s {KEY} || ssh-keygen -q -t ed25519 -N '' -C \"trainfleet head $(uname -n)\" -f {KEY}; cat {KEY}.pub"
        made = self.transport.run(f"mkdir -p -m 700 ~/.ssh && {{ {make}; }}", timeout=TIMEOUT, hosts=heads)
        made.require("the head could not make its key")
        public = "".join(f"{public_key(host, answer.stdout)}\n" for host, answer in made.ok.items())
        self.transport.run(ADMIT, stdin=public, timeout=TIMEOUT, hosts=hosts).require("the head's key can't be let in")

    def start(
        self, heads: Sequence[Host], verb: str, started: float, secrets: Mapping[str, str], token: str, more: Mapping[str, str]
    ) -> None:
        """Starts the launcher on the first of `heads` and lets the others stand by; all of them know the secrets.

        `more`: what else is in their environment.
        """
        launcher = (self.python, "-m", "trainfleet", verb, f"CONFIG={self.run}/launch.yaml")
        standby = (self.python, "-m", "trainfleet.watch.standby", self.run, *launcher)
        environment = {"TRAINFLEET_HEAD": "1", "TRAINFLEET_STARTED": str(started), **python_path(f"{self.code}/python"),
                       "TRAINFLEET_ORDER": f"{self.run}/{ORDER}", "NO_COLOR": "1", **more}  # fmt: skip
        for host, argv, log in ((heads[0], launcher, "launcher"), *((host, standby, "standby") for host in heads[1:HEADS])):
            words = [self.python, "-m", "trainfleet.supervisor", f"{self.run}/logs/{log}.log", "--", *argv]
            text = script([f"the {log} of {self.config.name}, on {host}"], self.folder, environment, words)
            mark = jobs.mark_of(self.folder, self.config.name)
            command = jobs.start(f"{self.config.name}-{log}", mark, self.python, self.code, self.folder, jobs.LAUNCHER)
            answers = self.transport.run(command, stdin=jobs.task(text, secrets, token), timeout=TIMEOUT, hosts=[host])
            answers.require("the launcher could not be started")

    def has_ended(self, host: Host) -> bool:
        """Whether the launcher that was started on this host runs no more."""
        answer = self.transport.ask(host, jobs.look(self.name), timeout=TIMEOUT)
        return isinstance(answer, Result) and not answer.stdout.strip().endswith("running")

    def ask_to_stop(self, host: Host) -> None:
        """Leaves the word that ranks look for at every step."""
        command = f"touch {shlex.quote(f'{self.folder}/{self.run}/stop')}"
        self.transport.run(command, timeout=TIMEOUT, hosts=[host]).require("can't ask the run to stop")


def public_key(host: Host, text: str) -> str:
    """The one key in a head's answer: every host will let it in, so nothing may stand before it, and no other beside it.

    Raises:
        BackendError: it is none.
    """
    line = text.strip().rpartition("\n")[2]
    if not re.fullmatch(r"ssh-ed25519 [A-Za-z0-9+/]{68}(={0,2})( [A-Za-z0-9 ._@-]{0,200})?", line):
        what, next = "the key that it shows is no key of ours", f"on it: rm {KEY}*"
        raise BackendError(what, where=host.name, why=f"{line[:80]!a}", next=next)
    return line
