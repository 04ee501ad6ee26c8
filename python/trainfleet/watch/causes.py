"""Why jobs die: the causes that a verdict can name, what each decides, and the one command that helps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Weight(IntEnum):
    """What a line is worth: its writer lost a peer; it may mean this; it says so; a machine, not a program, says so."""

    VICTIM = 0
    HINT = 1
    WORD = 2
    PROOF = 3


class Then(Enum):
    """What follows from a cause: another attempt, one without the node that is to blame, or none as it would fail alike."""

    HERE = "retry here"
    ELSEWHERE = "retry elsewhere"
    STOP = "stop"


@dataclass(frozen=True)
class Cause:
    """A class of failures: in words, what to type, and what follows.

    `of_a_node`: it goes with one node, which another can replace. Where several nodes fail alike it would fail there too.
    """

    name: str
    words: str
    next: str
    then: Then = Then.STOP
    of_a_node: bool = False

    def then_on(self, nodes: int) -> Then:
        """What follows when so many nodes show it."""
        return Then.STOP if self.of_a_node and nodes > 1 else self.then


def _table(*causes: Cause) -> dict[str, Cause]:
    return {cause.name: cause for cause in causes}


CAUSES = _table(
    Cause("device-memory", "the device ran out of memory",
          "make train SET='train.micro_batch=1', or shard over more ranks: train.layout"),
    Cause("host-memory", "the node ran out of memory", "free -h on the node; fewer ranks or workers on it", Then.HERE),
    Cause("hardware", "the device or its link failed", "make doctor; replace the node", Then.ELSEWHERE),
    Cause("fabric", "the network between the nodes does not work", "make doctor names the node and why", Then.HERE),
    Cause("victim", "a peer went away and left no word", "make logs; the peer's node may be gone: make doctor", Then.HERE),
    Cause("hang", "the ranks waited for one that no longer took part", "logs/stacks-*.txt in the run folder", Then.HERE),
    Cause("slow", "the node is alive but slower than the others", "make doctor measures the node; or leave it out", Then.HERE),
    Cause("disk", "the disk is full, or a file may not be written", "df -h; checkpoint.keep=1 keeps fewer"),
    Cause("storage", "the file system or object store failed", "dmesg on the node; lfs df -h on Lustre; make train goes on",
          Then.HERE),
    Cause("mount", "a folder that should be mounted is not", "make setup mounts it; findmnt on the node", Then.ELSEWHERE, True),
    Cause("data", "the data is broken or missing", "look at the file that is named; make tokenize"),
    Cause("checkpoint", "a checkpoint can't be read, or is not of this model", "make verify; make checkpoints lists them"),
    Cause("compiler", "the compiler failed", "make logs shows its message; train.compile=false does without"),
    Cause("environment", "the software on the node is not what the program needs", "make doctor; make setup installs it",
          Then.ELSEWHERE, True),
    Cause("credentials", "the credentials are missing, expired, or not allowed to do this", "aws sts get-caller-identity",
          Then.HERE),
    Cause("clock", "the node's clock is wrong", "chronyc makestep on the node", Then.ELSEWHERE, True),
    Cause("capacity", "there are no such machines to be had now", "make train tries again; or another fleet.instance_type",
          Then.HERE),
    Cause("quota", "the account's quota is too small", "raise the quota, or NODES=fewer; make plan shows what it needs"),
    Cause("busy", "another job is at work on the same dataset or host", "wait for it, or: make stop"),
    Cause("nan", "numbers not finite, or a spike", "lower train.learning_rate or raise train.warmup_steps; make train"),
    Cause("code", "the program has a bug, or can't run with this config", "make logs shows all of it"),
    Cause("port", "another process has the rendezvous port", "make train takes a free one; fleet.port asks for this one",
          Then.HERE),
    Cause("rendezvous", "the nodes did not find each other", "make doctor looks at names and links; make train", Then.HERE),
    Cause("lost-node", "the node can't be reached", "make doctor; make train goes on without it", Then.HERE),
    Cause("preempted", "the machine was taken away", "make train resumes from the last checkpoint", Then.HERE),
    Cause("cancelled", "somebody cancelled the job", "ask who did it and why; make train resumes from the last checkpoint"),
    Cause("dependency", "the job that it was to follow has failed", "make logs RUN=..., of that job, shows why; then make train"),
    Cause("killed", "something killed it", "dmesg on the node; make train resumes from the last checkpoint", Then.HERE),
    Cause("unknown", "no known cause fits its last words", "make logs", Then.HERE),
)  # fmt: skip
