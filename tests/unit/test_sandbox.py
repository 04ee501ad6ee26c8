"""The wall around readers of foreign files: each way out is tried from behind it, and as a control without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from takeover import ATTEMPT
from trainfleet.config import Settings, dump_resolved, load
from trainfleet.data.source_survey import SourceSurvey, look
from trainfleet.host import sandbox, sandboxed_reader
from trainfleet.trust.errors import DataError, NoSource, RunError

WHOLE = not sandbox.lacks()
pytestmark = pytest.mark.skipif(not WHOLE and "REQUIRE_ALL" not in os.environ, reason="this kernel has no Landlock")

# What code that a file has taken over would try: a name -> what it does. Each line is one that works without the wall.
TRIES = """
import ctypes, os, signal, socket, subprocess, sys, threading
from pathlib import Path
home = Path(sys.argv[1])

def open_ring():
    if (number := ctypes.CDLL(None, use_errno=True).syscall(425, 1, ctypes.create_string_buffer(120))) < 0:
        raise OSError(ctypes.get_errno(), "io_uring")
    os.close(number)

def in_a_thread():
    said = []
    def read():
        try: said.append((home / "secret").read_text())
        except OSError as error: said.append(error)
    thread = threading.Thread(target=read); thread.start(); thread.join()
    if isinstance(said[0], OSError): raise said[0]

TRIES = {
    "read another file": lambda: (home / "secret").read_text(),
    "list another folder": lambda: os.listdir(home),
    "follow a link out": lambda: (home / "in/link").read_text(),
    "read by a thread": in_a_thread,
    "read by a child": lambda: subprocess.run(["cat", home / "secret"], check=True, capture_output=True),
    "read another's environment": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    "write an input": lambda: (home / "in/a").write_text("x"),
    "write beside the output": lambda: (home / "new").write_text("x"),
    "make a link": lambda: (home / "out/link").symlink_to("/etc"),
    "make a pipe": lambda: os.mkfifo(home / "out/pipe"),
    "move out": lambda: ((home / "out/x").write_text(""), (home / "out/x").rename(home / "x")),
    "connect": lambda: socket.create_connection(("127.0.0.1", int(sys.argv[2]))).close(),
    "open a datagram socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "open a unix socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "open a pair that can be sent elsewhere": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "open a ring": open_ring,
    "signal its parent": lambda: os.kill(os.getppid(), 0),
}
NEEDED = {
    "read an input": lambda: (home / "in/a").read_text(),
    "write the output": lambda: (home / "out/b").write_text("x"),
    "replace the output": lambda: ((home / "out/c").write_text(""), (home / "out/c").replace(home / "out/b")),
    "start a child": lambda: subprocess.run([sys.executable, "-c", "import json, ssl, numpy"], check=True),
    "open a pair": lambda: socket.socketpair(),
    "start a thread": lambda: threading.Thread(target=int).start(),
    "throw away": lambda: Path("/dev/null").write_text("x"),
}
if sys.argv[3] == "walled":
    from trainfleet.host.sandbox import confine
    assert confine([home / "in"], [home / "out"]) == []
import json
said = {}
for name, does in (TRIES | NEEDED).items():
    try:
        does(); said[name] = True
    except (OSError, subprocess.CalledProcessError) as error:
        said[name] = False
print("\\n" + json.dumps(said))
"""


LINES = "".join(json.dumps({"text": text}) + "\n" for text in Path(__file__).read_text().split("\n\n"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "in/a").write_text("an input")
    (tmp_path / "secret").write_text("a secret")
    (tmp_path / "in/link").symlink_to(tmp_path / "secret")
    return tmp_path


def environment(*more: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*more, *sys.path]))}


def tried(home: Path, how: str) -> dict[str, bool]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [sys.executable, "-c", TRIES, str(home), str(server.getsockname()[1]), how]
        said = subprocess.run(words, capture_output=True, text=True, env=environment(), check=True).stdout
    found: dict[str, bool] = json.loads(said.splitlines()[-1])
    return found


NEEDED = {
    "read an input",
    "write the output",
    "replace the output",
    "start a child",
    "open a pair",
    "start a thread",
    "throw away",
}


def test_behind_the_wall_a_process_does_its_work_and_nothing_else(home: Path) -> None:
    done = tried(home, "walled")
    assert {name for name, done in done.items() if done} == NEEDED


def test_without_the_wall_each_of_these_ways_is_open(home: Path) -> None:
    closed = {name for name, done in tried(home, "open").items() if not done}
    assert closed <= {"open a ring"}  # a container may close that one itself


# A library that is loaded behind the wall and has been taken over, as it were, by a crafted file.
TAKEN = (
    ATTEMPT
    + """
class Tokenizer:
    @staticmethod
    def from_json_str(definition):
        attempt("secret", lambda: Path("secret.txt").read_text())
        attempt("socket", lambda: socket.socket())
        attempt("config", lambda: Path("runs/x/config.yaml").write_text(""))
        attempt("other dataset", lambda: Path("data/other/x").write_text(""))
        raise ValueError("taken over")
"""
)


@pytest.mark.parametrize("workers", [1, 2])
def test_tokenizing_happens_behind_the_wall(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("text", "library", "data/other", "runs/x"):
        Path(folder).mkdir(parents=True)
    Path("library/fastokens.py").write_text(TAKEN)
    Path("secret.txt").write_text("a secret")
    for number in range(3):
        Path(f"text/{number}.jsonl").write_text(LINES * (40 + number))
    Path("elsewhere.txt").write_text("words in a file that the folder links to " * 20)
    Path("text/linked.txt").symlink_to(tmp_path / "elsewhere.txt")
    config(tmp_path / "text")
    words = [sys.executable, "-m", "trainfleet.data", "runs/x/config.yaml"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(tmp_path / "library") | {"WORKERS": str(workers)}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REFUSED secret" in done.stdout and "REFUSED socket" in done.stdout, done.stdout
    assert "DONE" not in done.stdout and "finished:" in done.stdout, done.stdout
    assert sorted(path.name for path in Path("data/set").iterdir()) == [
        "lock", "manifest.json", "plan.json", "progress", "tokenizer.json", "train", "units", "validation",
    ]  # fmt: skip


def test_a_folder_that_the_library_datasets_reads_is_read_behind_the_wall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("set", "runs/x"):
        Path(folder).mkdir(parents=True)
    Path("set/train.jsonl").write_text(LINES)
    config(f"hf://{tmp_path}/set")
    words = [sys.executable, "-m", "trainfleet.data", "runs/x/config.yaml"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment() | {"HOME": str(tmp_path / "nowhere")}, check=False
    )
    assert done.returncode == 0 and "finished:" in done.stdout, done.stdout + done.stderr
    assert not [path.name for path in Path("data/set").iterdir() if path.name.startswith("library-")]


def config(source: object) -> None:
    text = f"name: x\ndata: {{name: set, sources: ['{source}'], tokenizer: bpe, vocabulary_size: 300}}\ntrain: {{steps: 2}}\n"
    Path("config.yaml").write_text(text)
    Path("runs/x/config.yaml").write_text(dump_resolved(load(Settings(Path("config.yaml")))[0]))


BOMB = """
import sys
from pathlib import Path
from trainfleet.host import sandbox
from trainfleet.config.types import Data
from trainfleet.data import formats, tables
from trainfleet.data.documents import read_unit
from trainfleet.data.sources import plan_units
from trainfleet.trust.errors import DataError
sandbox.confine([Path(sys.argv[1])], [], memory=400 * 2**20)
try:
    for unit in plan_units(Data("set", (sys.argv[1],), "text", "bpe", 300, 0.1)).units:
        for document in read_unit(unit, "text"):
            pass
except DataError as error:
    print(error)
"""


def test_a_file_that_takes_too_much_memory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b"{}," * 9_000_000 + b"{}]")  # a fortieth of what it takes as objects
    done = subprocess.run([sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.startswith(f"{path}: takes too much memory"), done.stdout + done.stderr


def test_a_machine_without_a_wall_works_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_landlock", lambda: 0)
    monkeypatch.setattr(sandbox, "MACHINES", {})
    (tmp_path / "a.txt").write_text("a")
    lacks, read = sandboxed_reader.ask(lambda: [sandbox.confine([], []), (tmp_path / "a.txt").read_text()], list[Any], "it")
    assert read == "a" and "Landlock" in str(lacks) and "seccomp" in str(lacks)


def test_an_answer_from_behind_the_wall_is_checked_as_anybodys(tmp_path: Path) -> None:
    def of(does: object) -> object:
        return sandboxed_reader.ask(lambda: does() if callable(does) else does, int, "a.tar")  # type: ignore[no-any-return]

    def refuse(error: Exception) -> None:
        raise error

    assert of(4) == 4
    for lie in ("text", {"a": 1}, None, lambda: os.kill(os.getpid(), signal.SIGSEGV), lambda: os._exit(3)):
        with pytest.raises(DataError, match="ended its reader"):
            of(lie)
    with pytest.raises(RunError, match="broken") as found:
        of(lambda: refuse(RunError("broken", where="x", next="mend it")))
    assert found.value.where == "x" and found.value.next == "mend it"
    with pytest.raises(NoSource) as missing:
        of(lambda: refuse(NoSource(DataError("is missing"), 3)))
    assert missing.value.entry == 3


def test_plan_looks_at_sources_and_tokenizer_from_behind_the_wall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainfleet.config.types import Data
    from trainfleet.data import source_survey as module

    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("other text")
    data = Data("set", (str(tmp_path / "a.txt"),), "text", "bpe", 300, 0.1)
    assert look(data) == SourceSurvey(1, 9, 1, 9, ())
    monkeypatch.setattr(module, "require_use", lambda _: (tmp_path / "b.txt").read_text())
    with pytest.raises(DataError, match="ended its reader"):
        look(data)
    with pytest.raises(NoSource, match="no such file"):
        look(Data("set", (str(tmp_path / "a.txt"), str(tmp_path / "c.txt")), "text", "bpe", 300, 0.1))


def test_doctor_and_plan_say_what_a_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainfleet.cli import main

    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("name: x\ntrain: {steps: 2}\n")
    for verb in ("doctor", "plan"):
        assert main([verb]) == 0
        assert "Landlock" not in capsys.readouterr().out
    monkeypatch.setattr(sandbox, "_landlock", lambda: 0)
    for verb in ("doctor", "plan"):
        assert main([verb]) == 0
        assert "warning: " in (said := capsys.readouterr().out) and "the kernel has no Landlock" in said
