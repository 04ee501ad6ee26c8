"""Run folders and datasets whose files are not what trainfleet writes, and every verb that looks at one."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from report_runs import make_run

from trainfleet.checkpoints.marker import Commit, FileSum, render
from trainfleet.cli import main
from trainfleet.config import Settings, dump_asked, dump_resolved, load_resolved
from trainfleet.data import __main__ as tokenizing
from trainfleet.data import inspect
from trainfleet.data.manifest import read_manifest, read_preparation, read_records
from trainfleet.data.progress import clear, read_progress
from trainfleet.launch.command import config_of
from trainfleet.report import measurements
from trainfleet.run.run_folder import Run
from trainfleet.storage.files import LocalFiles

from .cases import Case

NAME = "first-run"
CONFIG = f"name: {NAME}\ndata: {{name: small, sources: [text], vocab_size: 300, validation_fraction: 0.3}}\ntrain: {{steps: 20, sequence_length: 16, global_batch_size: 4}}\n"
LOOKS = (
    "status",
    "logs",
    "checkpoints",
    "verify",
    "stop",
    "clean",
)  # report draws, which takes half a second
VALUES: tuple[Any, ...] = (
    None,
    True,
    "",
    "x",
    "\x1b[31m",
    "../../x",
    -1,
    0,
    1.5,
    2**63,
    -(2**70),
    1e308,
    1e40,
    [],
    [1],
    {},
    {"a": 1},
    [[[]]],
    "9" * 300,
    "\u202e",
)
RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b"[" * 3000 + b"]" * 3000,
    b"nul",
    b"'x'",
    b'"\\u0000"',
)
CONTENTS = (b"", b"\n", b"null", b"[]", b"3", b'"x"', b"{", b"{}", b"[{}]", b"\xff\xfe{\0}\0", b"{}\n{}", b"\0" * 100, b'{"a":' * 3000, b"[" * 100_000, b"{" + b'"a": 1, ' * 1000, b"x" * 3_000_000, b'{"step": 1, "loss": 1}\n' * 3,
            b'{"time": 1, "event": "launched"}\n', b'{"step": 1e400}\n', b'{"step": NaN, "loss": NaN}\n', b"--- \n- a\n", b"name: [\n", b"&a [*a]\n", b"%\n", b"\xef\xbb\xbf{}")  # fmt: skip
FILES = ("config.yaml", "given.yaml", "results.json", "metrics.jsonl", "events/launcher-x.jsonl", "logs/node-0.log", "logs/node-x.log", "checkpoints/step-00000010/committed.json", "profile/summary.json",
         "stop", "lock", "head.json", "report.html", "plots", "checkpoints", "logs", "events")  # fmt: skip


@cache
def template() -> Path:
    """A folder with a finished run and its dataset, as trainfleet leaves them."""
    root, here = Path(mkdtemp()), Path.cwd()
    os.chdir(root)
    try:
        (root / "text").mkdir()
        for number in range(60):
            (root / "text" / f"{number}.txt").write_text(
                f"Document {number} says: "
                + " ".join(f"word{(number * i) % 31}" for i in range(40))
            )
        (root / "config.yaml").write_text(CONFIG)
        config, derived = config_of(Settings(Path("config.yaml")))
        run = make_run(Path("runs"), name=NAME, steps=20)
        run.config.write_text(dump_resolved(config))
        run.given.write_text(dump_asked(config, derived))
        (run.folder / "profile").mkdir()
        (run.folder / "profile" / "summary.json").write_text(json.dumps(SUMMARY))
        (run.folder / "logs").mkdir(exist_ok=True)
        (run.folder / "logs" / "node-0.log").write_text("0 1.0 | hello\n" * 3)
        (run.events / "launcher-x.jsonl").write_text(
            json.dumps({"time": 1.0, "event": "launched", "nodes": 2}) + "\n"
        )
        write_checkpoint(run)
        with mock.patch.dict(os.environ, {"NODE_RANK": "0", "NODES": "1", "WORKERS": "1"}):
            tokenizing.main([str(run.config)])
    finally:
        os.chdir(here)
    return root


SUMMARY = {
    "seconds": 2.0,
    "steps": [4, 6],
    "parts": {"forward": 1.0},
    "communication": {"seconds": 0.1, "not_hidden": 0.05},
    "kinds": {"products": 0.1, "attention": 0.0},
    "top": [{"name": "mm", "seconds": 1.0, "calls": 3}],
}


def write_checkpoint(run: Run) -> None:
    """A checkpoint whose marker is right; of its one file too."""
    folder = run.checkpoints / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"abc")
    commit = Commit(
        10,
        40,
        640,
        1.0,
        2.5,
        1.0,
        2,
        {"dp": 2},
        "0" * 64,
        {"train.steps": 20},
        {"trainfleet": "0"},
        {"a.bin": FileSum(3, 891568578)},
    )
    (folder / "committed.json").write_text(render(commit))


def _changed(name: str, change: Callable[[Path], object], *verbs: str) -> Callable[[Path], object]:
    """Looks at the template with one file changed."""

    def run(folder: Path) -> None:
        shutil.copytree(template() / "runs", folder / "runs")
        shutil.copytree(
            template() / "data" / "small",
            folder / "data" / "small",
            ignore=shutil.ignore_patterns("*.bin", "*.idx"),
        )
        shutil.copy(template() / "config.yaml", folder / "config.yaml")
        path = folder / "runs" / NAME / name if not name.startswith("data/") else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        change(path)
        with mock.patch(
            "trainfleet.cli.models.run_module", return_value=0
        ):  # that part loads torch, in a process of its own
            for verb in verbs:
                main([verb, "CONFIG=config.yaml"])

    return run


def replaced(content: bytes) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        _cleared(path)
        path.write_bytes(content)

    return change


def _cleared(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _pipe(path: Path) -> None:
    _cleared(path)
    os.mkfifo(path)


def _folder(path: Path) -> None:
    _cleared(path)
    path.mkdir()


def _link(to: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        _cleared(path)
        path.symlink_to(to)

    return change


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": _pipe, "folder": _folder, "gone": _cleared, "dangling": _link("nowhere"), "zeros": _link("/dev/zero"), "itself": _link("committed.json"), "null": _link("/dev/null"),
}  # fmt: skip


def files(*verbs: str) -> Iterator[Case]:
    """Each file of a run with other contents, and as no file at all."""
    verbs = verbs or LOOKS
    for name in FILES:
        for number, content in enumerate(CONTENTS):
            yield Case(
                "run",
                f"{name}, content {number} {content[:20]!r}",
                _changed(name, replaced(content), *verbs),
                refused=False,
            )
        for label, change in KINDS.items():
            yield Case("run", f"{name} is {label}", _changed(name, change, *verbs), refused=False)
        for name in (
            "logs/node-\u0664.log",
            "logs/node-.log",
            "logs/node-" + "9" * 50 + ".log",
            "checkpoints/step-" + "9" * 60,
            "checkpoints/step-00000011",
            "checkpoints/x",
            "events/\x1b[31m.jsonl",
        ):
            yield Case(
                "run", f"{name!r} is there", _changed(name, replaced(b"x\n"), *verbs), refused=False
            )


def values(*verbs: str) -> Iterator[Case]:
    """Each key of the records of a run with each value of another kind."""
    verbs = verbs or ("status", "checkpoints", "stop")
    root = template() / "runs" / NAME
    event = {
        "time": 5.0,
        "event": "fault",
        "step": 3,
        "nodes": 2,
        "rank": 0,
        "node": 1,
        "message": "m",
        "why": "w",
        "next": "n",
        "error": "E",
        "traceback": ["a"],
    }
    verdict = {
        "time": 6.0,
        "event": "verdict",
        "who": "rank 1",
        "cause": "killed",
        "words": "w",
        "host": "h",
        "lines": ["x"],
        "rank": None,
        "node": 1,
    }
    results = json.loads((root / "results.json").read_text())
    metric = json.loads((root / "metrics.jsonl").read_text().splitlines()[-1])
    for name, record, lines in (
        ("results.json", results, False),
        ("results.json", results | {"status": "failed"}, False),
        ("metrics.jsonl", metric, True),
        ("events/launcher-x.jsonl", event, True),
        ("events/launcher-x.jsonl", verdict, True),
    ):
        for path in _paths(record):
            for value in (*VALUES, *RAW):
                yield Case(
                    "record",
                    f"{name} {'.'.join(map(str, path))}: {str(value)[:30]!r}",
                    _changed(name, _with(record, path, value, lines), *verbs),
                    refused=False,
                )


def _paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, item in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _with(record: Any, path: tuple[str, ...], value: Any, line: bool) -> Callable[[Path], object]:
    def change(file: Path) -> None:
        text = encoded(record, path, value, None if line else 2) + b"\n"
        before = file.read_bytes() if line and file.is_file() else b""
        file.write_bytes(before + text)

    return change


def encoded(record: Any, path: tuple[str, ...], value: Any, indent: int | None) -> bytes:
    """The JSON of a record with another value at one place; bytes stand there as they are."""
    changed = json.loads(json.dumps(record))
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = "@@" if isinstance(value, bytes) else value
    text = json.dumps(changed, indent=indent).encode()
    return text.replace(b'"@@"', value) if isinstance(value, bytes) else text


def configs() -> Iterator[Case]:
    """A run's config that leads elsewhere, or is none: it is checked when it is read back."""
    text = (template() / "runs" / NAME / "config.yaml").read_text()
    for old, new in (("name: small", "name: ../../other"), (f"name: {NAME}", "name: ../../x"), (f"name: {NAME}", 'name: "a\\n"'), ("heads: 2", "heads: 0"), ("heads: 2", "heads: 7"), ("heads: 2", "heads: null"), ("layers: 4", "layers: .inf"), ("layers: 4", "layers: x"),
                     ("shared_folder: null", "shared_folder: /a/../etc"), ("steps: 20", "steps: null"), ("steps: 20", "steps: -1"), ("backend: local", "backend: [ssh]"), ("tensor: 1", "tensor: 3"), ("  path: null", "  path: s3:///x"), ("hosts: []", "hosts: [-oX]"),
                     ("hosts: []", "hosts: ['a[0-99999999]']"), ("model:", "modle:"), ("fleet:", "fleet: {}\nx:"), ("seed: 1", "seed: 99999999999"), ("global_batch_size: 4", "global_batch_size: 0"), ("family: llama", "family: mamba")):  # fmt: skip
        assert old in text, old

        def run(folder: Path, changed: str = text.replace(old, new, 1)) -> object:
            (folder / "config.yaml").write_text(changed)
            return load_resolved(folder / "config.yaml")

        yield Case("run's config", new, run)
        yield Case(
            "run's config, looked at",
            new,
            _changed("config.yaml", replaced(text.replace(old, new, 1).encode()), *LOOKS),
            refused=False,
        )
    for number, content in enumerate(CONTENTS):

        def run_raw(folder: Path, content: bytes = content) -> object:
            (folder / "config.yaml").write_bytes(content)
            return load_resolved(folder / "config.yaml")

        yield Case("run's config", f"content {number}", run_raw)


def manifests() -> Iterator[Case]:
    """A dataset's manifest, plan and units with each value of another kind, and as no JSON."""
    data = template() / "data" / "small"
    names = {
        "manifest.json": read_manifest,
        "plan.json": read_preparation,
        "units/00000.json": _read_unit,
    }
    for name, read in names.items():
        content = json.loads((data / name).read_text())
        whole = [(f"content {number}", raw) for number, raw in enumerate(CONTENTS)]
        changed = [
            (f"{'.'.join(path)}: {str(value)[:30]!r}", encoded(content, path, value, 1))
            for path in _paths(content)
            for value in (*VALUES, *RAW)
        ]
        shards = [(f"shards[0].{key}: {str(value)[:30]!r}", encoded(content | {"shards": {"0": content["shards"][0]}}, ("shards", "0", key), value, 1).replace(b'"shards": {\n  "0":', b'"shards": [').replace(b"}\n },", b"}\n ],"))
                  for key in content["shards"][0] for value in (*VALUES, *RAW)] if name == "manifest.json" else []  # fmt: skip
        for label, raw in (*whole, *changed, *shards):
            yield Case("dataset", f"{name} {label}", _dataset(name, raw, read), refused=False)
        for label, change in KINDS.items():
            yield Case(
                "dataset",
                f"{name} is {label}",
                _changed(f"data/small/{name}", change, "plan"),
                refused=False,
            )
    for raw in (
        *CONTENTS,
        b'{"bytes": "x"}',
        b'{"bytes": 1e999}',
        b'{"bytes": NaN, "documents": 1}',
    ):
        yield Case("dataset", f"progress {raw[:20]!r}", _progress("0-0.json", raw), refused=False)
        yield Case(
            "dataset",
            f"progress of nobody {raw[:20]!r}",
            _progress("x-\u0664.json", raw),
            refused=False,
        )


def _read_unit(store: LocalFiles) -> object:
    preparation = read_preparation(store)
    assert preparation is not None
    return read_records(store, [0], preparation)


def _dataset(
    name: str, raw: bytes, read: Callable[[LocalFiles], object]
) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        shutil.copytree(template() / "data", folder / "data")
        shutil.copy(template() / "runs" / NAME / "config.yaml", folder / "resolved.yaml")
        (folder / "data" / "small" / name).write_bytes(raw)
        read(LocalFiles(folder / "data" / "small"))
        inspect.inspect(load_resolved(folder / "resolved.yaml"), 0, False)
        list(inspect.inspect(load_resolved(folder / "resolved.yaml"), 0, True))

    return run


def _progress(name: str, raw: bytes) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        shutil.copytree(template() / "data", folder / "data")
        (folder / "data" / "small" / "progress").mkdir(exist_ok=True)
        (folder / "data" / "small" / "progress" / name).write_bytes(raw)
        read_progress(folder / "data" / "small")
        clear(LocalFiles(folder / "data" / "small"), 0, 1)

    return run


def summaries() -> Iterator[Case]:
    """Profiles and node hours from what is none."""
    for path in _paths(SUMMARY):
        for value in (*VALUES, *RAW):

            def run(folder: Path, path: tuple[str, ...] = path, value: Any = value) -> None:
                (folder / "profile").mkdir()
                (folder / "profile" / "summary.json").write_bytes(encoded(SUMMARY, path, value, 1))
                list(measurements.describe_profile(Run(folder)))

            yield Case("profile", f"{'.'.join(path)}: {str(value)[:30]!r}", run, refused=False)


def drawn(seed: int, count: int) -> Iterator[Case]:
    """Files of a run with bytes changed at random."""
    draw = random.Random(seed)
    root = template() / "runs" / NAME
    for number in range(count):
        name = draw.choice(
            (
                "results.json",
                "metrics.jsonl",
                "events/launcher-x.jsonl",
                "config.yaml",
                "checkpoints/step-00000010/committed.json",
            )
        )
        content = bytearray((root / name).read_bytes())
        for _ in range(draw.randint(1, 5)):
            at = draw.randrange(len(content))
            if draw.random() < 0.5:
                content[at] = draw.randrange(256)
            else:
                content[at:at] = draw.choice(
                    (b"[", b"{", b'"', b"9" * 30, b"-", b"null", b"1e999", b"\n", b"\0", b"\\ud800")
                )
        yield Case(
            "run",
            f"{name}, seed {seed}, {number}",
            _changed(name, replaced(bytes(content)), "status", "checkpoints"),
            refused=False,
        )
