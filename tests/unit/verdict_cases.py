"""The logs of verdict_corpus/ as cases: what a person who knows would say of each, and its lines.

A file holds one case or many. A case begins with its labels (`none`: nothing here has failed, or nobody can tell what) and where
its words are from; its lines are those of node logs behind the name of the node.

Two halves, split by source (a repository, a document). Judging are the sources of the files called judging-*, which were labelled
before the rules met them and to which the rules are never tuned, and every source whose SHA-256 begins below 104. Rows of the latter were
tuned to until 2026-11-22; only the judging-* files give a first sight.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainfleet.watch.diagnosis import Diagnosis, diagnose
from trainfleet.watch.lines import LogLine, parse

FOLDER = Path(__file__).parent / "verdict_corpus"


@dataclass(frozen=True)
class Case:
    """One log with its labels. `judging`: which half; `untouched`: no rule was ever tuned to it; `file`: that it stands in."""

    name: str
    labels: dict[str, str]
    lines: tuple[LogLine, ...]
    file: str
    judging: bool = False

    @property
    def untouched(self) -> bool:
        return self.file.startswith("judging")

    @property
    def cause(self) -> str:
        return self.labels["cause"]

    @property
    def source(self) -> str:
        """The repository or document that the words are from."""
        return re.split(r" #|[,:(]| issues?\b", self.labels["from"].lower())[0].strip()

    @property
    def who(self) -> tuple[str, str]:
        return self.labels.get("node", "-"), self.labels.get("rank", "-")


def read_cases() -> list[Case]:
    """Every case, in the order of files and lines."""
    cases = [case for path in sorted(FOLDER.glob("*.log")) for case in _read(path)]
    kept = {case.source for case in cases if case.untouched}
    return [replace(case, judging=case.source in kept or _is_kept(case.source)) for case in cases]


def _is_kept(source: str) -> bool:
    return (
        hashlib.sha256(source.encode()).digest()[0] < 104
    )  # about half of all, with the untouched ones


def _read(path: Path) -> Iterator[Case]:
    for text in re.split(r"\n(?=# case: )", path.read_text()):
        lines = text.splitlines()
        labels = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
        logs: dict[int, list[str]] = {}
        for line in lines:
            if match := re.fullmatch(r"node-(\d+) (.*)", line):
                logs.setdefault(int(match[1]), []).append(match[2])
        said = tuple(line for node, mine in logs.items() for line in parse(mine, node))
        yield Case(labels.get("case", path.stem), labels, said, path.stem)


def naming(case: Case) -> Diagnosis | None:
    """The finding on a case; None where no cause is named."""
    finding = diagnose(case.lines)
    return finding if finding and finding.cause != "unknown" else None


def who(finding: Diagnosis | None) -> tuple[str, str]:
    return (
        ("-", "-")
        if finding is None
        else tuple("-" if it is None else str(it) for it in (finding.node, finding.rank))
    )  # type: ignore[return-value]


@dataclass(frozen=True)
class Score:
    """How the verdicts on some cases went. Precision: of the causes named; recall: of the failures."""

    cases: int
    failures: int
    named: int
    right: int
    placed: int  # of the right ones, those with the right node and rank
    sure: int
    wrong_and_sure: tuple[str, ...]
    fooled: tuple[str, ...]  # healthy logs for which a cause was named
    wrong: tuple[str, ...]

    @property
    def precision(self) -> float:
        return self.right / (self.named or 1)

    @property
    def recall(self) -> float:
        return self.right / (self.failures or 1)


def score(cases: Sequence[Case], change: Callable[[Case], Case] = lambda case: case) -> Score:
    """The score of diagnose() on these cases, each changed first."""
    wrong, sure_wrong, fooled = [], [], []
    failures = named = right = placed = sure = 0
    for case in map(change, cases):
        finding = naming(case)
        said = finding.cause if finding else "none"
        failures += case.cause != "none"
        named += said != "none"
        sure += finding is not None and finding.sure
        if said == case.cause:
            right += said != "none"
            placed += said != "none" and who(finding) == case.who
            if said != "none" and who(finding) != case.who:
                wrong.append(f"{case.name}: {said}, but of {who(finding)} and not {case.who}")
            continue
        wrong.append(f"{case.name}: said {said}, is {case.cause}")
        if finding and finding.sure:
            sure_wrong.append(case.name)
        if case.cause == "none":
            fooled.append(case.name)
    return Score(
        len(cases),
        failures,
        named,
        right,
        placed,
        sure,
        tuple(sure_wrong),
        tuple(fooled),
        tuple(wrong),
    )


# What a node's counters say in the place of a record of the kernel's (trainfleet/health/kernel_log.py, health/kernel_log.py), by the documents named
# there: a played closing of the log. Of what has no counter, nothing is left.
COUNTED = (
    (re.compile(r"^(?:vmstat|memory\.events): .*"), r"\g<0>"),
    (re.compile(r".*(?:Killed process|oom-kill:).*"), "vmstat: oom_kill 1 on this node"),
    (re.compile(r".*NVRM: Xid \(PCI:([\da-f:]+)\S*\): 79,.*"), r"nvidia-smi: Unable to determine the device handle for GPU\1.0: GPU is lost."),
    (re.compile(r".*NVRM: Xid \(PCI:([\da-f:]+)\S*\): (?:46|48|61|62|64|74|9[45]|109|110|119|12[0-3]|136|14[0234567896])\b(?!.*Nonfatal).*"),
     r"nvidia-smi: GPU \1.0: recovery action Reset"),
    (re.compile(r".*infiniband (efa_\d+): Failed to submit.*"), r"counters: efa \1 no_completion_cmds: 1 more"),
    (re.compile(r".*infiniband (efa_\d+): Failed to process.*"), r"counters: efa \1 cmds_err: 1 more"),
    (re.compile(r".*AER: Uncorrected \(Fatal\) error received: (\S+)"), r"counters: pci \1 aer_dev_fatal: 1 more"),
    (re.compile(r".*EDAC (\S+): \d+ UE.*"), r"counters: edac \1 ue_count: 1 more"),
    (re.compile(r".*nvme (nvme\d+): controller is down.*"), r"counters: nvme \1 is resetting"),
    (re.compile(r".*EXT4-fs error \(device (\S+)\).*"), r"counters: ext4 \1 errors_count: 1 more"),
    (re.compile(r".*Remounting filesystem read-only.*"), "counters: /data is read-only now"),
    (re.compile(r".*NVRM: The NVIDIA probe routine failed for .*"), "counters: pci 0000:b3:00.0 has no driver"),
    (re.compile(r".*XFS \(\S+\): .*[Ss]hutting down filesystem.*"), "counters: /data answers with an input/output error"),
)  # fmt: skip


def with_counters(case: Case) -> Case:
    """Where the kernel's log may not be read, and a node whose part fails tells of its counters instead, after its other lines."""
    if case.cause == "none":  # a supervisor reads them after a failure only
        return without_kernel(case)
    rest, ends = (
        [line for line in case.lines if line.who != "kernel"],
        {line.node: line.time for line in case.lines},
    )
    said = [(line, _counted(line.text)) for line in case.lines if line.who == "kernel"]
    return replace(
        case,
        lines=(
            *rest,
            *(replace(line, time=ends[line.node], text=text) for line, text in said if text),
        ),
    )


def _counted(text: str) -> str:
    return next(
        (match.expand(words) for sign, words in COUNTED if (match := sign.fullmatch(text))), ""
    )


def without_kernel(case: Case) -> Case:
    """Where neither the kernel's log nor a counter may be read."""
    return replace(case, lines=tuple(line for line in case.lines if line.who != "kernel"))


def without_ranks(case: Case) -> Case:
    """Where neither a launcher nor torch tells whose a line is."""
    return replace(case, lines=tuple(map(_nobodys, case.lines)))


def _nobodys(line: LogLine) -> LogLine:
    text = re.sub(r"\[rank\d+\]: ?", "", line.text)
    return (
        replace(line, text=text, rank=None, who="agent")
        if line.who == "rank"
        else replace(line, text=text)
    )


def with_skew(case: Case) -> Case:
    """Where every other node's clock is 20 s behind."""
    return replace(
        case,
        lines=tuple(
            replace(line, time=line.time - 20 * ((line.node or 0) % 2)) for line in case.lines
        ),
    )


def without_stamps(case: Case) -> Case:
    """As a stranger's log is: a node's lines in their order, without who wrote them and when."""
    logs: dict[int, list[str]] = {}
    for line in case.lines:
        logs.setdefault(line.node or 0, []).append(line.text)
    return replace(
        case, lines=tuple(line for node, texts in logs.items() for line in parse(texts, node))
    )


# A line of a node's log as others print it: its text, node, rank and clock.
PRINTED: dict[str, Callable[[str, int, int, str], str]] = {
    "json of docker": lambda text, node, rank, clock: json.dumps({"log": f"{text}\n", "stream": "stderr", "time": f"2026-11-22T{clock}Z"}),
    "structured json": lambda text, node, rank, clock: json.dumps({"time": f"2026-11-22T{clock}Z", "level": "INFO", "rank": rank, "message": text}),
    "docker compose": lambda text, node, rank, clock: f"worker-{node}-1  | {text}",
    "kubectl": lambda text, node, rank, clock: f"[pod/train-worker-{node}/pytorch] {text}",
    "iso": lambda text, node, rank, clock: f"2026-11-22T{clock}.123Z {text}",
    "syslog": lambda text, node, rank, clock: f"Nov 22 {clock} ip-10-0-1-{node} python[1234]: {text}",
    "srun -l": lambda text, node, rank, clock: f" {rank}: {text}",
    "[rank N]": lambda text, node, rank, clock: f"[rank {rank}] {text}",
    "skypilot": lambda text, node, rank, clock: f"(worker{node}, rank={node}, pid=77, ip=10.0.0.{node}) {text}",
    "colours": lambda text, node, rank, clock: f"\x1b[31m{text}\x1b[0m",
    "a logger": lambda text, node, rank, clock: f"2026-11-22 {clock},123 | INFO     | train:main:12 - {text}",
    "glog": lambda text, node, rank, clock: f"I1122 {clock}.123456 12345 train.cc:12] {text}",
    "a quotation": lambda text, node, rank, clock: f"    {text}",
    "a prefix that nobody knows": lambda text, node, rank, clock: f"<<{node}#gpu {rank}>> ~ {text}",
}  # fmt: skip


def printed(how: str) -> Callable[[Case], Case]:
    """A change of a case to its lines as that program prints them, thirty a second; the kernel's stand as they are."""
    make = PRINTED[how]

    def change(case: Case) -> Case:
        logs: dict[int, list[str]] = {}
        for index, line in enumerate(case.lines):
            node, clock = line.node or 0, f"10:{index // 1800:02d}:{index // 30 % 60:02d}"
            text = (
                line.text if line.who == "kernel" else make(line.text, node, line.rank or 0, clock)
            )
            logs.setdefault(node, []).append(text)
        return replace(
            case, lines=tuple(line for node, texts in logs.items() for line in parse(texts, node))
        )

    return change
