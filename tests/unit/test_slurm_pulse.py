"""Which of a Slurm job's machines answer: by real sockets, of which one is refused, and one is never answered."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from trainfleet.backends.slurm import cluster_checks
from trainfleet.backends.slurm.client import Said, SlurmClient

ROW = "NodeName={name} Arch=x86_64 Gres=stone:2 NodeAddr={address} NodeHostName={name} {port}Version=22.05.8 OS=Linux 5 #1 Comment=a b\n"
CONFIG = "SlurmctldPort           = 6817\nSlurmdPort              = {port}\nSlurmdTimeout           = 300 sec\n"


def slurm(nodes: str, port: object = 6818) -> SlurmClient:
    """Slurm, of which scontrol says this of the nodes, and of the configuration that slurmd's port is this one."""
    return SlurmClient(
        lambda words, stdin, environment: Said(
            0, nodes if "node" in words else CONFIG.format(port=port), ""
        )
    )


def row(name: str, port: int, address: str = "127.0.0.1") -> str:
    return ROW.format(name=name, address=address, port=f"Port={port} ")


@pytest.fixture
def answering() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as there:
        yield int(there.getsockname()[1])


@pytest.fixture
def refusing() -> int:
    """The port of a machine that is up, where nobody listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port from which nothing comes back: its queue is full, and the kernel drops what comes for it."""
    monkeypatch.setattr(cluster_checks, "WAIT", 0.5)
    with ExitStack() as held:
        full = held.enter_context(closing(socket.create_server(("127.0.0.1", 0), backlog=0)))
        for _ in range(8):
            waiting = held.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield int(full.getsockname()[1])


def test_a_machine_from_which_nothing_comes_back_is_absent_while_another_answers(
    answering: int, silent: int
) -> None:
    engine = slurm(row("n1", answering) + row("n2", silent) + row("n3", answering))
    told = (
        f"no answer from 127.0.0.1, port {silent} (slurmd), while 2 other nodes of the job answer"
    )
    assert cluster_checks.absent(engine, ["n1", "n2", "n3"]) == {"n2": told}


def test_a_machine_whose_slurmd_alone_is_gone_is_there(answering: int, refusing: int) -> None:
    assert (
        cluster_checks.absent(slurm(row("n1", answering) + row("n2", refusing)), ["n1", "n2"]) == {}
    )


def test_where_no_machine_answers_the_way_to_them_may_be_shut(silent: int) -> None:
    engine = slurm(row("n1", silent) + row("n2", silent))
    assert (
        cluster_checks.absent(engine, ["n1", "n2"]) == {}
        and cluster_checks.absent(engine, ["n1"]) == {}
    )


def test_a_name_that_nobody_knows_is_no_proof(answering: int) -> None:
    engine = slurm(row("n1", answering) + row("n2", 6818, "no-such-host.invalid"))
    assert cluster_checks.absent(engine, ["n1", "n2"]) == {}


def test_a_node_listens_at_its_own_port_or_at_that_of_all() -> None:
    engine = slurm(row("n1", 7001) + ROW.format(name="n2", address="10.0.0.2", port=""))
    assert cluster_checks.places(engine, ["n1", "n2"]) == {
        "n1": ("127.0.0.1", 7001),
        "n2": ("10.0.0.2", 6818),
    }


@pytest.mark.parametrize(
    ("nodes", "port"),
    [
        (ROW.format(name="n1", address="10.0.0.2", port=""), "9" * 5000),
        (ROW.format(name="n1", address="10.0.0.2", port=""), "٣"),
        (ROW.format(name="n1", address="10.0.0.2", port=""), 65536),
        (row("n1", 99999), 6818),
        (row("n2", 6818), 6818),
        (row("n1", 6818, "a" * 5000), 6818),
        (row("n1", 6818, "(null)"), 6818),
        ("", 6818),
        ("Node n1 not found\n", 6818),
        ("NodeName=n1 NodeHostName=n1 Reason=x NodeAddr=10.0.0.2\n", 6818),
    ],
)
def test_what_names_no_place_is_not_asked(nodes: str, port: object) -> None:
    assert cluster_checks.places(slurm(nodes, port), ["n1"]) == {}


def test_what_an_administrator_wrote_names_no_place() -> None:
    engine = slurm(
        row("n1", 7001).strip() + " Reason=NodeAddr=192.0.2.1 NodeHostName=n1 Port=1 [root]\n"
    )
    assert cluster_checks.places(engine, ["n1"]) == {"n1": ("127.0.0.1", 7001)}


def test_a_host_that_looks_like_an_option_is_not_given_to_scontrol() -> None:
    def never(*words: object) -> Said:
        raise AssertionError(words)

    assert cluster_checks.absent(SlurmClient(never), ["--help", "a b", ""]) == {}


def test_while_slurmctld_does_not_answer_nobody_is_absent() -> None:
    engine = SlurmClient(
        lambda words, stdin, environment: Said(
            1, "", "Unable to contact slurm controller (connect failure)"
        )
    )
    assert cluster_checks.absent(engine, ["n1"]) == {}
