"""A wall around a process that reads files of strangers: its own inputs to read, one place to write, no network, bounded memory.

A parser that a crafted file takes over can then do no more than spoil what it was to write. The wall is the kernel's and needs no
privilege: Landlock for files (Linux 5.13; signals and abstract sockets from 6.12), a seccomp filter for sockets and for other
processes, and RLIMIT_DATA for memory. It holds for the process, its threads and all that they start, and nothing takes it down.
Where a kernel or a container has no Landlock or seccomp, what there is of it is put up, and `lacks` says what is missing.

https://docs.kernel.org/userspace-api/landlock.html, https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..trust.errors import RunError
from .install_paths import CODE, ROOT

# Bytes of private memory of a process. A record has 64 MiB at most, its JSON takes ten times as much as objects, an encoder's
# caches 200 MB, a page of Parquet 1 GiB; files that are only mapped, as weights are, do not count.
MEMORY = 6 * 2**30
LANDLOCK = 444, 445, 446  # system calls: create_ruleset, add_rule, restrict_self; the same on every architecture
EXECUTE, WRITE, READ, LIST, TRUNCATE, DEVICE = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
MAKE = sum(1 << bit for bit in (4, 5, 7, 8, 13))  # and remove, and rename: files and folders; no links, devices or sockets
ALL_FILES = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # the ABI's version -> how many of the rights to files it knows
OF_FILES = EXECUTE | WRITE | READ | TRUNCATE | DEVICE  # what a right to a single file may be
TCP, SCOPES = 0b11, 0b11  # bind and connect, from version 4; abstract sockets and signals, from version 6
BELOW = 1  # a rule about a folder and all in it
PR_SET_NO_NEW_PRIVS, PR_GET_SECCOMP, PR_SET_SECCOMP, FILTER = 38, 21, 22, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 13  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EACCES
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
X32 = 0x40000000  # system calls of x86's third kind, which have other numbers
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
SOCKETS = {  # system calls -> their numbers on x86_64 and aarch64
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),  # which opens sockets too
}  # fmt: skip
OTHERS = {  # what reaches other processes, or the kernel's less trodden parts
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "unshare": (272, 97),
    "setns": (308, 268), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265),
}  # fmt: skip
SYSTEM = (  # what an interpreter and its libraries read of a system
    "/usr", "/lib", "/lib64", "/bin", "/nix/store", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/nsswitch.conf",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm/overcommit_memory", "/sys/devices/system", "/dev/urandom",
)  # fmt: skip
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/gai.conf", "/etc/ssl", "/etc/pki", "/etc/ca-certificates",
           "/run/systemd/resolve", "/etc/mime.types", "~/.aws", "~/.netrc")  # fmt: skip

NAMED = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE",
         "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "SSL_CERT_FILE", "HF_TOKEN_PATH")  # fmt: skip  # variables that name one more


def confine(reads: Iterable[Path], writes: Iterable[Path], network: bool = False, memory: int = MEMORY) -> list[str]:
    """From now on this process reads nothing but `reads` and what its interpreter needs, and writes nothing but `writes`.

    `writes` exist already. `network` leaves it the network. Returns what of the wall this machine lacks (`lacks`).

    Raises:
        RunError: the kernel has the means, and refuses.
    """
    missing = lacks()
    if sys.platform != "linux":
        return missing
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if _prctl(PR_SET_NO_NEW_PRIVS, 1):
        raise _failed("no_new_privs")
    if version := _landlock():
        _wall_files(version, [*_own(network), *reads], list(writes), network)
    if platform.machine() in MACHINES and _prctl(PR_GET_SECCOMP) == 0:
        _refuse_calls(OTHERS if network else OTHERS | SOCKETS)
    return missing


def lacks() -> list[str]:
    """What this machine has not of the wall, in words; nothing where it is whole."""
    if sys.platform != "linux":
        return ["no sandbox is known for this system"]
    missing = []
    if not (version := _landlock()):
        missing.append("the kernel has no Landlock (Linux 5.13, lsm=landlock), so readers of foreign files can read other files")
    elif version < 3:
        missing.append(f"the kernel's Landlock is of version {version}, so readers of foreign files can cut others (Linux 6.2)")
    if platform.machine() not in MACHINES or _prctl(PR_GET_SECCOMP) < 0:
        missing.append("the kernel has no seccomp for this machine, so readers of foreign files have a network")
    return missing


def _own(network: bool) -> Iterator[Path]:
    """What the interpreter, its packages and this program read of themselves."""
    yield from map(Path, SYSTEM)
    yield from (Path(path) for path in (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), CODE, ROOT / "schema"))
    yield from (ROOT / "pyproject.toml", Path(sys.executable).resolve().parent)
    yield from (Path(path) for path in sys.path if Path(path).is_absolute() and Path(path) != Path.cwd())  # not a checkout's all
    yield from (Path(path) for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path)
    if network:
        named = (os.environ[name] for name in NAMED if os.environ.get(name))
        yield from (Path(path).expanduser() for path in (*NETWORK, *named))


def _landlock() -> int:
    """The version of the kernel's Landlock; 0 where there is none, or it is switched off."""
    return max(_syscall(LANDLOCK[0], None, 0, 1), 0) if sys.platform == "linux" else 0


def _wall_files(version: int, reads: Iterable[Path], writes: Iterable[Path], network: bool) -> None:
    """Puts up Landlock's part: files, and from the versions that know them TCP, signals and abstract sockets."""
    known = (1 << ALL_FILES.get(version, 16)) - 1
    tcp, scopes = TCP if version >= 4 and not network else 0, SCOPES if version >= 6 else 0
    attributes = struct.pack("QQQ", known, tcp, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    if (ruleset := _syscall(LANDLOCK[0], attributes, len(attributes), 0)) < 0:
        raise _failed("Landlock")
    read, write = READ | LIST | EXECUTE, READ | LIST | WRITE | TRUNCATE | MAKE
    rights = [*((path, read) for path in reads), *((path, write) for path in writes), (Path(os.devnull), READ | WRITE)]
    for path, right in rights:
        _allow(ruleset, path, right & known)
    if _syscall(LANDLOCK[2], ruleset, 0):
        raise _failed("Landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: Path, right: int) -> None:
    """Adds the right to a path, and to all below it; one that is not there needs none."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        right &= -1 if path.is_dir() else OF_FILES
        if _syscall(LANDLOCK[1], ruleset, BELOW, struct.pack("=Qi", right, place), 0):
            raise _failed("Landlock")
    finally:
        os.close(place)


def _refuse_calls(calls: dict[str, tuple[int, int]]) -> None:
    """Has the kernel answer these system calls with EACCES, and every call in another architecture's numbers.

    Codes of steps: 0x20 loads a word, 0x15 jumps if it is equal, 0x35 if it is no less, 0x54 masks it, 0x06 returns.
    """
    machine = platform.machine()
    numbers = [pair[machine == "aarch64"] for pair in calls.values()]
    steps = [_step(0x20, 4), _step(0x15, MACHINES[machine], 1, 0), _step(0x06, REFUSE), _step(0x20, 0)]
    if machine == "x86_64":
        steps += [_step(0x35, X32, 0, 1), _step(0x06, REFUSE)]
    for number in numbers:
        steps += [_step(0x15, number, 0, 1), _step(0x06, REFUSE)]
    if calls.keys() & SOCKETS.keys():  # a pair is this process's own, if it is a stream: others can be sent elsewhere
        steps += [_step(0x15, SOCKETPAIR[machine], 0, 4), _step(0x20, 24), _step(0x54, 0xFF), _step(0x15, 1, 1, 0),
                  _step(0x06, REFUSE)]  # fmt: skip
    program = b"".join([*steps, _step(0x06, ALLOW)])
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    if _prctl(PR_SET_SECCOMP, FILTER, ctypes.c_char_p(filter_)):
        raise _failed("seccomp")


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """An instruction of the kernel's small machine (linux/filter.h); jumps count the steps that they pass over."""
    return struct.pack("HBBI", code, yes, no, value)


def _prctl(option: int, *arguments: object) -> int:
    words = [argument if not isinstance(argument, int) else ctypes.c_ulong(argument) for argument in arguments]
    return int(_c().prctl(option, *words, *[ctypes.c_ulong(0)] * (4 - len(words))))


def _syscall(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(_c().syscall(ctypes.c_long(number), *words))


def _c() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _failed(what: str) -> RunError:
    return RunError("the wall around readers of foreign files can't be put up", why=f"{what}: {os.strerror(ctypes.get_errno())}",
                    next="a container may forbid it: see docs/explanation/security.md")  # fmt: skip
