"""A save with a fault at each of its operations in turn: `python faults.py FOLDER kill|full|broken|slow [EVERY]` prints what came
of it. Of the many writes of a file only every EVERY-th is a case. `python faults.py FOLDER damage` damages what was saved instead,
one file after the other.

Real saves on a real disk; only the fault is made. The engine is imported once, and every case is a fork: first a save that meets
the fault at its n-th operation (opening a file, each write, each fsync, rename, removal), then another process that resumes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from trainfleet import devices
from trainfleet.checkpoints.marker import MARKER
from trainfleet.checkpoints.store import CheckpointStore
from trainfleet.config import Config, Settings, load
from trainfleet.engine.checkpoint import Checkpoints, TrainingProgress
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.engine.world import World
from trainfleet.run.run_folder import Run, step_name
from trainfleet.trust.errors import TrainfleetError

CONFIG = """
name: drill
data: {sources: [text], vocab_size: 300}
model: {layers: 1, hidden_size: 8, heads: 2, kv_heads: 1, intermediate_size: 8}
checkpoint: {every: 4, keep: 2}
"""
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
SLOW = 0.1  # seconds that a slow operation takes: far more than a step, at whose end the next save is due


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def become(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Makes `step` the value of every number of the state, so that a look at any of them tells where it is from."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            for moment in optimizer.state[parameter].values():
                moment.fill_(step)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    tensors = [
        *(parameter.detach() for parameter in model.parameters()),
        *(moment for state in optimizer.state.values() for moment in state.values()),
    ]
    return {float(value) for tensor in tensors for value in tensor.flatten()}


class Fault:
    """Counts the operations on files; the `at`-th meets the fault. `full` goes on for all that write, the others come once.

    Whatever happens, no two saves may be under way at once: `most` is how many were.
    """

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.at, self.names = kind, at, list[str]()
        self.active, self.most = True, 0
        sys.addaudithook(self.audit)
        fsync, create = os.fsync, CheckpointStore.create
        os.fsync = lambda descriptor: (self.meet("fsync", descriptor), fsync(descriptor))[1]  # type: ignore[assignment, func-returns-value]

        @contextmanager
        def watched(store: CheckpointStore, step: int, file: str) -> Iterator[BinaryIO]:
            with create(store, step, file) as stream:
                yield stream if file == MARKER else cast(BinaryIO, Watched(stream, self))

        CheckpointStore.create = watched  # type: ignore[method-assign]

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.active and event in OPERATIONS:
            reading = event == "open" and isinstance(arguments[1], str) and "r" in arguments[1]
            if not reading and "events" not in str(arguments[0]):
                folder = event == "open" and not arguments[2] & (
                    os.O_WRONLY | os.O_RDWR
                )  # to sync it, or to remove what is in it
                self.meet(event, arguments[0], takes_room=not folder)

    def meet(self, name: str, what: object, takes_room: bool = True) -> None:
        if not self.active:
            return
        self.names.append(
            f"{name} {Path(what).name if isinstance(what, str | Path) else ''}".strip()
        )
        number = len(self.names) - 1
        self.most = max(
            self.most, sum(thread.name.startswith("save-") for thread in threading.enumerate())
        )
        if number == self.at and self.kind == "slow":
            time.sleep(SLOW)
        if number == self.at and self.kind == "kill":
            if isinstance(what, Watched):
                what.stream.write(b"half")
                what.stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.at and self.kind == "broken":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if (
            number >= self.at
            and self.kind == "full"
            and takes_room
            and name in ("open", "write", "fsync", "os.mkdir")
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Watched:
    """A file of a checkpoint, each write of which is an operation."""

    stream: BinaryIO
    fault: Fault

    def write(self, data: bytes) -> int:
        self.fault.meet("write", self)
        return self.stream.write(data)


def join() -> World:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return World(0, 1, 0, devices.nearest())


def save(
    checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    become(model, optimizer, step)
    checkpoints.save(TorchParts(model, optimizer), TrainingProgress(step), loss=1.0)
    become(model, optimizer, -1)  # training goes on while it is written


def prepare(run: Run, config: Config) -> None:
    """Two good checkpoints."""
    checkpoints, (model, optimizer) = Checkpoints(run, config, "tokens", join()), build()
    for step in (4, 8):
        save(checkpoints, model, optimizer, step)
        checkpoints.settle()


def strike(run: Run, config: Config, kind: str, at: int) -> None:
    """Saves step 12 with the fault, and step 16 without it when the process lives; says what happened in `said.json`."""
    checkpoints, (model, optimizer) = Checkpoints(run, config, "tokens", join()), build()
    checkpoints.resume(TorchParts(model, optimizer))
    fault = Fault(kind, at)
    save(checkpoints, model, optimizer, 12)
    if kind == "slow":  # a save at every step: none waits for the one before but at the next save
        for step in (13, 14):
            save(checkpoints, model, optimizer, step)
    error = ""
    try:
        checkpoints.settle()
    except TrainfleetError as raised:
        error = str(raised)
    fault.active = False
    visible, hidden = checkpoints.store.steps(), (run.checkpoints / ".step-00000012").exists()
    if at < len(fault.names):
        save(checkpoints, model, optimizer, 16)
        checkpoints.settle()
    (run.folder / "said.json").write_text(
        json.dumps(
            {
                "operations": fault.names,
                "error": error,
                "visible": visible,
                "hidden": hidden,
                "most": fault.most,
            }
        )
    )


def judge(run: Run, config: Config) -> None:
    """Resumes; what it found goes to `found.json`."""
    checkpoints, (model, optimizer) = Checkpoints(run, config, "tokens", join()), build()
    seen = {entry.step: entry.fault for entry in checkpoints.store.look()}
    progress = checkpoints.resume(TorchParts(model, optimizer))
    left = [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    found = {
        "step": progress.step,
        "values": sorted(values(model, optimizer)),
        "seen": seen,
        "left": left,
    }
    (run.folder / "found.json").write_text(json.dumps(found))


def forked(work: Callable[..., None], *arguments: Any) -> int:
    """Does it in a process of its own; the exit code, negative for a signal."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        work(*arguments)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(code)


def case(base: Path, config: Config, kind: str, at: int) -> tuple[list[str], list[str]]:
    """What is wrong after a fault at operation `at`, and the operations of the save."""
    run = Run(base.parent / f"{kind}-{at}")
    shutil.copytree(base, run.folder)
    code = forked(strike, run, config, kind, at)
    said = (
        json.loads((run.folder / "said.json").read_text())
        if code == 0
        else {"operations": [], "error": "", "visible": [], "hidden": False, "most": 1}
    )
    judged = forked(judge, run, config)
    if judged:
        return [f"{kind} at {at}: the resume failed with {judged}"], said["operations"]
    found = json.loads((run.folder / "found.json").read_text())
    struck = at < len(said["operations"])
    expected = (
        {12, 8} if code == -signal.SIGKILL else {16} if struck else {14 if kind == "slow" else 12}
    )
    wrong = []
    if said["most"] > 1:
        wrong.append(f"{said['most']} saves were under way at once")
    if kind == "slow" and (said["error"] or said["visible"] != [13, 14]):
        wrong.append(f"a slow disk lost a save: {said['visible']} {said['error']}")
    if code not in (0, -signal.SIGKILL) or (
        (kind == "kill") != (code == -signal.SIGKILL) and struck
    ):
        wrong.append(f"the save ended with {code}")
    if found["step"] not in expected or found["values"] != [float(found["step"])]:
        wrong.append(f"resumed at {found['step']} with {found['values']}")
    if faults := {step: fault for step, fault in found["seen"].items() if fault}:
        wrong.append(f"half-seen: {faults}")
    if found["left"]:
        wrong.append(f"left behind: {found['left']}")
    if said["hidden"]:
        wrong.append("a failed save kept its room on the disk")
    if struck and said["visible"] and not said["error"] and said["visible"][-1] < 12:
        wrong.append("a save failed and nobody said so")
    shutil.rmtree(run.folder)
    return [
        f"{kind} at {at} ({said['operations'][at] if struck else ''}): {text}" for text in wrong
    ], said["operations"]


def damages() -> dict[str, Callable[[Path], object]]:
    """Ways in which a file can be spoilt."""

    def flip(part: float) -> Callable[[Path], object]:
        def spoil(path: Path) -> None:
            data = bytearray(path.read_bytes())
            data[int(part * (len(data) - 1))] ^= 1
            path.write_bytes(data)

        return spoil

    flips = {f"flipped at {part:.0%}": flip(part) for part in (0.0, 0.3, 0.5, 0.9, 1.0)}
    return {**flips, "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
            "one byte long": lambda path: path.write_bytes(path.read_bytes() + b"x"), "missing": Path.unlink}  # fmt: skip


def spoil_each(base: Run, config: Config) -> tuple[int, list[str]]:
    """How many damages there were, and which of them were not found, or not passed over for the checkpoint before."""
    wrong, names = [], sorted(path.name for path in (base.checkpoints / step_name(8)).iterdir())
    for name in names:
        for what, spoil in damages().items():
            run = Run(base.folder.parent / "spoilt")
            shutil.copytree(base.folder, run.folder)
            spoil(run.checkpoints / step_name(8) / name)
            code = forked(judge, run, config)
            found = (
                json.loads((run.folder / "found.json").read_text())
                if code == 0
                else {"step": code, "values": []}
            )
            told = str(run.read_events()) if code == 0 else ""
            aside = (run.checkpoints / "step-00000008.broken").is_dir()
            if (
                found["step"] != 4
                or found["values"] != [4.0]
                or not aside
                or "damaged" not in told
                or name not in told
            ):
                wrong.append(
                    f"{name} {what}: resumed at {found['step']}, set aside: {aside}, {told}"
                )
            shutil.rmtree(run.folder)
    return len(names) * len(damages()), wrong


def main(folder: Path, kind: str, every: int) -> None:
    torch.set_num_threads(1)
    build()  # imports, once for all forks, what torch imports late
    (folder / "config.yaml").write_text(CONFIG)
    config, _ = load(Settings(folder / "config.yaml"))
    base = Run(folder / "base")
    assert forked(prepare, base, config) == 0
    began = time.monotonic()
    if kind == "damage":
        count, wrong = spoil_each(base, config)
        print(json.dumps({"kind": kind, "cases": count, "wrong": wrong}))
        return
    wrong, operations = case(base.folder, config, kind, 10**6)
    writes = [at for at, name in enumerate(operations) if name == "write"]
    cases = sorted({*range(len(operations))} - {*writes} | {*writes[::every]} | {*writes[-1:]})
    for at in cases:
        wrong += case(base.folder, config, kind, at)[0]
    told: dict[str, Any] = {
        "kind": kind,
        "cases": len(cases),
        "operations": operations,
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)
