"""Declares all files that trainfleet writes to dataset folders and the shared folder, and the files
in run folders that `make clean` looks for.

Backends derive file paths from these declarations. `make clean` applies them locally, on hosts and
in S3, and never deletes undeclared files. A name is a path relative to its folder and may contain
{placeholders}. A trailing slash declares a folder with all its contents. This module only requires
the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..trust import untrusted_input

RUN, DATASET, SHARED = "a run's folder", "a dataset's folder", "the folder that hosts share"
# Maps placeholders to patterns. These are POSIX extended regular expressions because find(1) on
# hosts also uses them.
WORDS = {
    "node": "[0-9]+",
    "job": "[0-9]+",
    "start": "[0-9]+",
    "unit": "[0-9]{5,}",
    "worker": "[0-9]+",
    "process": "[0-9]+",
    "number": "[0-9]+",
    "digest": "[0-9a-f]{16}",
    "token": "([0-9a-f]{16}|-|by-hand-[0-9]+)",
    "split": "(train|validation)",
    "step": "step-[0-9]{8}",
    "file": "[A-Za-z0-9._+=-]+",
}


@dataclass(frozen=True)
class FileKind:
    """A declared file or folder. `again` means that it can be regenerated. `signs` means that its
    presence identifies a folder as trainfleet's.
    """

    name: str
    folders: tuple[str, ...]
    again: bool = False
    signs: bool = False

    def at(self, folder: Path | str, **words: object) -> Path:
        """Returns this file's path in a folder. Also seals the folder, so that links inside it are
        not followed.
        """
        untrusted_input.seal(Path(folder))
        return Path(folder, self.name.format(**words))

    @property
    def pattern(self) -> str:
        """Returns a regular expression for this kind's paths, including temporary names from atomic
        writes.
        """
        parts = re.split(r"\{(\w+)\}", self.name)
        name = "".join(
            WORDS[part] if place % 2 else part.replace(".", "[.]")
            for place, part in enumerate(parts)
        )
        if name.endswith("/"):
            return f"{name}.*"
        inner, slash, last = name.rpartition("/")
        return f"{inner}{slash}({last}|[.]{last}[.][0-9a-f]+)"

    @property
    def glob(self) -> str:
        """Returns this kind's path as a pattern for Path.glob, in which each {placeholder} matches
        any name. Folders match without their contents.
        """
        return re.sub(r"\{\w+\}", "*", self.name.rstrip("/"))


KINDS: list[FileKind] = []


def _declare(name: str, *folders: str, again: bool = False, signs: bool = False) -> FileKind:
    KINDS.append(FileKind(name, folders, again, signs))
    return KINDS[-1]


# Job files in run and dataset folders, written by backends/ and node/
NODE_LOG = _declare("logs/node-{node}.log", RUN, DATASET)
ENGINE_LOG = _declare("logs/engine-{node}.log", RUN, DATASET)
JOB_LOG = _declare("logs/slurm.log", RUN, DATASET)
_declare("logs/node-{node}.parts/", RUN, DATASET, again=True)
RANK_LOGS_LINK = _declare("logs/node-{node}.parts", RUN, DATASET, again=True)
NODE = _declare("nodes/node-{node}", RUN, DATASET)
_declare("nodes/node-{node}.sh", RUN, DATASET)
_declare("nodes/node-{node}.exit", RUN, DATASET)
_declare("nodes/node-{node}.said", RUN, DATASET)
CLAIM = _declare("nodes/{token}", RUN, DATASET)
START = _declare("nodes/slurm-{job}-{start}/", RUN, DATASET)
LOCK = _declare("lock", RUN, DATASET, again=True, signs=True)
SYNCED = _declare(".link.json", RUN, DATASET, signs=True)

# Dataset files, written by data/ and report/plots.py
_declare("plan.json", DATASET, signs=True)
_declare("manifest.json", DATASET, signs=True)
_declare("tokenizer.json", DATASET, signs=True)
_declare("tokenizer_config.json", DATASET)
_declare("units/{unit}.json", DATASET)
_declare("{split}/{unit}.bin", DATASET)
_declare("{split}/{unit}.idx", DATASET)
_declare("{split}/{unit}.{process}.partial", DATASET)
_declare("{split}/{unit}.bin.{process}.partial", DATASET)
_declare("progress/{node}-{worker}.json", DATASET)
_declare("cache/{digest}-{number}", DATASET)
_declare("cache/{digest}-{number}.{process}.partial", DATASET)
_declare("lengths.png", DATASET)

# Run files that identify a run or can be regenerated, written by run/run_folder.py, launch/,
# health/, engine/ and report/
_declare("given.yaml", RUN, signs=True)
_declare("head.json", RUN, DATASET, signs=True)
_declare("handle.json", RUN, signs=True)
_declare("results.json", RUN, signs=True)
_declare("metrics.jsonl", RUN, signs=True)
_declare("events/", RUN, signs=True)
_declare("heartbeats/", RUN, DATASET)
_declare("logs/{file}", RUN, signs=True)
_declare("stop", RUN, again=True)
_declare("checkpoints/.{step}/", RUN, again=True)
_declare("checkpoints/", RUN, signs=True)
_declare("plots/{file}.png", RUN, again=True)
_declare("report.html", RUN, again=True)

# Files next to runs/ and data/ in the shared folder, written by hosts/host_setup.py and
# hosts/preflight.py
_declare("env/", SHARED)
_declare("code/", SHARED)
_declare("ssh/", SHARED)
_declare(".fleet/", SHARED)


def kinds(folder: str) -> list[FileKind]:
    """Returns the file kinds that are declared for a folder type such as RUN."""
    return [kind for kind in KINDS if folder in kind.folders]


def pattern_of(folder: str) -> str:
    """Returns a POSIX extended regular expression for trainfleet's files in this type of folder."""
    return "|".join(kind.pattern for kind in kinds(folder))


def strangers(folder: str, names: Iterable[str]) -> list[str]:
    """Returns the `names` that trainfleet doesn't write to this type of folder."""
    ours = re.compile(pattern_of(folder))
    return [name for name in names if not ours.fullmatch(name)]
