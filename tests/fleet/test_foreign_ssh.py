"""Nodes as other people's OpenSSH reaches them: tcsh as login shell, host certificates, an ssh config of many words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import yaml

from fleet.lab import Lab, address_of
from fleet.test_contract import config
from requirement import need_program
from trainfleet.run.run_folder import Run
from verbs import enter, write_text

INCLUDED = """Host gpu-a
    HostName {first}
Host gpu-b
    HostName {second}
    ProxyJump gpu-a
"""
WORDS = """Include {folder}/conf.d/*.conf  # the site's
Host gpu-? !gpu-x
    User=root
    IdentitiesOnly yes
Match originalhost gpu-* user root
    IdentityFile "{key}"
Match host 10.77.*
    Port 22
Host *
    User nobody
    Port 2222
    Compression yes
    ServerAliveInterval 5
    SendEnv LANG LC_*
    HashKnownHosts yes
    UserKnownHostsFile {known}
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
"""


def sign(nodes: Lab, node: int, authority: Path) -> None:
    """From now on sshd of the node shows a certificate of the authority beside its key."""
    public = authority.with_name(f"host{node}.pub")
    public.write_text(f"{nodes.host_key(node)}\n")
    subprocess.run(
        [
            "ssh-keygen",
            "-q",
            "-s",
            str(authority),
            "-I",
            "x",
            "-h",
            "-n",
            address_of(node),
            str(public),
        ],
        check=True,
    )
    folder = nodes.root(node) / "etc/ssh"
    (folder / "lab_host_key-cert.pub").write_text(
        authority.with_name(f"host{node}-cert.pub").read_text()
    )
    with open(folder / "lab_config", "a") as file:
        file.write("HostCertificate /etc/ssh/lab_host_key-cert.pub\n")
    os.kill(nodes._init(node), signal.SIGHUP)


def test_what_openssh_reaches_is_reached_and_what_is_not_honoured_is_named(
    pair: Lab, tmp_path: Path
) -> None:
    tcsh, authority = need_program("tcsh", "apt-get install tcsh"), tmp_path / "authority"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(authority)], check=True
    )
    pair.known_hosts.write_text(
        f"@cert-authority 10.77.* {authority.with_suffix('.pub').read_text()}"
    )
    for node in range(2):
        sign(pair, node, authority)
        pair.run(node, "sed", "-i", f"/^root:/s#:[^:]*$#:{tcsh}#", "/etc/passwd")
        (pair.root(node) / "root/.cshrc").write_text("echo hello from cshrc\n")
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/hosts.conf").write_text(
        INCLUDED.format(first=address_of(0), second=address_of(1))
    )
    (tmp_path / "ssh").write_text(
        WORDS.format(folder=tmp_path, key=pair.key, known=pair.known_hosts)
    )
    for host, name in (("gpu-a", "node0"), ("gpu-b", "node1")):
        done = subprocess.run(["ssh", "-F", tmp_path / "ssh", "-o", "BatchMode=yes", host, "hostname; echo $shell"],
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.stdout == f"hello from cshrc\n{name}\n{tcsh}\n", done.stderr

    write_text(pair.shared / "text")
    ssh: dict[str, object] = {"config": str(tmp_path / "ssh"), "known_hosts": str(pair.known_hosts)}
    fleet = pair.fleet(hosts=["gpu-a", "gpu-b"], ssh=ssh)
    (tmp_path / "config.yaml").write_text(config(fleet))
    said = enter(tmp_path, "doctor", code=1)
    assert "that trainfleet ignores" in said and "userknownhostsfile" in said, said
    for name in ("gpu-a", "gpu-b"):  # gpu-b lies behind gpu-a, whose key it is
        assert re.search(
            rf"{name} +FAILED +the host key SHA256:\S+ of {address_of(0)} is not known yet; trainfleet does not check certificates \(@cert",
            said,
        ), said
    keys = [word for word in said.replace(",", " ").split() if word.startswith("SHA256:")]
    assert "fleet.ssh.fingerprints" in said and keys, said

    listed = [subprocess.run(["ssh-keygen", "-lf", tmp_path / f"host{node}.pub"], capture_output=True, text=True, check=True)
              .stdout.split()[1] for node in range(2)]  # fmt: skip
    assert set(keys) <= {*listed}
    ssh["fingerprints"] = listed
    settings = yaml.safe_load(config(fleet))
    settings["train"]["steps"] = 4
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    enter(tmp_path, "setup")
    said = enter(tmp_path, "doctor", code=1)
    assert "does not resolve gpu-a, gpu-b; next: add them to /etc/hosts on that host" in said, (
        said
    )  # ssh's names are this machine's
    for node in range(2):
        with open(pair.root(node) / "etc/hosts", "a") as file:
            file.write(f"{address_of(0)} gpu-a\n{address_of(1)} gpu-b\n")
    said = enter(tmp_path, "doctor")
    assert "next: make train" in said, said
    said = enter(tmp_path, "train")
    assert Run(pair.shared / "trainfleet/runs/contract").read_results()["status"] == "finished", (
        said
    )
