"""What hosts answer to everything but the mirror: each answer is checked, and one that can't be so is a failure of that host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from trainfleet.config import Config
from trainfleet.config.host_list import Host
from trainfleet.config.types import SshConfig
from trainfleet.hosts import facts as reading
from trainfleet.hosts import host_commands
from trainfleet.hosts.facts import parse
from trainfleet.hosts.head import public_key
from trainfleet.hosts.host_results import (
    LAUNCH,
    Board,
    HostFailure,
    Implausible,
    Result,
    by_host,
    grouped,
)
from trainfleet.hosts.node_checks import judge
from trainfleet.hosts.preflight import read_bandwidth
from trainfleet.hosts.ssh_errors import is_late
from trainfleet.hosts.transport import PATIENCE, Transport
from trainfleet.trust.errors import BackendError
from unit.test_nodes_facts import P3DN as TEXT
from unit.test_nodes_health import P3DN, fleet
from unit.test_nodes_operations import wanted

HOST = Host("gpu-1", "10.0.0.1")
SICK = [
    "Unable to determine the device handle for GPU0000:1D:00.0: Unknown Error",
    "580.126.09, [GPU is lost], [GPU is lost], [GPU is lost]",
    "580.126.09, 32768, [Unknown Error], Tesla V100-SXM2-32GB",
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    "ERR!, ERR!, ERR!, ERR!", ",,,", "a, 1e9, 0, b", "580, -5, 0, b", "580, \u0663, 0, b",
]  # fmt: skip


@pytest.mark.parametrize("line", SICK)
def test_one_sick_gpu_is_a_finding_and_no_end_of_the_look(line: str) -> None:
    facts = parse(TEXT.replace("gpu=580.126.09, 32768, 0, Tesla V100-SXM2-32GB", f"gpu={line}"))
    if line == ",,,":
        assert not facts.gpu_trouble  # nothing said is nothing known
        return
    assert len(facts.gpus) == 1 and facts.gpu_trouble == (line,)
    odd = {"gpus": P3DN.gpus[:7], "gpu_trouble": facts.gpu_trouble}
    found = [
        finding
        for finding in judge(LAUNCH, fleet(3, P3DN, odd), wanted("p3dn.24xlarge"))
        if finding.check == "hardware"
    ]
    assert (
        len(found) == 1
        and found[0].host
        and found[0].host.name == "n2"
        and line in found[0].message
        and found[0].blames_host
    )


def test_what_a_gpu_does_not_count_is_no_trouble() -> None:
    facts = parse(TEXT.replace("580.126.09, 32768, 0, Tesla", "580.126.09, [N/A], [N/A], Tesla"))
    assert (
        len(facts.gpus) == 2
        and facts.gpus[0].memory_mib == facts.gpus[0].ecc_errors == 0
        and not facts.gpu_trouble
    )


LIES = {
    "cores=96": ["cores=many", "cores=-1", "cores=1e9", "cores=\u0663", f"cores={'9' * 500}", "cores=0x10", "cores= 96"],
    "memory_kib=790000000": ["memory_kib=nan", "memory_kib=[N/A]", "memory_kib=7.5"],
    "clock=1000.50": ["clock=now", "clock=nan", "clock=inf", "clock=1e300", "clock=-5", f"clock={'1' * 400}"],
    "nofile=unlimited": ["nofile=lots", "nofile=\x00"],
    "fi_info=1": ["fi_info=one", "fi_info=-7"],
    "disk=123456789 ext4 /dev/root": ["disk=much ext4 /dev/root", "disk=5", "disk=5 ext4", "disk=-5 a b"],
    "shared=9999 lustre 10.0.0.5@tcp:/fsx /fsx": ["shared=? lustre x /fsx", "shared=1"],
    "neuron_ecc=neuron3/stats/hardware/mem_ecc_uncorrected/total 2": ["neuron_ecc=neuron3 two", "neuron_ecc=neuron3 2.5"],
    "mtu=ens5 9001": ["mtu=ens5 jumbo", "mtu=a b c"],
    "== end": ["", "== en"],
    "== facts\n": ["", "== fact\n"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("true", "lie"), [(true, lie) for true, lies in LIES.items() for lie in lies]
)
def test_facts_that_can_not_be_are_a_failure_of_that_host(
    true: str, lie: str, some_config: Config
) -> None:
    assert true in TEXT
    said = TEXT.replace(true, lie, 1)

    class Liar:
        hosts = (HOST,)

        def ask(self, host: Host, command: str, **more: Any) -> Result:
            return Result(0, said, "", 0.1)

        def each(self, ask: Any, hosts: object, **more: Any) -> dict[Host, Any]:
            return {HOST: ask(HOST)}

    answer = reading.read(cast(Transport, Liar()), some_config)[HOST]
    assert (
        isinstance(answer, HostFailure) and answer.kind == "untrue" and str(answer).isprintable()
    ), answer


@pytest.fixture(scope="module")
def some_config() -> Config:
    return wanted().config


def test_a_line_separator_of_another_alphabet_starts_no_fact() -> None:
    assert (
        parse(TEXT.replace("lacks=docker", "lacks=docker\u2028root=no\x0bcores=1\x85cores=1")).cores
        == 96
    )


@pytest.mark.parametrize(
    "said", ["running", "absent", "rebooted", "ended 0", "ended 137", "Welcome!\nended 1"]
)
def test_how_a_part_of_a_job_is_is_read(said: str) -> None:
    assert host_commands.read_look(said + "\n").state in said


def test_a_script_that_never_became_the_supervisor_says_why() -> None:
    look = host_commands.read_look("failed node-0.sh: 4: cd: can't cd to /fsx\x1b[2J\n")
    assert (look.state, look.code, look.words) == (
        "ended",
        127,
        "its script failed: node-0.sh: 4: cd: can't cd to /fsx[2J",
    )


def test_a_part_that_refused_before_it_had_a_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".trainfleet/jobs" / os.uname().nodename / "train"
    file.parent.mkdir(parents=True)
    file.write_text("1 2 boot token\n")
    file.with_name("train.exit").write_text("1\n")
    file.with_name("train.said").write_text(
        "error: WORKERS is 'abc', not a number\n  why: so it is\x1b[2J\n  next: unset WORKERS\n"
    )
    said = subprocess.run(
        ["sh", "-c", host_commands.look("train", "token")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    look = host_commands.read_look(said)
    assert look == host_commands.PartState(
        "ended", 1, "WORKERS is 'abc', not a number why: so it is[2J next: unset WORKERS"
    )
    file.with_name("train.exit").write_text("0\n")
    said = subprocess.run(
        ["sh", "-c", host_commands.look("train", "token")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert host_commands.read_look(said) == host_commands.PartState("ended"), (
        "what a part says that ended well is no failure"
    )


@pytest.mark.parametrize(
    "said",
    [
        "",
        "ended",
        "failed",
        "ended well",
        "ended 1 2",
        "ended -1",
        "ended 99999",
        "runningx",
        "ended \u0663",
        "\x1b[2J",
    ],
)
def test_any_other_word_of_it_is_untrue(said: str) -> None:
    with pytest.raises(Implausible):
        host_commands.read_look(said)


BANDWIDTHS = ["", "[]", "{}", '{"bandwidth": NaN, "bytes": 1, "nodes": 2, "pairs": []}', '{"bandwidth": "1", "bytes": 1, "nodes": 2, "pairs": []}',
              '{"bandwidth": 1, "bytes": 1, "nodes": 3, "pairs": []}', '{"bandwidth": 1, "bytes": 1, "nodes": 2, "pairs": [[0, 7, 1.0]]}',
              '{"bandwidth": 1, "bytes": 1, "nodes": 2, "pairs": [[0, 1]]}', '{"bandwidth": 1, "bytes": 1, "nodes": 2, "pairs": 5}',
              '{"bandwidth": 1, "bytes": 1, "nodes": 2, "pairs": [[0, 1, -1.0]]}', "[" * 99999]  # fmt: skip


@pytest.mark.parametrize("said", BANDWIDTHS)
def test_a_bandwidth_that_can_not_be_is_untrue(said: str) -> None:
    with pytest.raises(Implausible):
        read_bandwidth(said, 2)


def test_a_bandwidth_is_read() -> None:
    assert read_bandwidth(
        '{"bandwidth": 1.5, "bytes": 8, "nodes": 2, "pairs": [[0, 1, 2.5]]}', 2
    ).pairs == ((0, 1, 2.5),)


def test_only_a_key_of_ours_is_let_in_on_every_host() -> None:
    key = "ssh-ed25519 " + "A" * 68 + " trainfleet head gpu-1"
    assert public_key(HOST, f"{key}\n") == key
    for lie in (
        "",
        'command="id" ' + key,
        "ssh-rsa AAAA",
        key + "\nssh-ed25519 AAAA",
        key + "\x1b[2J",
        "no-pty " + key,
        "ssh-ed25519 ***",
    ):
        with pytest.raises(BackendError, match="its public key was not created by trainfleet"):
            public_key(HOST, lie)


MARKS = [
    "",
    ":",
    "/fsx:",
    ":x",
    "/fsx:x\n",
    "\n/fsx:x",
    "/fsx:\n",
    "/fsx\n:x",
    "/fsx:a\nb",
    "/fsx: ",
    "/fsx:x\0",
    "/fsx:\u2028x",
    "/fsx:\x1bx",
]


@pytest.mark.parametrize("mark", MARKS)
def test_no_fence_is_made_of_a_mark_that_could_be_another_s(mark: str) -> None:
    with pytest.raises(BackendError, match="does not identify a run"):
        host_commands.fence(mark)


@pytest.mark.parametrize("name", ["x\n", "\n", "", "a\nb", " "])
def test_no_mark_is_made_of_such_a_name(name: str) -> None:
    with pytest.raises(BackendError, match="does not identify a run"):
        host_commands.mark_of("/fsx", name)


@pytest.mark.skipif(sys.platform != "linux", reason="a fence reads /proc")
@pytest.mark.parametrize(
    "name", ["x", "-x", "x*", "[a-z]x", "x'; kill -9 -1; '", "$(id)", "x y", "e", "\\x", "n\u00f6"]
)
def test_a_fence_kills_what_has_the_mark_and_nothing_else(name: str) -> None:
    mark = host_commands.mark_of(f"/fsx/{os.getpid()}", name)
    sleep = ["sleep", "60"]
    ours = subprocess.Popen(sleep, env=os.environ | {host_commands.MARK: mark})
    others = [
        subprocess.Popen(sleep, env=os.environ | {host_commands.MARK: other})
        for other in ("", f"{mark}x", f"x{mark}", mark[:-1])
    ]
    try:
        done = subprocess.run(["sh", "-c", host_commands.fence(mark)], timeout=60, check=False)
        assert done.returncode == 0 and ours.wait(10) == -9
        assert [other.poll() for other in others] == [None] * len(others)
    finally:
        for process in (ours, *others):
            process.kill()
            process.wait()


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    for name in ("fsx/runs/x", "fsx/data/text", "fsx/runs/other", "precious"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("12345")
    return tmp_path / "fsx"


def test_what_a_run_has_on_a_fleet_is_measured_and_removed(shared: Path) -> None:
    folders = ["runs/x", "data/text", "data/none"]
    (shared / "data/text/file").rename(shared / "data/text/plan.json")
    measured = host_commands.read_measures(
        run(host_commands.measure(str(shared), folders)).stdout, folders
    )
    assert set(measured) == {"runs/x", "data/text"} and min(measured.values()) >= 5
    assert run(host_commands.remove(str(shared), folders)).returncode == 0
    assert sorted(path.name for path in shared.glob("*/*")) == ["other"]
    assert run(host_commands.measure(f"{shared}/none", folders)).stdout == ""


@pytest.mark.parametrize("where", ["runs/x", "runs", "data/text", "data"])
def test_no_link_on_a_fleet_is_followed_by_a_removal(shared: Path, where: str) -> None:
    (shared / where).rename(shared / "aside")
    (shared / where).symlink_to("../precious" if where.count("/") == 0 else "../../precious")
    if "/" not in where:
        (shared.parent / "precious" / ("x" if where == "runs" else "text")).mkdir()
    done = run(host_commands.remove(str(shared), ["runs/x", "data/text"]))
    assert done.returncode == 1 and "is a symbolic link" in done.stderr
    assert (shared.parent / "precious/file").exists() and len(list(shared.rglob("file"))) >= 2


def test_a_shared_folder_that_is_a_link_itself_is_one(shared: Path) -> None:
    (shared.parent / "link").symlink_to(shared)
    assert (
        run(host_commands.remove(str(shared.parent / "link"), ["runs/x"])).returncode == 0
        and not (shared / "runs/x").exists()
    )


FOLDERS = ["", "/", ".", "..", "runs", "runs/", "runs/..", "runs/../..", "data/../../other", "data/x/y", "/etc", "runs/x;id", "runs/-rf", "runs/x\n",
           "data/ x", "code/x", "runs/.", "runs/*", "runs/$(id)", "~"]  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_else_is_ever_named_to_a_removal(folder: str) -> None:
    with pytest.raises(BackendError):
        host_commands.remove("/fsx", [folder])
    with pytest.raises(BackendError):
        host_commands.measure("/fsx", [folder])


@pytest.mark.parametrize("folder", ["", "/", "//", "fsx", "/fsx\nHOME=/root", "/fsx\0"])
def test_no_removal_in_a_folder_that_no_fleet_shares(folder: str) -> None:
    with pytest.raises(BackendError):
        host_commands.remove(folder, ["runs/x"])


@pytest.mark.parametrize(
    "said", ["runs/other 5", "5\truns/other", "five\truns/x", "-5\truns/x", "5\t/etc", "5"]
)
def test_a_measure_of_something_else_is_untrue(said: str) -> None:
    with pytest.raises(Implausible):
        host_commands.read_measures(said, ["runs/x"])


def test_what_is_the_same_for_many_hosts_is_said_once() -> None:
    hosts = [Host(f"node{number}", f"10.77.0.{number}") for number in range(64)]
    said = {host: f"can't be reached; next: ssh root@{host.address} true" for host in hosts}
    said[hosts[7]] = "its disk is full"
    lines = by_host("no host answers", said).splitlines()
    assert lines == [
        "no host answers",
        "  63 hosts (node0, node1, node2, ... node63): can't be reached; next: ssh root@10.77.0.0 true",
        "  node7: its disk is full",
    ]
    few = {host: f"{host.name} is off" for host in hosts[:3]}
    assert by_host("x", few).splitlines()[1:] == [
        f"  node{number}: node{number} is off" for number in range(3)
    ], "few stand apart"
    apart = {host: f"its peer 10.77.0.{number + 1} is late" for number, host in enumerate(hosts)}
    assert len(grouped(apart)) == 64, "what names another host is not the same"


def test_a_board_that_is_no_terminal_says_it_once_too(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [Host(f"node{number}", f"10.77.0.{number}") for number in range(64)]
    with Board(hosts) as board:
        board.show_all(hosts, "FAILED", "it rejected the SSH key of root")
        assert board.in_state("FAILED") == hosts
    assert (
        capsys.readouterr().out
        == "64 hosts (node0, node1, node2, ... node63)  FAILED  it rejected the SSH key of root\n"
    )


def test_a_late_host_is_asked_again_where_others_are_slow_too_and_not_where_they_are_quick() -> (
    None
):
    fleet = Transport((), SshConfig(None, None, None, None, (), None))
    assert fleet._patience() == PATIENCE, "who asks may be busy itself"
    fleet._took = [0.1, 0.2, 0.3]
    assert fleet._patience() == 0.0, "the one that is late is dead or frozen"
    fleet._took = [3.0, 4.0, 9.0]
    assert fleet._patience() == 12.0


def test_a_login_that_takes_too_long_is_no_refusal() -> None:
    import paramiko

    for error in (TimeoutError(), paramiko.SSHException("Error reading SSH protocol banner"),
                  paramiko.AuthenticationException("Authentication timeout.")):  # fmt: skip
        assert is_late(error)
    for other in (
        paramiko.AuthenticationException("Authentication failed."),
        ConnectionRefusedError(),
        EOFError(),
    ):
        assert not is_late(other)
