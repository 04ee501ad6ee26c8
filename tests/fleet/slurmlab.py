"""A real Slurm on the lab's nodes: slurmctld where the test stands, a slurmd on each node, munge, and slurmdbd when it is asked for.

    with lab(4) as nodes, cluster(nodes) as slurm:
        slurm.commands       a folder for PATH: sbatch, squeue, scancel ... that know this cluster
        slurm.folder         what every node sees under the path that it has here

What is real: every daemon, and the control groups by which a step's processes are found. What is not: nodes of more than two
cores, and accelerators (their gres is a count).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet.lab import HEAD, Lab, address_of
from requirement import need_program
from trainfleet.process.processes import die_with_parent

CORES = 2  # of a node, as Slurm is told
COMMANDS = (
    "sbatch",
    "squeue",
    "scancel",
    "scontrol",
    "sinfo",
    "sacct",
    "sacctmgr",
    "srun",
    "slurmctld",
    "slurmd",
    "slurmdbd",
)
CONF = """ClusterName=lab
SlurmctldHost=head({head})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout={patience}
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
WaitTime=0
UnkillableStepTimeout=20
JobRequeue=1
MinJobAge={age}
SlurmdParameters=config_overrides
GresTypes=stone
AccountingStorageType={accounting}
AccountingStorageHost={head}
AccountingStoragePass={folder}/munge/socket
{enforce}
JobAcctGatherType=jobacct_gather/none
MessageTimeout=30
OverTimeLimit=0
{nodes}
PartitionName=main Nodes=node[0-{last}] Default=YES MaxTime=1-00:00:00 State=UP
PartitionName=short Nodes=node[0-{last}] MaxTime=10 State=UP
PartitionName=shut Nodes=node[0-{last}] State=DOWN
"""
DBD = """DbdHost=head
DbdAddr={head}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StorageType=accounting_storage/mysql
StorageHost={head}
StorageUser=lab
StoragePass=lab
StorageLoc=slurm_acct_db
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
# In a control group of its own, which is the root of all that it sees: steps of one job on two nodes are not in one group.
SLURMD = """set -e
mkdir -p /var/spool/slurmd {shared}
mountpoint -q {shared} || mount --rbind /fsx {shared}
mountpoint -q /sys/fs/cgroup || mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir -p /sys/fs/cgroup/freezer
mountpoint -q /sys/fs/cgroup/freezer || mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer
mkdir -p /sys/fs/cgroup/freezer/{group}
echo $$ > /sys/fs/cgroup/freezer/{group}/cgroup.procs
exec unshare --cgroup --mount sh -ec '
umount /sys/fs/cgroup/freezer
mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer
export SLURM_CONF={folder}/slurm.conf
exec slurmd -N {name}'
"""


class Slurm:
    """The running cluster."""

    def __init__(self, nodes: Lab, accounting: bool, patience: int, age: int) -> None:
        self.nodes, self.accounting = nodes, accounting
        self.folder = nodes.shared / "slurm"
        self.daemons: list[subprocess.Popen[bytes]] = []
        words = {
            "patience": patience,
            "age": age,
            "enforce": "AccountingStorageEnforce=associations,limits,qos" if accounting else "",
        }
        named = "".join(
            f"NodeName=node{node} NodeAddr={address_of(node)} CPUs={CORES} RealMemory=2000 Gres=stone:2 State=UNKNOWN\n"
            for node in range(nodes.count)
        )
        kind = "accounting_storage/slurmdbd" if accounting else "accounting_storage/none"
        self.conf = CONF.format(
            head=HEAD,
            folder=self.folder,
            nodes=named,
            last=nodes.count - 1,
            accounting=kind,
            **words,
        )

    def start(self) -> None:
        for name in ("munge", "state"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(self.conf)
        (self.folder / "gres.conf").write_text("Name=stone Count=2\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self._start_munge()
        if self.accounting:
            self.start_database()
        self.start_controller()
        for node in range(self.nodes.count):
            self.start_node(node)
        self.await_idle()

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.chmod(0o755)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        self._spawn("munged", "--foreground", "--force", f"--socket={folder}/socket", f"--key-file={folder}/key",
                    f"--log-file={folder}/log", f"--pid-file={folder}/pid", f"--seed-file={folder}/seed")  # fmt: skip
        _await((folder / "socket").exists, "munged")

    def start_controller(self) -> None:
        """slurmctld, under the name that slurm.conf has for it."""
        command = f"hostname head && exec slurmctld -D -f {self.folder}/slurm.conf"
        self.controller = self._spawn("unshare", "--uts", "sh", "-c", command)

    def stop_controller(self) -> None:
        """As when the head is rebooted; jobs run on."""
        self.controller.kill()
        self.controller.wait()

    def start_database(self) -> None:
        """mariadbd and slurmdbd, with an account, a QOS that is not its, and this cluster."""
        data = Path(self.nodes.folder / "database")
        data.mkdir(exist_ok=True)
        shutil.chown(data, "mysql")
        self.nodes.folder.chmod(0o755)  # mariadbd is no root
        subprocess.run(["mariadb-install-db", "--user=mysql", f"--datadir={data}", "--skip-test-db"],
                       check=True, capture_output=True)  # fmt: skip
        self._spawn("mariadbd", "--no-defaults", "--user=mysql", f"--datadir={data}", f"--socket={data}/socket",
                    f"--pid-file={data}/pid", f"--bind-address={HEAD}", "--port=3306")  # fmt: skip
        sql = ("create database slurm_acct_db; create user lab@'%' identified by 'lab'; "
               "grant all on slurm_acct_db.* to lab@'%'")  # fmt: skip
        client = ["mariadb", "--no-defaults", "-S", f"{data}/socket", "-e"]
        _await(
            lambda: (
                subprocess.run([*client, sql], capture_output=True, check=False).returncode == 0
            ),
            "mariadbd",
        )
        (self.folder / "slurmdbd.conf").write_text(DBD.format(head=HEAD, folder=self.folder))
        (self.folder / "slurmdbd.conf").chmod(0o600)
        self.start_accounting()
        for words in ("cluster lab", "account vision", "account text", "user root account=vision", "user root account=text",
                      "qos long", "qos mine"):  # fmt: skip
            self.run("sacctmgr", "-i", "add", *words.split())
        self.run("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=mine")

    def start_accounting(self) -> None:
        self.accountant = self._spawn(
            "unshare", "--uts", "sh", "-c", "hostname head && exec slurmdbd -D"
        )
        _await(
            lambda: self.run("sacctmgr", "-n", "show", "cluster", check=False).returncode == 0,
            "slurmdbd",
        )

    def stop_accounting(self) -> None:
        self.accountant.kill()
        self.accountant.wait()

    def start_node(self, node: int) -> None:
        """slurmd on a node; one that was recreated comes back by this."""
        group = f"{self.nodes.folder.name}-{node}"
        words = {
            "shared": self.nodes.shared,
            "folder": self.folder,
            "name": f"node{node}",
            "group": group,
        }
        self.nodes.show(node, "slurm/munge")  # its socket
        self.nodes.run(node, "sh", "-c", SLURMD.format(**words))

    def await_idle(self, count: int | None = None) -> None:
        wanted = str(count or self.nodes.count)
        _await(
            lambda: (
                self.run(
                    "sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", check=False
                ).stdout.strip()
                == wanted
            ),
            "slurmd",
        )

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """What a person types on the head."""
        return subprocess.run(words, check=check, capture_output=True, text=True, timeout=60)

    def close(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.kill()
            daemon.wait()

    def _spawn(self, *words: str) -> subprocess.Popen[bytes]:
        log = open(self.folder / f"{words[0]}.out", "ab")  # noqa: SIM115 - it is the daemon's
        self.daemons.append(
            subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
            )
        )
        return self.daemons[-1]


def _await(done: object, what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    assert callable(done)
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} does not come up")
        time.sleep(0.1)


@contextmanager
def cluster(
    nodes: Lab, accounting: bool = False, patience: int = 10, age: int = 300
) -> Iterator[Slurm]:
    """A Slurm whose nodes are all idle. `patience`: seconds until a silent node counts as failed; `age`: that a job is remembered."""
    for program in ("slurmctld", "slurmd", "sbatch", "munged"):
        need_program(program, "apt-get install slurm-wlm munge")
    if accounting:
        need_program("slurmdbd", "apt-get install slurmdbd")
        need_program("mariadbd", "apt-get install mariadb-server")
    slurm = Slurm(nodes, accounting, patience, age)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()
