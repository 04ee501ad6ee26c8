"""`python -m fuzz.guided TARGET SECONDS FOLDER`: searches for an input that breaks a target, led by the lines that inputs reach.

FOLDER/corpus keeps what reached a new line, for the next search; FOLDER/crash-* is what broke the target, with 1 as exit code. It
runs under the Python that has atheris (atheris.txt), with this project's packages on PYTHONPATH.
"""

from __future__ import annotations

import sys
from hashlib import sha1
from pathlib import Path

import atheris

GUIDES = ["trainfleet", "tarfile", "gzip", "csv", "yaml"]  # the modules whose lines are counted
SLOWEST, MEMORY = 10, 2048  # seconds for an input, MiB of the process

with atheris.instrument_imports(include=GUIDES):
    from fuzz import targets


def main(name: str, seconds: str, folder: Path) -> None:
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in targets.seeds(name):
        (corpus / sha1(seed).hexdigest()).write_bytes(seed)
    options = [f"-max_total_time={seconds}", f"-timeout={SLOWEST}", f"-rss_limit_mb={MEMORY}", "-max_len=8192", "-seed=2026",
               f"-artifact_prefix={folder}/", "-print_final_stats=1"]  # fmt: skip
    atheris.Setup([name, *options, str(corpus)], targets.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
