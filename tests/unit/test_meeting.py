"""Where a job's ranks meet: who can reach the store there, asked of the kernel and as a stranger."""

from __future__ import annotations

import datetime
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import yaml
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import verbs
from trainfleet.devices import meeting
from trainfleet.node.placement import LOOPBACK, Placement, lone_rank, torchrun
from trainfleet.plan.fabric_environment import fabric_environment
from trainfleet.process.install_paths import python_path

ONCE = datetime.timedelta(seconds=2)
RANK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    print("meets at", os.environ["MASTER_ADDR"], flush=True)
    mine = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in (os.getpid(), os.getppid()) for fd in os.listdir(f"/proc/{pid}/fd")
            if os.path.islink(f"/proc/{pid}/fd/{fd}")}
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in mine:
                print("listens", row[1], flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with closing(socket.create_server((LOOPBACK, 0))) as probe:
        return int(probe.getsockname()[1])


def listening(port: int) -> list[str]:
    """The addresses at which this machine listens on a port, as the kernel writes them."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        row[1].rpartition(":")[0]
        for row in rows
        if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    ]


def test_the_store_listens_where_the_nodes_meet_and_nowhere_else() -> None:
    port = free_port()
    store = meeting.listen(LOOPBACK, port, 2)
    assert store is not None and listening(port) == ["0100007F"]
    torchruns = TCPStore(
        LOOPBACK, port, 1, True, ONCE, multi_tenant=True
    )  # as torchrun asks for it in the same process
    torchruns.set("a", "b")
    assert store.get("a") == b"b" and listening(port) == ["0100007F"]
    with pytest.raises(
        Exception, match=r"(?i)connect|time"
    ):  # a stranger, by another address of this machine
        TCPStore("127.0.0.2", port, is_master=False, timeout=ONCE, wait_for_workers=False)


def test_torch_by_itself_listens_everywhere() -> None:
    """What this module is for; where torch no longer does, it can go."""
    port = free_port()
    store = TCPStore(LOOPBACK, port, 1, True, ONCE)
    assert listening(port) != ["0100007F"] and store


def test_where_this_machine_alone_takes_the_name_for_its_loopback_others_must_get_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", free_port()))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **more: taken)
    assert meeting.listen("node1", 29400, 2) is None
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *words, **more: [(*taken[0][:4], ("203.0.113.7", 29400))]
    )
    assert meeting.listen("203.0.113.7", 29400, 2) is None, "an address that no interface here has"


def test_a_name_that_nobody_knows_is_left_to_torch() -> None:
    assert meeting.listen("no-such-host.invalid", 29400, 2) is None


@pytest.mark.thorough
@pytest.mark.parametrize("nodes", [1, 2])
def test_nothing_of_a_run_on_one_machine_listens_beyond_it(nodes: int, tmp_path: Path) -> None:
    """Real torchruns and gloo; every listening socket of node 0's torchrun and rank, as the kernel has them."""
    (tmp_path / "rank.py").write_text(RANK)
    port, card = free_port(), fabric_environment(None, "eth9", alone=True)
    environment = os.environ | python_path(f"{python_path()['PYTHONPATH']}:{tmp_path}") | card
    placements = [
        Placement(node, nodes, LOOPBACK if nodes > 1 else "192.0.2.1", port, address=LOOPBACK)
        for node in range(nodes)
    ]
    lines = [torchrun(placement, 1, "rank", sys.executable) for placement in placements]
    running = [
        subprocess.Popen(line, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for line in lines
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * nodes, said
    addresses = re.findall(r"listens (\w+):(\w+)", said[0])
    assert f"meets at {LOOPBACK}" in said[0] and addresses
    assert {address for address, _ in addresses} <= {"0100007F", f"{0:024x}0100007F"}, addresses


def listeners(folder: Path) -> set[str]:
    """The addresses, as the kernel writes them, at which processes that work in a folder listen."""
    sockets = set[str]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if (entry / "cwd").resolve() == folder:
                sockets |= {
                    str(fd.readlink()) for fd in (entry / "fd").iterdir() if fd.is_symlink()
                }
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        row[1].rpartition(":")[0]
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


@pytest.mark.thorough
@pytest.mark.parametrize("nodes", [1, 2])
def test_make_train_listens_on_the_loopback_alone(nodes: int, tmp_path: Path) -> None:
    verbs.write_text(tmp_path / "text")
    config = {
        "name": "heard", "fleet": {"backend": "local", "nodes": nodes, "ranks_per_node": 2},
        "data": {"name": "text", "sources": ["text"], "vocab_size": 340},
        "model": {"layers": 1, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
        "train": {"steps": 200, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    training, found = verbs.begin(tmp_path, "train"), set[str]()
    while training.poll() is None:
        found |= listeners(tmp_path)
        time.sleep(0.1)
    verbs.finish(training)
    assert found and found <= {"0100007F", f"{0:024x}0100007F", f"{1 << 24:032x}"}, found


@pytest.mark.parametrize("leaves", [True, False])
def test_node_0_goes_when_the_others_have_gone_or_after_a_while(
    leaves: bool, tmp_path: Path
) -> None:
    (tmp_path / "torchrun.py").write_text(
        "import sys; print('begun', flush=True); sys.stdin.readline()"
    )
    port = free_port()
    words = [
        "torchrun",
        f"--master-addr={LOOPBACK}",
        f"--master-port={port}",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--node-rank=0",
    ]
    command = [sys.executable, "-m", meeting.__name__, *words]
    environment = os.environ | python_path(f"{python_path()['PYTHONPATH']}:{tmp_path}")
    node0 = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert node0.stdin and node0.stdout and node0.stdout.readline() == "begun\n"
    with socket.create_connection((LOOPBACK, port), source_address=("127.0.0.2", 0)) as other:
        began = time.monotonic()
        print("go", file=node0.stdin, flush=True)
        time.sleep(1.5)
        assert node0.poll() is None
        if leaves:
            other.close()
        assert node0.wait(timeout=60) == 0 and (time.monotonic() - began < meeting.LINGER) is leaves


def test_a_rank_without_torchrun_meets_the_same_way() -> None:
    alone = lone_rank(Placement(0, 1, "192.0.2.1", 29400))
    assert (
        alone["MASTER_ADDR"] == LOOPBACK
        and lone_rank(Placement(0, 2, "192.0.2.1", 29400))["MASTER_ADDR"] == "192.0.2.1"
    )
