"""The tools of a machine made from an image: package managers, kernel modules, drivers. They offer what amis.py says, and remember.

A node of the lab becomes such a machine by `become`: this file is then each of its tools, called by its name. What setup's scripts do
with files is real; what they ask of packages, the kernel and devices comes here. Standard library alone: it runs on the node.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
from pathlib import Path
from typing import Any

STATE = Path("/var/machine.json")
BIN = Path("/usr/local/bin")
ALWAYS = ("apt-get", "apt-cache", "apt-mark", "dpkg", "dpkg-query", "modinfo", "modprobe", "lsmod", "uname", "curl", "gpg", "gpgv",
          "systemctl", "update-grub", "lctl", "lnetctl", "mount", "ip", "dd", "ldconfig")  # fmt: skip
BROUGHT = {"build-essential": ("gcc", "make"), "nvidia-utils-580-server": ("nvidia-smi",), "lustre-client-utils": ("mount.lustre",),
           "nvidia-fabricmanager-580": ("nv-fabricmanager",), "dkms": ("dkms",)}  # fmt: skip
INSTALLER = """#!/bin/sh
set -e
echo 'EFA installer version: {version}' > /opt/amazon/efa_installed_packages
mkdir -p /opt/amazon/efa/bin /opt/amazon/ofi-nccl/lib
touch /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so
printf '#!/bin/sh\\necho "provider: efa"\\n' > /opt/amazon/efa/bin/fi_info
chmod 755 /opt/amazon/efa/bin/fi_info
apt-get install libnccl-ofi-ubuntu={ofi}
"""


def put(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Machine:
    """What is installed and runs; written back when a tool ends."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = json.loads(STATE.read_text())

    def __getattr__(self, name: str) -> Any:
        return self.data[name]

    def call(self, tool: str, words: list[str]) -> int:
        answer = getattr(type(self), "do_" + re.sub("[^a-z]", "_", tool), None)
        code = answer(self, words) if answer else 0
        STATE.write_text(json.dumps(self.data))
        return int(code or 0)

    # Packages

    def offers(self, name: str) -> list[str]:
        """The versions of a package that fit what is asked for, as apt takes it: NAME, or NAME=VERSION, which may be a pattern."""
        name, _, version = name.partition("=")
        return fnmatch.filter(self.archive.get(name, "").split(), version or "*")

    def do_apt_get(self, words: list[str]) -> int:
        if words[0] != "install":
            return 0
        asked = [
            word
            for at, word in enumerate(words[1:], 1)
            if not word.startswith("-") and words[at - 1] != "-o"
        ]
        if lacking := [name for name in asked if not self.offers(name)]:
            print(f"E: Unable to locate package {lacking[0]}", file=sys.stderr)
            return 100
        for name in asked:
            self.install(name.partition("=")[0], self.offers(name)[-1])
        return 0

    def install(self, name: str, version: str) -> None:
        self.packages[name] = version
        for tool in BROUGHT.get(name, ()):
            link(tool)
        if kind := re.fullmatch(r"linux-headers-(.*)", name):
            Path(f"/lib/modules/{kind[1]}/build").mkdir(parents=True, exist_ok=True)
        if name.startswith("nvidia-headless"):
            self.data["driver"], self.data["driver_kernel"] = (
                self.packages[name].split("-")[0],
                self.kernel,
            )
        if kind := re.fullmatch(r"python(3\.\d+)-venv", name):
            put(f"/usr/bin/python{kind[1]}", "#!/bin/sh\nexit 0\n")
            Path(f"/usr/lib/python{kind[1]}/ensurepip").mkdir(parents=True, exist_ok=True)

    def do_apt_cache(self, words: list[str]) -> int:
        if words[0] == "search":
            print(
                "\n".join(
                    f"{name} - a package"
                    for name in self.archive
                    if re.search(words[-1].replace("-aws$", "-aws"), name)
                )
            )
        if words[0] == "policy":
            print(f"  Candidate: {self.archive.get(words[1], '(none)').split()[-1]}")
        return 0 if words[0] != "show" or words[1] in self.archive else 100

    def do_dpkg_query(self, words: list[str]) -> int:
        form = words[words.index("-f") + 1]
        found = [
            name for name in self.packages if any(fnmatch.fnmatch(name, word) for word in words[3:])
        ]
        for name in found:
            row = {
                "db:Status-Status": "installed",
                "Package": name,
                "Version": self.packages[name],
                "\\n": "\n",
            }
            text = form
            for field, value in row.items():
                text = text.replace(field if field == "\\n" else f"${{{field}}}", value)
            print(text, end="")
        return 0 if found else 1

    def do_dpkg(self, words: list[str]) -> int:
        print(
            "nvidia-utils-580-server: /usr/bin/nvidia-smi"
            if "nvidia-utils-580-server" in self.packages
            else ""
        )
        return 0

    # The kernel and devices

    def do_uname(self, words: list[str]) -> int:
        import subprocess

        print(self.kernel) if words == ["-r"] else subprocess.run(
            ["/usr/bin/uname", *words], check=True
        )
        return 0

    def do_modinfo(self, words: list[str]) -> int:
        module = (
            f"lustre-client-modules-{self.kernel}" in self.packages
            or self.lustre_kernel == self.kernel
        )
        return 0 if words[-1] not in ("lustre", "kefalnd") or module else 1

    def do_modprobe(self, words: list[str]) -> int:
        if words[0] in ("lustre", "lnet", "kefalnd", "ksocklnd") and self.do_modinfo(["lustre"]):
            return 1
        Path("/sys/module", words[0]).mkdir(parents=True, exist_ok=True)
        if words[0] == "neuron":
            Path("/dev/neuron0").touch()
        return 0

    def do_lsmod(self, words: list[str]) -> int:
        print("\n".join(f"{path.name} 1 0" for path in Path("/sys/module").iterdir()))
        return 0

    def do_update_grub(self, words: list[str]) -> int:
        kernels = [
            name.removeprefix("linux-image-")
            for name in self.packages
            if name.startswith("linux-image-")
        ]
        put(
            "/boot/grub/grub.cfg",
            "".join(f"menuentry 'Ubuntu, with Linux {kernel}' {{\n" for kernel in kernels),
        )
        return 0

    def do_nvidia_smi(self, words: list[str]) -> int:
        if self.driver_kernel != self.kernel:
            return 9
        row = (
            "GPU 0"
            if words == ["-L"]
            else self.driver
            if "--query-gpu=driver_version" in words
            else f"{self.driver}, 81559, 0, H100"
        )
        print("\n".join([row] * 8))
        return 0

    def do_nv_fabricmanager(self, words: list[str]) -> int:
        print(
            f"Fabric Manager version is : {self.packages['nvidia-fabricmanager-580'].split('-')[0]}"
        )
        return 0

    def do_lnetctl(self, words: list[str]) -> int:
        if words[:4] == ["net", "add", "--net", "efa"]:
            self.data["lnet"] += 1
        if words[:2] == ["net", "show"]:
            print("status: up\nsend_count: {sent}\n".format(**self.data) * self.lnet)
        return 0

    def do_lctl(self, words: list[str]) -> int:
        print("lustre: 2.15.6")
        return 0

    def do_dd(self, words: list[str]) -> int:
        self.data["sent"] += 16
        return 0

    def do_mount(self, words: list[str]) -> int:
        with Path("/var/mounts").open("a") as file:
            file.write(f"10.0.0.5@tcp:/abcd {words[-1]} lustre rw 0 0\n")
        return 0

    def do_ip(self, words: list[str]) -> int:
        if words[-1] == "default":
            print("default via 10.77.0.1 dev eth0")
        return 0

    # Downloads and keys

    def do_curl(self, words: list[str]) -> int:
        import tarfile  # here, as most calls are not of this

        to, url = Path(words[words.index("-o") + 1]), words[-1]
        key = next((key for part, key in self.keys.items() if part in url), "")
        to.write_text(f"{key}\n")
        if url.endswith(".tar.gz"):
            version = url.removesuffix(".tar.gz").rpartition("-")[2]
            if version not in self.efa_offered:
                return 22
            put(
                "/var/aws-efa-installer/efa_installer.sh",
                INSTALLER.format(version=version, ofi=self.efa_offered[version]),
            )
            with tarfile.open(to, "w:gz") as tar:
                tar.add("/var/aws-efa-installer", "aws-efa-installer")
        return 0

    def do_gpg(self, words: list[str]) -> int:
        if "--dearmor" not in words:
            print(f"pub:\nfpr:::::::::{Path(words[-1]).read_text().strip()}:")
        return 0


def link(tool: str) -> None:
    path = BIN / tool
    path.unlink(missing_ok=True)
    path.symlink_to(STATE.parent / "machine.py")


if __name__ == "__main__":
    sys.exit(Machine().call(Path(sys.argv[0]).name, sys.argv[1:]))
