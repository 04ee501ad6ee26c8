"""Who reaches a fleet's store: nodes with the run's key do, strangers with torch's own client or plain sockets do not."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from test_meeting import free_port, listening
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainfleet.backends.node_script import secrets_of
from trainfleet.devices import meeting
from trainfleet.host.install_paths import python_path
from trainfleet.node import relay
from trainfleet.node.placement import LOOPBACK, Seat, torchrun
from trainfleet.plan.fabric_environment import fabric_environment
from trainfleet.plan.job import Job
from trainfleet.trust.redaction import NAMES
from trainfleet.watch.blame import Book
from trainfleet.watch.diagnosis import diagnose
from trainfleet.watch.lines import parse

KEY = "the key of one run"
ONCE, SOON = datetime.timedelta(seconds=2), datetime.timedelta(seconds=20)
REFUSED = r"(?i)ping failed|connect|time|reset|closed"
RANKS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "at", os.environ["MASTER_ADDR"], "key", os.environ.get("TRAINFLEET_MEETING"), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def guarded() -> tuple[TCPStore, int]:
    """A store with a gate before it, and the gate's port."""
    port = free_port()
    return meeting.guard(KEY, LOOPBACK, port, 4)[0], port


def client(port: int, timeout: datetime.timedelta = SOON) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timeout, wait_for_workers=False)


def until(done: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nodes_with_the_key_share_the_store_whatever_its_values_are(guarded: tuple[TCPStore, int]) -> None:
    store, port = guarded
    ranks = [client(relay.way(KEY, LOOPBACK, port)) for _ in range(3)]
    large = os.urandom(1 << 22)
    ranks[0].set("large", large)
    assert store.get("large") == ranks[1].get("large") == large
    assert [rank.add("count", 1) for rank in ranks] == [1, 2, 3]


def test_a_stranger_neither_sets_nor_gets_a_key(guarded: tuple[TCPStore, int]) -> None:
    store, port = guarded
    store.set("secret", "1")
    with pytest.raises(Exception, match=REFUSED):
        client(port, ONCE).get("secret")
    assert store.num_keys() <= 2, "what torch itself keeps, and ours"


def test_who_has_another_key_is_turned_away_and_named_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, told = free_port(), list[str]()
    monkeypatch.setattr(relay, "QUIET", 0.0)
    monkeypatch.setattr(relay, "AGAIN", 0.05)
    monkeypatch.setattr(relay, "PATIENCE", 1.0)
    store = meeting.guard(KEY, LOOPBACK, port, 4)
    own = relay.way("another key", LOOPBACK, port, told.append)
    with pytest.raises(Exception, match=REFUSED):
        client(own, ONCE)
    assert store and told == [f"node 0 does not let us in at {LOOPBACK}:{port} yet: it sends us away"]
    said = capfd.readouterr().err
    assert said.count("trainfleet: turned away 127.0.0.1, which does not know the run's key") == 1 and KEY not in said


def test_who_listens_in_node_0s_place_gets_no_byte_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers as a gate does, with the way's own proof; the way says so, and goes on looking for its own."""
    monkeypatch.setattr(relay, "QUIET", 0.0)
    monkeypatch.setattr(relay, "PATIENCE", 1.0)
    heard, told = list[bytes](), list[str]()
    with closing(socket.create_server((LOOPBACK, 0))) as false:

        def answer() -> None:
            while True:
                visitor, _ = false.accept()
                visitor.sendall(relay.HELLO + bytes(relay.NONCE))
                said = visitor.recv(4096)
                visitor.sendall(said[-relay.PROOF :])
                heard.extend((said, visitor.recv(4096)))
                visitor.close()

        threading.Thread(target=answer, daemon=True).start()
        own = relay.way(KEY, LOOPBACK, false.getsockname()[1], told.append)
        with pytest.raises(Exception, match=REFUSED):
            client(own, ONCE)
    assert told[0].endswith("who listens there does not know the run's key")
    assert {len(said) for said in heard} == {relay.NONCE + relay.PROOF, 0}


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch, guarded: tuple[TCPStore, int]) -> Iterator[tuple[int, list[socket.socket]]]:
    """Three hundred strangers that connect and say nothing, or never all of it; more than may."""
    port = guarded[1]
    with ExitStack() as held:
        silent = [held.enter_context(closing(socket.create_connection((LOOPBACK, port)))) for _ in range(relay.VISITORS + 44)]
        for stranger in silent[::2]:
            stranger.sendall(b"\0")
        yield port, silent


def test_strangers_that_say_nothing_keep_no_rank_out(crowd: tuple[int, list[socket.socket]]) -> None:
    port, silent = crowd
    began = time.monotonic()
    rank = client(relay.way(KEY, LOOPBACK, port))
    rank.set("mine", "1")
    assert rank.get("mine") == b"1" and time.monotonic() - began < relay.GREETING / 2
    silent[0].settimeout(5)
    assert len(silent[0].recv(4096)) == len(relay.HELLO) + relay.NONCE and silent[0].recv(1) == b"", "it made room"


def test_who_does_not_show_the_key_in_time_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "GREETING", 0.5)
    port = free_port()
    store = meeting.guard(KEY, LOOPBACK, port, 4)
    with closing(socket.create_connection((LOOPBACK, port), 5)) as stranger:
        assert store and stranger.recv(4096) and stranger.recv(4096) == b""


def test_a_proof_that_was_overheard_lets_nobody_in(guarded: tuple[TCPStore, int]) -> None:
    """A node's own words once more, by a stranger who saw them pass: the gate's number is another."""
    port = guarded[1]
    with closing(socket.create_server((LOOPBACK, 0))) as between:
        own = relay.way(KEY, LOOPBACK, between.getsockname()[1])
        with closing(socket.create_connection((LOOPBACK, own))), closing(socket.create_connection((LOOPBACK, port), 5)) as there:
            node, _ = between.accept()
            node.sendall(there.recv(4096))
            proof = node.recv(4096)
            node.close()
        with closing(socket.create_connection((LOOPBACK, port), 5)) as again:
            again.recv(4096)
            again.sendall(proof)
            assert again.recv(4096) == b""


def test_when_either_end_goes_the_other_does() -> None:
    port = free_port()
    with closing(socket.create_server((LOOPBACK, 0))) as store:
        relay.gate(KEY, relay.listening(LOOPBACK, port), store.getsockname()[1], 1)
        own = relay.way(KEY, LOOPBACK, port)
        for first in (0, 1):
            rank = socket.create_connection((LOOPBACK, own), 10)
            ends = (rank, store.accept()[0])
            ends[0].sendall(b"there")
            assert ends[1].recv(64) == b"there"
            ends[first].close()
            ends[1 - first].settimeout(5)
            assert ends[1 - first].recv(64) == b""
            ends[1 - first].close()


def test_a_way_waits_for_a_gate_that_comes_later() -> None:
    port = free_port()
    own = relay.way(KEY, LOOPBACK, port)
    later = threading.Timer(1.5, lambda: held.append(meeting.guard(KEY, LOOPBACK, port, 1)))
    held = list[object]()
    later.start()
    assert client(own).add("count", 1) == 1


def together(folder: Path, port: int, keys: list[str]) -> list[subprocess.Popen[str]]:
    """Nodes' torchruns of two ranks each, which meet on this machine with these keys."""
    (folder / "who.py").write_text(RANKS)
    own = python_path(f"{python_path()['PYTHONPATH']}:{folder}") | fabric_environment(None, "eth9", alone=True)
    lines = [torchrun(Seat(node, 2, LOOPBACK, port, address=LOOPBACK), 2, "who", sys.executable) for node in range(len(keys))]
    return [
        subprocess.Popen(line, env=os.environ | own | {relay.KEY: key}, cwd=folder, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for line, key in zip(lines, keys, strict=True)
    ]  # fmt: skip


def test_ranks_of_two_nodes_with_one_key_meet_and_do_not_have_it(tmp_path: Path) -> None:
    running = together(tmp_path, port := free_port(), [KEY, KEY])
    until(lambda: listening(port), 60)
    with pytest.raises(Exception, match=REFUSED):  # a stranger who is there from the start
        client(port, ONCE).set("mine", "1")
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert all(words.count(f"sum 4 at {LOOPBACK} key None") == 2 for words in said) and KEY not in "".join(said), said


def test_a_port_that_is_taken_is_told_and_judged_as_one(tmp_path: Path) -> None:
    with closing(socket.create_server((LOOPBACK, 0))) as taken:
        (first,) = together(tmp_path, taken.getsockname()[1], [KEY])
        said = first.communicate(timeout=60)[0]
    assert first.returncode == 1 and "Traceback" not in said, said
    finding = diagnose(list(parse([f"agent  12:00:00.000 | {line}" for line in said.splitlines()], 0)))
    assert finding and finding.cause == "port", said


def test_strangers_are_the_cause_of_nothing() -> None:
    words = "trainfleet: turned away 10.0.0.9, which does not know the run's key"
    finding = diagnose(list(parse([f"agent  12:00:00.000 | {words}"], 0)))
    assert finding is None or finding.cause == "unknown"


def test_a_name_that_every_node_has_blames_none() -> None:
    """Ranks behind a way say of their own loopback that it is theirs, and of the store's that it broke."""
    book = Book()
    book.note(1, 2, "recvValue failed on SocketImpl(fd=7, addr=[localhost]:4, remote=[localhost]:5): Connection reset by peer")
    book.note(1, 2, "recvValue failed on SocketImpl(fd=7, addr=[10.0.0.2]:4, remote=[10.0.0.1]:5): Connection reset by peer")
    assert [book.node_of(name) for name in ("localhost", "127.0.0.1", "10.0.0.2")] == [None, None, 1]


def test_each_submission_of_a_job_of_several_nodes_has_a_key_of_its_own() -> None:
    job = Job("train", "x", Path("runs/x"), 2, 2, "part", (), True, launch="once")
    keys = [secrets_of(job, "cuda")[relay.KEY] for _ in range(2)]
    assert len(set(keys)) == 2 and all(len(key) == 64 for key in keys)
    assert secrets_of(job, "cuda")[NAMES] == relay.KEY, "logs hide it"
    for other, stack in (
        (replace(job, nodes=1), "cpu"),
        (replace(job, torchrun=False), "cpu"),
        (job, "neuron-xla"),
        (job, "neuron"),
    ):
        assert relay.KEY not in secrets_of(other, stack)
