"""Controls a fleet's head from a user's machine, which can be switched off once the launcher runs.

The launcher runs on the first host, in the shared folder and in a separate session. Another host is
the standby (watch/standby.py): initially the second host, later the one that the launcher appoints
(launch/failover.py). Later commands only read the fleet's run folder, or write requests to it.

A verb is sent as one line of JSON to a machine with access to the run folder, where
`python -m trainfleet -` runs it. Values that must not appear on a command line, such as prompts and
configs, are sent through stdin. Stdin stays open while the user waits. When it closes, the process
and its children exit.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import Config, dump_resolved
from ..config.types import SshConfig
from ..health.lease import APPOINTED
from ..plan.job import Request, script
from ..process import file_systems
from ..process.install_paths import python_path
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError
from . import host_commands
from .facts import Facts
from .host_results import Host, HostFailure, Result
from .preflight import send_code
from .transport import Transport

TIMEOUT = 60.0
# file in the run folder that contains the launcher's requests, next to launch.yaml
ORDER = "launch.json"
# known_hosts file, kept in the run folder because runs can have different hosts
KNOWN_HOSTS = "{}/known_hosts"
KEY = "~/.ssh/id_trainfleet"  # the head's SSH key, which scripts/head_key.sh can also create
ADMIT = r"""umask 077
f=~/.ssh/authorized_keys
mkdir -p ~/.ssh && touch "$f"
new=$(grep -vxFf "$f" - | sort -u)
[ -z "$(tail -c 1 "$f")" ] || echo >> "$f"
[ -z "$new" ] || echo "$new" >> "$f"
"""


@dataclass(frozen=True)
class Launcher:
    """Command line of a launcher, with its environment and secrets."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    secrets: Mapping[str, str]


class FleetHead:
    """Head of a fleet, as seen from a user's machine."""

    def __init__(self, transport: Transport, config: Config, python: str, code: str) -> None:
        self.transport, self.config, self.python, self.code = transport, config, python, code
        self.folder = config.fleet.shared_folder or ""
        self.name, self.run = f"{config.name}-launcher", f"runs/{config.name}"

    def prepare(self, facts: Mapping[Host, Facts], order: Sequence[Request], asked: str) -> None:
        """Sends the launcher's inputs to the fleet: code, config, requests, and SSH keys.

        `facts` contains the hosts to use, in order. `order` contains the requests that the launcher
        will execute unchanged. `asked` is the user's config, which is stored in the run folder.
        """
        hosts = list(facts)
        send_code(self.transport, self.config.fleet, hosts)
        # any host may become the head, even if the current one can't appoint it
        for host, failure in self.open_doors(hosts, hosts).items():
            raise BackendError(
                f"can't authorize the head's key: {failure}", where=host.name, next="make doctor"
            )
        keys = "".join(self.host_key(host, facts[host]) for host in hosts)
        config = dump_resolved(self.config_there(facts))
        requests = json.dumps({"requests": [request.record() for request in order]}) + "\n"
        files = {
            KNOWN_HOSTS.format(self.run): keys,
            f"{self.run}/launch.yaml": config,
            f"{self.run}/{ORDER}": requests,
            f"{self.run}/given.yaml": asked,
        }
        answers = self.transport.put(
            {name: text.encode() for name, text in files.items()}, self.folder, hosts=hosts[:1]
        )
        answers.require(f"can't write to {self.folder}")

    def config_there(self, facts: Mapping[Host, Facts]) -> Config:
        """Returns the config for the launcher, with the hosts' internal addresses and the head's
        key.
        """
        hosts = tuple(f"{host.name}={facts[host].address(host)}:{host.port}" for host in facts)
        user = next(iter(facts.values())).user
        ssh = SshConfig(
            user=user,
            key=KEY,
            jump=None,
            known_hosts=KNOWN_HOSTS.format(self.run),
            fingerprints=(),
            config=None,
        )
        return replace(self.config, fleet=replace(self.config.fleet, hosts=hosts, ssh=ssh))

    def host_key(self, host: Host, facts: Facts) -> str:
        """Returns a host's known_hosts line, with its internal address and the key that it
        presented.
        """
        key, address = self.transport.server_key(host), facts.address(host)
        name = address if host.port == 22 else f"[{address}]:{host.port}"
        return f"{name} {key.get_name()} {key.get_base64()}\n"

    def open_doors(self, heads: Sequence[Host], hosts: Iterable[Host]) -> dict[Host, HostFailure]:
        """Creates a key on each head and authorizes it on every host, without touching other keys.

        Returns the hosts that failed to authorize the key. Raises BackendError if a head failed to
        create its key.
        """
        make = (
            f"test -s {KEY} || ssh-keygen -q -t ed25519 -N '' -C \"trainfleet head $(uname "
            f'-n)" -f {KEY}; cat {KEY}.pub'
        )
        made = self.transport.run(
            f"mkdir -p -m 700 ~/.ssh && {{ {make}; }}", timeout=TIMEOUT, hosts=heads
        )
        made.require("can't create the head's SSH key")
        public = "".join(f"{public_key(host, answer.stdout)}\n" for host, answer in made.ok.items())
        return self.transport.run(ADMIT, stdin=public, timeout=TIMEOUT, hosts=hosts).failed

    def start(self, host: Host, launcher: Launcher) -> None:
        """Starts the launcher on a host."""
        self._start(host, "launcher", "launcher", launcher.words, launcher, {})

    def appoint(self, host: Host, launcher: Launcher, number: int, term: int) -> None:
        """Starts a standby on a host, to take over if the launcher fails.

        `term` is the term of the previous launcher. If several standbys have been appointed, the
        one with the highest `number` wins.
        """
        words = [self.python, "-m", "trainfleet.watch.standby", self.run, *launcher.words]
        self._start(
            host, "standby", f"standby-{number}", words, launcher, {APPOINTED: f"{number} {term}"}
        )

    def dismiss(self, host: Host) -> None:
        """Stops the standby on a host, if the host is reachable."""
        self.transport.ask(
            host, host_commands.terminate(f"{self.config.name}-standby"), timeout=TIMEOUT
        )

    def _start(
        self,
        host: Host,
        what: str,
        log: str,
        words: Sequence[str],
        launcher: Launcher,
        more: Mapping[str, str],
    ) -> None:
        environment = {
            "TRAINFLEET_HEAD": "1",
            **python_path(f"{self.code}/python"),
            "TRAINFLEET_ORDER": f"{self.run}/{ORDER}",
            "NO_COLOR": "1",
            **launcher.environment,
            **more,
        }
        supervised = [
            self.python,
            "-m",
            "trainfleet.node.supervisor",
            f"{self.run}/logs/{log}.log",
            "--",
            *words,
        ]
        text = script(
            [f"the {what} of {self.config.name}, on {host}"], self.folder, environment, supervised
        )
        mark = host_commands.mark_of(self.folder, self.config.name)
        command = host_commands.start(
            f"{self.config.name}-{what}",
            mark,
            self.python,
            self.code,
            self.folder,
            host_commands.LAUNCHER,
        )
        order = host_commands.task(text, launcher.secrets, secrets.token_hex(8))
        answers = self.transport.run(command, stdin=order, timeout=TIMEOUT, hosts=[host])
        answers.require(f"can't start the {what}")

    def has_ended(self, host: Host) -> bool:
        """Returns whether the launcher on this host has exited."""
        answer = self.transport.ask(host, host_commands.look(self.name), timeout=TIMEOUT)
        return isinstance(answer, Result) and not answer.stdout.strip().endswith("running")

    def ask_to_stop(self, host: Host) -> None:
        """Creates the run's stop request file, which ranks check at every step."""
        command = f": > {shlex.quote(f'{self.folder}/{self.run}/stop')}"
        self.transport.run(command, timeout=TIMEOUT, hosts=[host]).require(
            "can't send the stop request to the run"
        )


def public_key(host: Host, text: str) -> str:
    """Extracts the public key from a head's response.

    Every host will authorize this key, so the response must contain exactly one, without options.

    Raises:
        BackendError: the response does not end with exactly one valid key.
    """
    line = text.strip().rpartition("\n")[2]
    if not re.fullmatch(r"ssh-ed25519 [A-Za-z0-9+/]{68}(={0,2})( [A-Za-z0-9 ._@-]{0,200})?", line):
        raise BackendError(
            "its public key was not created by trainfleet",
            where=host.name,
            why=f"{line[:80]!a}",
            next=f"on that host, run: rm {KEY}*",
        )
    return line


ALONE = 130  # exit code of a verb whose user disconnected
WORD = "-"  # placeholder argument; the verb is read from stdin instead
PREFIX = "trainfleet-errand-"
# environment variables that the sent config already reflects
OURS = ("CONFIG", "RUN", "SET", "NODES")


def encode_verb(verb: str, config: Config, variables: dict[str, str]) -> bytes:
    """Returns the line that `received_verb` parses."""
    kept = {name: value for name, value in variables.items() if name not in OURS}
    return (
        json.dumps({"verb": verb, "config": dump_resolved(config), "variables": kept}).encode()
        + b"\n"
    )


def verb_command(python: str, code: str, folder: str) -> str:
    """Returns the command that runs a verb from stdin on a host, in the shared folder."""
    words = [
        "env",
        "TRAINFLEET_HEAD=1",
        f"PYTHONPATH={code}/python",
        "PYTHONSAFEPATH=1",
        "NO_COLOR=1",
        python,
        "-m",
        "trainfleet",
        WORD,
    ]
    return f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"


def received_verb(descriptor: int) -> list[str]:
    """Reads a verb from the first line of stdin and returns its command line.

    Also makes the process exit as soon as stdin closes.

    Raises:
        InputError: the line is malformed.
    """
    line = b""
    while not line.endswith(b"\n") and (more := os.read(descriptor, 1 << 16)):
        line += more
    record = untrusted_input.parse_json(line.decode(errors="replace"), "stdin")
    match record:
        case {"verb": str(verb), "config": str(config), "variables": dict(variables)} if all(
            isinstance(value, str) for value in variables.values()
        ):
            file_systems.sweep(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
        case _:
            raise InputError(
                "is not a valid request", where="stdin", next="run make VERB, which sends one"
            )
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    file_systems.hold(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    threading.Thread(
        target=_leave_with, args=(descriptor, folder), name="asker", daemon=True
    ).start()
    return [
        verb,
        f"CONFIG={folder / 'config.yaml'}",
        *(f"{name}={value}" for name, value in variables.items()),
    ]


def _leave_with(descriptor: int, folder: Path) -> None:
    """Exits the process and its children when stdin closes."""
    while os.read(descriptor, 1 << 10):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(ALONE)
