"""A run folder that somebody sent: whatever in it is a link, no verb opens the file behind it, neither to read nor to write."""

from __future__ import annotations

import ast
import ctypes
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from test_walls import FILES, PACKAGE

from foreign import wholes
from foreign.folders import NAME
from trainfleet.checkpoints.store import store_of
from trainfleet.health.heartbeat_format import Beat, read_beats, write_beats
from trainfleet.run.run_folder import Run, append_line, take_lock, write_json
from trainfleet.trust import untrusted_input
from trainfleet.trust.errors import InputError, RunError

RUN = Path("runs", NAME)
IN_ACCESS, IN_MODIFY, IN_OPEN = 0x1, 0x2, 0x20
CHEAP = {
    "status": (),
    "runs": (),
    "compare": (f"RUNS={NAME} other",),
    "logs": (),
    "checkpoints": (),
    "verify": (),
    "stop": (),
}
MADE = (
    "lock",
    "stop",
    "head.json",
    "handle.json",
    "request.json",
    "rehearsal.json",
    "report.html",
    "lease.json",
)
READ_BY_SAMPLE = (
    "config.yaml",
    "checkpoints",
    f"checkpoints/{Path(wholes.CHECKPOINT).name}/rank-00000.safetensors",
)


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """The files below `folder` that anybody has opened, read or written within `with`, as the kernel says (inotify)."""
    libc, found, names = ctypes.CDLL(None, use_errno=True), list[str](), dict[int, str]()
    queue = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    for path in [folder, *folder.rglob("*")]:
        if path.is_file():
            names[libc.inotify_add_watch(queue, bytes(path), IN_ACCESS | IN_MODIFY | IN_OPEN)] = (
                path.name
            )
    yield found
    try:
        said = os.read(queue, 1 << 16)
    except BlockingIOError:
        said = b""
    while said:
        which, _, _, length = struct.unpack_from("iIII", said)
        found.append(names[which])
        said = said[16 + length :]
    os.close(queue)


def places() -> list[str]:
    """Every file and folder of the template's run, and the files that other verbs leave there."""
    root = template() / RUN
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@cache
def template() -> Path:
    """A finished run with all that any verb leaves in its folder, and another one."""
    made = Path(mkdtemp())
    shutil.copytree(wholes.template(), made, dirs_exist_ok=True)
    shutil.copytree(made / RUN, made / RUN.parent / "other")
    for name in MADE:
        (made / RUN / name).exists() or (made / RUN / name).write_text('{"stood": "elsewhere"}\n')
    write_beats(made / RUN, 0, 0, [Beat(0, 0, 1, 0, "step", 3, 1.0, 1.0, 1.0, 1.0)])
    return made


def moved(name: str, folder: Path) -> Path:
    """The template in `folder`, of which what has this name in the run's folder is elsewhere, and linked to; where it is now."""
    shutil.copytree(template(), folder, dirs_exist_ok=True)
    elsewhere = folder / "elsewhere" / Path(name).name
    elsewhere.parent.mkdir()
    shutil.move(folder / RUN / name, elsewhere)
    (folder / RUN / name).symlink_to(elsewhere)
    return elsewhere


@pytest.mark.parametrize("name", places())
def test_nothing_behind_a_link_of_a_run_folder_is_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = moved(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    verbs = CHEAP | ({"sample": ("PROMPT=x",)} if name in READ_BY_SAMPLE else {}) | {"report": ()}
    with watched(elsewhere) as opened:
        for verb, words in verbs.items():
            code, said = wholes.typed(verb, *words)
            assert "Traceback" not in said and "the program has a bug" not in said, (verb, said)
            assert code == 0 or "error: " in said or "broken: " in said, (verb, said)
    assert not opened, f"{name}: {sorted(set(opened))}"


def test_the_oracle_sees_what_is_opened(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "canary").write_text("x")
    with watched(tmp_path) as opened:
        (tmp_path / "folder" / "canary").read_text()
    assert set(opened) == {"canary"}


def test_what_writes_into_a_run_folder_writes_through_no_link(tmp_path: Path) -> None:
    run, precious = Run(tmp_path / "run"), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    run.folder.mkdir()
    for name in ("stop", "lock", "metrics.jsonl"):
        (run.folder / name).symlink_to(precious / "file")
    for name in ("events", "heartbeats", "plots"):
        (run.folder / name).symlink_to(precious)
    for write in (run.ask_to_stop, lambda: take_lock(run.folder), lambda: append_line(run.metrics, {}), lambda: run.record("launched"),
                  lambda: write_beats(run.folder, 0, 1, []), lambda: write_json(run.plots / "x.json", {})):  # fmt: skip
        with pytest.raises((RunError, OSError)):
            write()
    assert [path.name for path in precious.iterdir()] == ["file"] and (
        precious / "file"
    ).read_text() == "mine"
    assert not run.is_asked_to_stop() and read_beats(run.folder, 0) == {}


def test_the_run_folder_itself_may_be_a_link_and_what_a_user_names_too(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run = Run(tmp_path / "run")
    run.record("launched")
    assert [event["event"] for event in run.read_events()] == ["launched"]
    (tmp_path / "config.yaml").symlink_to(tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text("name: x")
    assert untrusted_input.read_text(tmp_path / "config.yaml", 100) == "name: x"


def test_a_way_up_leads_out_of_no_run_folder(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    (tmp_path / "secret").write_text("x")
    with pytest.raises(InputError, match="in place of a folder"):
        untrusted_input.read_text(run.folder / ".." / "run" / ".." / "secret", 10)


def test_checkpoints_behind_a_link_are_not_taken_for_none(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    (tmp_path / "disk" / "step-00000001").mkdir(parents=True)
    run.checkpoints.symlink_to(tmp_path / "disk")
    with pytest.raises(
        RunError, match=r"is a link\n.*\n  next: run rm .*, and set checkpoint\.path"
    ):
        store_of(run, None).steps()


@pytest.mark.parametrize(
    "content", [b"\x9a\n\xff\x00{\n\x80", b"\xa0" * 100, b"x" * 3_000_000, b"nonsense\n" * 4]
)
def test_metrics_that_no_run_has_written_are_not_taken_for_none_yet(
    content: bytes, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.metrics.write_bytes(content)
    with pytest.raises(InputError, match=r"has no valid line of a run"):
        list(run.read_metrics())


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "lo', b"\0" * 100, b'{"step": 2, "lo\n{"step": 3}\n', b""]
)
def test_what_a_crash_leaves_of_a_line_is_passed_over(torn: bytes, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.metrics.write_bytes(b'{"step": 1}\n' + torn)
    assert next(run.read_metrics())["step"] == 1
    run.metrics.write_bytes(torn)
    assert [line["step"] for line in run.read_metrics()] in ([], [3])


# Who opens a file without untrusted_input, and why that is none of a run folder: each is the system's, the program's own, a file that a
# user has named, or new in a folder that this process has made itself.
OPENS = {
    # the system's: /proc, /sys, /dev, a device's files
    "process/rdma_adapters.py:ports_here", "process/processes.py:others", "backends/slurm/resources.py:look", "hosts/facts.py:read_here", "health/kernel_log.py:_counts", "health/kernel_log.py:_is_broken", "health/kernel_log.py:_states", "health/kernel_log.py:_without_driver", "hardware/cpu_speed.py:cpu", "devices/meeting.py:_is_visited",
    "devices/cpu.py:_cpuinfo", "devices/cuda.py:_check_torch", "hardware/node_types.py:local_accelerator", "hardware/node_types.py:local_chip",
    "hardware/node_types.py:local_cores", "hardware/node_types.py:memory_limits", "hardware/node_types.py:spare_memory", "health/kernel_log.py:_count", "health/kernel_log.py:_kmsg",
    "health/kernel_log.py:oom_kills", "process/processes.py:_is_below", "process/processes.py:identity", "node/placement.py:card", "node/placements.py:read_sagemaker",
    "trust/safe_output.py:_ended", "trust/secrets.py:is_keyless", "trust/safe_output.py:discard", "trust/safe_output.py:install", "data/encoders.py:muted", "node/entrypoint.py:write_reason",
    # the program's own
    "backends/skeleton/__init__.py:write", "backends/slurm/cluster_file.py:node_script", "cli/__init__.py:described", "report/all_runs.py:page",
    "cloud/template.py:user_data", "config/tables.py:read_table", "hardware/accelerators.py:_rows", "launch/compiling.py:_code",
    "hosts/facts.py:read", "hosts/install_steps.py:lock_hash", "hosts/platform.py:_read", "hosts/platform.py:ask", "hosts/tar.py:code_files",
    "process/install_paths.py:sources_of",
    "process/install_paths.py:version", "recipes/__init__.py:_read", "report/html.py:write",
    # what a user has named: sources, keys, where a model goes
    "cloud/discovery.py:public_key", "data/documents.py:_library_text", "data/documents.py:read_plain", "data/source_files.py:open_file",
    "../trainfleet_nxd/weights.py:save", "engine/export.py:export", "engine/export.py:write", "models/huggingface_weights.py:save",
    "hosts/mirror.py:bring_all", "hosts/ssh_config.py:trust", "hosts/ssh_config.py:read_lines",
    # in folders that this process has made, on this machine's own disk
    "backends/slurm/parallelcluster.py:_file", "data/shards.py:_bring", "data/local_copy.py:_bring_tokens",
    "health/heartbeat.py:is_due", "health/heartbeat.py:publish", "images/building.py:secrets_in", "images/builders.py:write_context",
    "launch/rehearsal.py:furnish", "hosts/head.py:received_verb", "process/file_systems.py:hold", "process/file_systems.py:sweep", "launch/faults.py:_guarded", "watch/node_verdict.py:cut",
    "watch/node_verdict.py:main",
    # an open file by its number, a folder to be synced, and calls of another `touch`
    "storage/files.py:open", "data/shards.py:_map", "run/run_folder.py:sync_folder", "node/supervisor.py:_become", "storage/sync_rules.py:_fill",
}  # fmt: skip


def opens() -> set[str]:
    """`file:function` of every call that opens a file by a path, but those that go through untrusted_input."""
    found = set()
    for path in [*FILES, *(PACKAGE.parent / "trainfleet_nxd").glob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                found |= {
                    f"{os.path.relpath(path, PACKAGE)}:{function.name}"
                    for call in ast.walk(function)
                    if _opens(call)
                }
    return {one for one in found if not one.startswith("trust/untrusted_input.py:")}


def _opens(call: ast.AST) -> bool:
    if not isinstance(call, ast.Call) or any(
        word.arg in ("opener", "dir_fd") for word in call.keywords
    ):
        return False
    match call.func:
        case ast.Name("open"):
            return True
        case ast.Attribute(ast.Name("os"), "open") | ast.Attribute(
            ast.Name("np"), "memmap" | "load" | "fromfile"
        ):
            return True
        case ast.Attribute(ast.Name("untrusted_input"), _):
            return False
        case ast.Attribute(_, "read_text" | "read_bytes" | "write_text" | "write_bytes" | "touch"):
            return True
    return False


def test_who_opens_a_file_without_the_door_is_known() -> None:
    assert opens() == set(OPENS)
