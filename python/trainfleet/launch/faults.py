"""The faults that a rehearsal causes on this machine, each with what is promised of it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..watch.causes import CAUSES, Then
from .rehearsal import BREAK_AT, EVERY, STEPS, Outcome, Stage

SMALL = 600_000  # bytes: less than a checkpoint's files have, more than any log of the run
BROKEN_NODE = """
import os, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "safetensors" and os.environ.get("GROUP_RANK") == "1":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
"""
BROKEN_NUMBERS = f"""
import importlib.util, os, sys
class Poison:
    def find_spec(self, name, path=None, target=None):
        if name != "trainfleet.engine.guard" or os.environ.get("RANK") != "1":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            skips = module.Guard.skips
            def poisoned(self, step, loss, norm):
                return skips(self, step, loss * float("nan") if step > {BREAK_AT} else loss, norm)
            module.Guard.skips = poisoned
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Poison())
"""


@dataclass(frozen=True)
class Fault:
    """A fault by name: what is done, by which verdict it must be known, and how it is played."""

    name: str
    what: str
    verdicts: tuple[str, ...]
    play: Callable[[Fault, Stage], Outcome]
    rank: int | None = None


def rehearse(faults: list[Fault], stage: Stage) -> Iterator[Outcome]:
    """What became of each fault, one after the other; what is left of one is ended before the next."""
    for fault in faults:
        if fault.name in (HERE if stage.apart else THERE):
            only = "on this machine only: fleet.backend=local" if stage.apart else "on hosts only: these nodes share their links"
            yield Outcome(fault.name, skipped=f"it is played {only}")
            continue
        outcome = fault.play(fault, stage)
        left = stage.left_over()
        broken = (*outcome.broken, *([f"{len(left)} processes were left over"] if left else []))
        yield Outcome(outcome.name, outcome.noticed, outcome.verdict, outcome.lost, outcome.again, broken, outcome.skipped)


def _signalled(number: signal.Signals, whom: str) -> Callable[[Fault, Stage], Outcome]:
    """Plays a fault that a signal to one process is: the run must go on by itself, to the same losses."""

    def play(fault: Fault, stage: Stage) -> Outcome:
        process = stage.begin(fault.name)
        stage.await_step(fault.name, process)
        began = time.time()
        stage.strike(fault.name, whom, number)
        code = stage.end(process)
        broken = [] if code == 0 else [f"the command ended with {code}"]
        return _measure(fault, stage, began, broken)

    return play


def _cut_off(fault: Fault, stage: Stage) -> Outcome:
    """A node that the others don't hear any more for a while: the run must go on without it."""
    process = stage.begin(fault.name)
    stage.await_step(fault.name, process)
    began = time.time()
    if why := stage.cut_off(fault.name):
        stage.stop(fault.name, process)
        return Outcome(fault.name, skipped=why)
    code = stage.end(process)
    return _measure(fault, stage, began, [] if code == 0 else [f"the command ended with {code}"])


def _measure(fault: Fault, stage: Stage, began: float, broken: list[str], most_lost: int = STEPS) -> Outcome:
    """What the run's events tell of a fault at `began`, with the promises that all faults have: verdict, losses."""
    events = stage.events(fault.name, began)
    verdict = next((event for event in events if event["event"] == "verdict"), None)
    first = verdict or next((event for event in events if event["event"] in ("damaged", "unsaved", "stopped")), None)
    after = first["time"] if first else began
    again = next((event for event in events if event["event"] == "began" and event["time"] > after), None)
    said = str(verdict["cause"]) if verdict else "none"
    if said not in (fault.verdicts or ("none",)):
        broken.append(f"the verdict was {said}, not {' or '.join(fault.verdicts) or 'none'}")
    elif verdict and fault.rank is not None and not stage.is_right(verdict, fault.rank):
        broken.append(f"the verdict blames {verdict['who']}")
    if stage.losses(fault.name) != stage.whole:
        broken.append("the losses are not those of the unbroken run")
    lost = sum(int(event.get("steps", 0)) for event in events if event["event"] == "lost")
    if lost > most_lost:
        broken.append(f"{lost} steps were done twice")
    seconds = [round(event["time"] - began, 1) if event else None for event in (first, again)]
    return Outcome(fault.name, seconds[0], said, lost, seconds[1], tuple(broken))


def _killed_launcher(fault: Fault, stage: Stage) -> Outcome:
    process = stage.begin(fault.name)
    stage.await_step(fault.name, process)
    began = time.time()
    process.kill()
    process.communicate()
    outlived = not stage.apart and stage.left_over()  # a fleet's launcher is on its head, and goes on
    broken = ["ranks outlived their launcher"] if outlived else []
    if code := stage.again(fault.name):
        broken.append(f"the same command ended with {code}")
    return _measure(fault, stage, began, broken)


def _noticed(fault: Fault, stage: Stage) -> Outcome:
    """A notice that a machine is about to be taken away, as Slurm and Batch give it: SIGUSR1 to a rank."""
    process = stage.begin(fault.name)
    stage.await_step(fault.name, process)
    began = time.time()
    stage.strike(fault.name, "rank", signal.SIGUSR1)
    stage.end(process)
    status = stage.run(fault.name).read_results().get("status")
    broken = [] if status == "stopped" else [f"the run was not stopped but {status}"]
    if code := stage.again(fault.name):
        broken.append(f"the same command ended with {code}")
    return _measure(fault, stage, began, broken, most_lost=0)


def _damaged(fault: Fault, stage: Stage) -> Outcome:
    """The newest checkpoint of a run that was stopped loses the half of its largest file."""
    process = stage.begin(fault.name)
    stage.await_step(fault.name, process)
    stage.stop(fault.name, process)
    stage.damage(fault.name)
    began = time.time()
    broken = [] if stage.again(fault.name) == 0 else ["the same command failed"]
    if not any(event["event"] == "damaged" for event in stage.events(fault.name, began)):
        broken.append("the damage was not seen")
    return _measure(fault, stage, began, broken)


def _full_disk(fault: Fault, stage: Stage) -> Outcome:
    """No file of the run may grow beyond SMALL bytes, so that no checkpoint can be written; then the same without that limit."""
    began = time.time()
    code = stage.end(stage.begin(fault.name, limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))))
    return _mended(fault, stage, began, code)


def _read_only(fault: Fault, stage: Stage) -> Outcome:
    """The folder of checkpoints can't be written from a moment on; then it can again."""
    if os.getuid() == 0:
        return Outcome(fault.name, skipped="root may write everywhere; try it as another user")
    process = stage.begin(fault.name)
    stage.await_step(fault.name, process)
    folder, began = stage.run(fault.name).checkpoints, time.time()
    folder.chmod(0o555)
    try:
        code = stage.end(process)
    finally:
        folder.chmod(0o755)
    return _mended(fault, stage, began, code)


def _mended(fault: Fault, stage: Stage, began: float, code: int, words: str = "") -> Outcome:
    """A fault that another attempt would meet again: the command must fail, say why, and go on once it is mended."""
    restarted = any(event["event"] == "restarted" for event in stage.events(fault.name, began))
    broken = [] if code == 1 else [f"the command ended with {code}, not 1"]
    stops = all(CAUSES[cause].then is Then.STOP for cause in fault.verdicts)
    broken += ["it was tried again, in vain"] if restarted and stops else []
    if again := stage.again(fault.name, words):
        broken.append(f"the same command ended with {again} when all was well again")
    return _measure(fault, stage, began, broken)


def _changed(program: str, words: str = "") -> Callable[[Fault, Stage], Outcome]:
    """Plays a fault that is a change of what Python finds when it starts, as if a node were installed so; then as it was."""

    def play(fault: Fault, stage: Stage) -> Outcome:
        folder = stage.folder / f"{fault.name}.site"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(program, encoding="utf-8")
        began = time.time()
        code = stage.end(stage.begin(fault.name, words, {"PYTHONPATH": str(folder)}))
        return _mended(fault, stage, began, code, words)

    return play


HERE = ("disk-full", "read-only", "nan", "no-environment")  # faults of a process's surroundings, which hosts have of their own
THERE = ("link-cut",)
KILLED = ("killed", "lost-node")
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("rank-killed", f"kill -9 of rank 1 at step {BREAK_AT}", ("killed",), _signalled(signal.SIGKILL, "rank"), 1),
        Fault("agent-killed", "kill -9 of node 1's torchrun", KILLED, _signalled(signal.SIGKILL, "agent"), 1),
        Fault("rank-stopped", "SIGSTOP of rank 1: it hangs", ("hang",), _signalled(signal.SIGSTOP, "rank"), 1),
        Fault("link-cut", "node 1 is not heard for a while", ("lost-node", "slow"), _cut_off, 1),
        Fault("launcher-killed", "kill -9 of make train itself; the same command again", (), _killed_launcher),
        Fault("notice", "the machine is about to be taken away; the same command again", (), _noticed),
        Fault("checkpoint-damaged", "half of the newest checkpoint's largest file is gone", (), _damaged),
        Fault("disk-full", "no checkpoint can be written; then there is room again", ("disk",), _full_disk),
        Fault("read-only", "the checkpoints' folder is read-only; then it is not", ("disk",), _read_only),
        Fault("nan", f"rank 1's loss is no number from step {BREAK_AT + 1} on; then it is", ("nan",),
              _changed(BROKEN_NUMBERS, "train.skips_in_a_row=3")),
        Fault("no-environment", "node 1 lacks a package; then it has it", ("environment",), _changed(BROKEN_NODE), 1),
    )
}  # fmt: skip
assert BREAK_AT % EVERY, "a fault must cost something"
