"""A fleet on one machine: nodes with sshd, each with its own address, host name, host key, home, disk and processes.

    with lab(4) as nodes:
        nodes.hosts()        for fleet.hosts: ["node0=10.77.0.2", ...]
        nodes.ssh()          for fleet.ssh: user, key, known_hosts
        nodes.cut(2)         pulls its cable; join(2) puts it back
        nodes.destroy(2)     its power goes; recreate(2): it boots, with what its disk held. `reboot` typed on a node works too

What is real: sshd, TCP, torchrun, files, users, sudo, links that go down. What is not: the kernel (all nodes have this machine's,
and its /dev), EFA, accelerators and Lustre. /fsx is a folder that all nodes share through a server that behaves as one of NFS or
Lustre (shared.py); `nodes.server` makes it wait, fail and forget.

The test's own process steps into the lab's network (setns): it reaches the nodes and nothing else, and what it starts does
the same. Everything lives in namespaces whose processes die with the test's, however that dies. Needs root and Linux.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleet.shared import LEASE, Server, new_device
from requirement import missing, need_program
from trainfleet.process.processes import die_with_parent

HERE = Path(__file__).parent
HEAD = "10.77.0.1"  # where the test's own process stands
SSHD = """ListenAddress {address}
HostKey /etc/ssh/lab_host_key
PidFile none
AuthorizedKeysFile .ssh/authorized_keys /etc/ssh/lab_authorized_keys .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
UseDNS no
StrictModes no
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org
MaxStartups 200
PrintMotd no
Subsystem sftp internal-sftp
"""
REBOOT = "#!/bin/sh\n(sleep 0.2; kill -TERM 1) > /dev/null 2>&1 &\n"  # process 1 is sshd, and all of the node goes with it
CLONE_NEWNET = 0x40000000
USERS = {"trainer": 4001, "guest": 4002, "colleague": 4003}


def address_of(node: int) -> str:
    return f"10.77.{(node + 2) // 250}.{(node + 2) % 250}"


class Lab:
    """The running lab; nodes are numbered from 0."""

    server: Server

    def __init__(self, count: int, folder: Path, room: str = "", lease: float = LEASE) -> None:
        self.count, self.folder, self.room, self.lease = count, folder, room, lease
        self.shared = folder / "shared"  # the server's disk, which every node sees as /fsx
        self.key = folder / "key"
        self.known_hosts = folder / "known_hosts"
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._networks: dict[
            int, int
        ] = {}  # node → inode of its network namespace, which tells its processes from others
        self.off: set[int] = set()  # nodes without power
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep_up, daemon=True)
        self._world: subprocess.Popen[bytes] | None = None
        self._before: int | None = None  # the network that this process came from

    # What a config needs

    def hosts(self) -> list[str]:
        return [f"node{node}={address_of(node)}" for node in range(self.count)]

    def ssh(self, user: str = "root") -> dict[str, object]:
        """fleet.ssh. Users: root, trainer and colleague (sudo without a password), guest (no sudo)."""
        return {"user": user, "key": str(self.key), "known_hosts": str(self.known_hosts)}

    def fleet(self, user: str = "root", **changes: object) -> dict[str, object]:
        """The fleet of a config: these hosts, with this Python."""
        return {"backend": "ssh", "hosts": self.hosts(), "ssh": self.ssh(user), "shared_folder": "/fsx/trainfleet",
                "python": sys.executable} | changes  # fmt: skip

    # What happens to a node

    def cut(self, node: int) -> None:
        """Pulls its cable: packets vanish, nobody is told."""
        _ip(f"link set v{node} down")

    def join(self, node: int) -> None:
        """Puts the cable back."""
        _ip(f"link set v{node} up")

    def signal_all(self, node: int, number: signal.Signals) -> None:
        """A signal to every process of the node but its first, which is sshd."""
        for pid in set(self.pids(node)) - {self._init(node), self._nodes[node].pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def shut(self, node: int) -> None:
        """Its sshd hangs: links that were open end, none opens any more, and all else on the node goes on. `open` ends that."""
        os.kill(self._init(node), signal.SIGSTOP)
        for pid in set(self.processes(node, "sshd: ")) - {self._init(node)}:
            os.kill(pid, signal.SIGKILL)

    def open(self, node: int) -> None:
        os.kill(self._init(node), signal.SIGCONT)

    def slow(self, node: int, rate: str = "64kbit") -> None:
        """Everything to and from the node passes at this rate (tc's token bucket), until `fast`."""
        shape = ["root", "tbf", "rate", rate, "burst", "2kb", "latency", "2s"]
        subprocess.run(["tc", "qdisc", "replace", "dev", f"v{node}", *shape], check=True)
        self.run(node, "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def fast(self, node: int) -> None:
        subprocess.run(["tc", "qdisc", "del", "dev", f"v{node}", "root"], check=True)
        self.run(node, "tc", "qdisc", "del", "dev", "eth0", "root")

    def destroy(self, node: int) -> None:
        """Its power goes: no process is left and no packet is sent; its disk stays, and its locks in /fsx for a while."""
        self.off.add(node)
        self.cut(node)
        self.server.vanish(node)  # what waits for /fsx could not be killed else
        self._kill(node)

    def recreate(self, node: int) -> None:
        """It boots again, with a new boot id."""
        self._boot(node)
        self._await(node)
        self.off.discard(
            node
        )  # last: the keeper boots what is not off and does not run, and would boot it a second time

    def new_host_key(self, node: int) -> None:
        """As after a reinstallation: the host shows another key than known_hosts has. Takes effect at once."""
        key, _ = _new_key()
        (self.root(node) / "etc/ssh/lab_host_key").write_bytes(key)
        os.kill(self._init(node), signal.SIGHUP)
        time.sleep(0.3)

    def show(self, node: int, folder: str) -> None:
        """Puts a folder of /fsx on a node as it is on the server: no socket in it can be reached through that."""
        enter = ["nsenter", "--target", str(self._init(node)), "--mount"]
        target = f"{self.folder}/disks/{node}/root/fsx/{folder}"
        subprocess.run([*enter, "sh", "-c", 'mountpoint -q "$2" || mount --bind "$1" "$2"', "-", str(self.shared / folder), target],
                       check=True)  # fmt: skip

    # What is on a node

    def root(self, node: int) -> Path:
        """The node's file system, as seen from here."""
        return Path(f"/proc/{self._init(node)}/root")

    def enter(self, node: int) -> list[str]:
        """What a command begins with that is to run on the node."""
        return [
            "nsenter",
            "--target",
            str(self._init(node)),
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--root",
            "env",
            "--chdir=/",
        ]

    def run(self, node: int, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command on the node as root, without SSH."""
        return subprocess.run(
            [*self.enter(node), *command], check=check, capture_output=True, text=True
        )

    def pids(self, node: int) -> list[int]:
        """All processes of the node, with the ids that they have here; also those of a node that was destroyed."""
        everyone = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return sorted(pid for pid in everyone if _network(pid) == self._networks[node])

    def processes(self, node: int, pattern: str) -> list[int]:
        """Those whose command line contains `pattern`."""
        return [pid for pid in self.pids(node) if pattern in _command_line(pid)]

    def host_key(self, node: int) -> str:
        """The public host key that the node shows, as known_hosts has it."""
        return self._host_keys[node][1]

    # Up and down

    def start(self) -> None:
        for name in ("shared", "disks"):
            (self.folder / name).mkdir()
        self._make_keys()
        # The disks lie in memory: no part of an overlay may lie on the file system that it covers.
        self._world = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-ec", f"mount -t tmpfs tmpfs {self.folder}/disks; echo; exec sleep infinity"],
            stdout=subprocess.PIPE, preexec_fn=die_with_parent,
        )  # fmt: skip
        assert self._world.stdout is not None
        if not self._world.stdout.readline():
            missing(
                "this machine lets nobody make namespaces; the lab needs root (unshare --net --mount)"
            )
        self._disks = Path(f"/proc/{self._world.pid}/root{self.folder}/disks")
        if self.room:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={self.room}", "tmpfs", str(self.shared)]
            subprocess.run(
                ["nsenter", "--target", str(self._world.pid), "--mount", *mount], check=True
            )
            self.shared = Path(f"/proc/{self._world.pid}/root{self.shared}")
        self.server = Server(self.shared, lease=self.lease)
        self._make_base(self._disks / "base")
        self._before = os.open("/proc/self/ns/net", os.O_RDONLY)
        _enter(Path(f"/proc/{self._world.pid}/ns/net"))
        _ip(
            "link set lo up",
            "link add lab type bridge",
            f"addr add {HEAD}/16 dev lab",
            "link set lab up",
        )
        for node in range(self.count):
            self._boot(node)
        for node in range(self.count):
            self._await(node)
        self._keeper.start()

    def close(self) -> None:
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for node in self._nodes:
            self.server.vanish(node)  # what waits for /fsx could not be killed else
            self._kill(node)
        if hasattr(self, "server"):
            self.server.close()
        if self._world is not None:
            self._world.kill()
            self._world.wait()
        if self._before is not None:
            _enter_descriptor(self._before)
            os.close(self._before)

    def _make_keys(self) -> None:
        private, public = _new_key()
        self.key.write_bytes(private)
        self.key.chmod(0o600)
        Path(f"{self.key}.pub").write_text(f"{public}\n")
        self._authorized = public
        self._host_keys = [_new_key() for _ in range(self.count)]
        self.known_hosts.write_text(
            "".join(
                f"{address_of(node)} {self._host_keys[node][1]}\n" for node in range(self.count)
            )
        )

    def _make_base(self, base: Path) -> None:
        """What all nodes' disks have over this machine's: users, hosts, sudo, no service that this machine has set up."""
        etc = base / "etc"
        (etc / "ssh").mkdir(parents=True)
        (etc / "sudoers.d").mkdir()
        (etc / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address_of(node)} node{node}\n" for node in range(self.count))
        )
        (etc / "ssh/lab_authorized_keys").write_text(self._authorized + "\n")
        for name, entry in (("passwd", "{user}:x:{id}:{id}::/home/{user}:/bin/bash\n"), ("group", "{user}:x:{id}:\n"),
                            ("shadow", "{user}:*:19000:0:99999:7:::\n")):  # fmt: skip
            users = "".join(entry.format(user=user, id=number) for user, number in USERS.items())
            (etc / name).write_text(Path("/etc", name).read_text() + users)
        (etc / "sudoers.d/lab").write_text(
            "trainer ALL=(ALL) NOPASSWD: ALL\ncolleague ALL=(ALL) NOPASSWD: ALL\n"
        )
        (etc / "sudoers.d/lab").chmod(0o440)
        for user, number in USERS.items():
            home = base / "home" / user
            home.mkdir(parents=True)
            os.chown(home, number, number)
        (base / "usr/sbin").mkdir(parents=True)
        for program in ("reboot", "shutdown"):
            (base / "usr/sbin" / program).write_text(REBOOT)
            (base / "usr/sbin" / program).chmod(0o755)

    def _boot(self, node: int) -> None:
        assert self._world is not None and self._before is not None
        disk = self._disks / str(node)
        for name in ("upper/etc/ssh", "work", "root", "home"):
            (disk / name).mkdir(parents=True, exist_ok=True)
        (disk / "boot_id").write_text(f"{uuid.uuid4()}\n")
        for name, text in (
            ("lab_config", SSHD.format(address=address_of(node)).encode()),
            ("lab_host_key", self._host_keys[node][0]),
        ):
            path = disk / "upper/etc/ssh" / name
            if not path.exists():
                path.write_bytes(text)
                path.chmod(0o600)
        (disk / "upper/etc/hostname").write_text(f"node{node}\n")
        parts = {str(Path(sys.base_prefix).resolve()), str(HERE.parents[1])}
        kept = sorted(part for part in parts if part.startswith("/root/"))
        device = new_device()
        unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
        self._nodes[node] = process = subprocess.Popen(
            ["nsenter", "--target", str(self._world.pid), "--mount", "--net", *unshare, "sh", str(HERE / "node.sh"),
             f"{self.folder}/disks/{node}", f"node{node}", address_of(node), *kept],
            preexec_fn=die_with_parent, stdin=device, cwd="/",
        )  # fmt: skip
        self.server.serve(node, device)
        os.close(device)
        elsewhere = (_network(os.getpid()), os.fstat(self._before).st_ino, None)
        while process.poll() is None and _network(process.pid) in elsewhere:
            time.sleep(0.002)
        self._networks[node] = _network(process.pid) or 0
        card = f"02:77:00:00:{node >> 8:02x}:{node & 255:02x}"  # kept over a reboot, as others remember it
        _ip(
            f"link add v{node} type veth peer name eth0 address {card} netns {process.pid}",
            f"link set v{node} master lab up",
        )

    def _await(self, node: int) -> None:
        """Returns once sshd listens."""
        deadline = time.monotonic() + 20
        want = f"{int.from_bytes(bytes(map(int, address_of(node).split('.'))), 'little'):08X}:0016"
        while time.monotonic() < deadline:
            if want in Path(f"/proc/{self._nodes[node].pid}/net/tcp").read_text():
                return
            time.sleep(0.01)
        raise TimeoutError(f"node {node} of the lab does not come up")

    def _keep_up(self) -> None:
        """Boots the nodes again that went down by themselves, as a reboot does."""
        while not self._closing.wait(0.1):
            for node, process in list(self._nodes.items()):
                if node not in self.off and process.poll() is not None:
                    self._kill(node)
                    self._boot(node)

    def _kill(self, node: int) -> None:
        self._nodes[node].kill()
        self._nodes[node].wait()
        while self.pids(node):
            time.sleep(0.01)
        subprocess.run(
            ["ip", "link", "del", f"v{node}"], capture_output=True, check=False
        )  # gone already with the last process

    def _init(self, node: int) -> int:
        """The node's process 1."""
        parent = self._nodes[node].pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])


def _new_key() -> tuple[bytes, str]:
    """A private key as OpenSSH writes it, and the public one as known_hosts has it."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public.decode()


def _network(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _ip(*lines: str) -> None:
    subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True, capture_output=True
    )


def _enter(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    _enter_descriptor(descriptor)
    os.close(descriptor)


def _enter_descriptor(descriptor: int) -> None:
    """This thread, and all threads and processes that it starts from now on, stand in that network."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def lab(count: int, room: str = "", lease: float = LEASE) -> Iterator[Lab]:
    """A lab of `count` nodes, up and reachable; gone with all that ran in it when the block ends.

    `room`: what fits into the folder that they share, `64m`; else as much as into this machine's /tmp.
    `lease`: seconds for which the locks of a node without power live on.
    """
    need_program("sshd", "apt-get install openssh-server")
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("sudo", "sudo")):
        need_program(program, f"apt-get install {package}")
    if os.geteuid() != 0:
        missing("the lab of sshd nodes needs root")
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    nodes = Lab(count, folder, room, lease)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
