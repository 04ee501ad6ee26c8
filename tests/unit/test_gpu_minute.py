"""scripts/gpu.py, with the CPU in the place of the GPU: it goes on where its time was over, and says what a machine lacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpu

ROOT = Path(__file__).parents[2]
TOY = {"GPU_TESTS_ON": "cpu"}


def minute(folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "scripts/gpu.py"), "--folder", str(folder), *words]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, cwd=folder
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def lines(folder: Path) -> list[str]:
    return [
        found["check"]
        for line in (folder / "results.jsonl").read_text().splitlines()
        if "check" in (found := json.loads(line))
    ]


@pytest.mark.thorough
def test_it_goes_on_where_its_time_was_over(tmp_path: Path) -> None:
    code, said = minute(tmp_path, "--minutes", "0.001", "first", **TOY)
    assert (
        code == 0
        and "the device" in said
        and "ten losses of Llama: out of time; run the same command" in said
    ), said
    code, said = minute(tmp_path, "--minutes", "0.001", "first", **TOY)
    assert code == 0 and said.count("passed") >= 2 and "1b ours: out of time" in said, said
    assert lines(tmp_path) == ["the device", "ten losses of Llama"]


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_every_part_runs_at_toy_size(tmp_path: Path) -> None:
    code, said = minute(
        tmp_path, "--minutes", "60", "first", "runs", "peers", "3b", "8b", "fp8", "profile", **TOY
    )
    assert code == 0, said
    print(said)


def test_a_check_is_known_by_its_name() -> None:
    """A finished one is not run again: of two with one name, the second would never run."""
    names = [check.name for check in gpu.CHECKS]
    assert sorted(set(names)) == sorted(names)


def test_a_machine_without_a_gpu_gets_a_line(tmp_path: Path) -> None:
    code, said = minute(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert code == 1 and "sees no GPU: " in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("cuda", "free", "line"),
    [
        (None, None, r"torch \S+ sees no GPU: it is built without CUDA"),
        (
            "13.0",
            None,
            r"torch \S+ sees no GPU: its driver is missing or older than CUDA 13.0 needs: nvidia-smi",
        ),
        ("13.0", 40, "another process has 40 of 80 GiB of the GPU: nvidia-smi"),
    ],
)
def test_what_a_machine_lacks_is_a_line(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, free: int | None, line: str
) -> None:
    import torch

    monkeypatch.setattr(gpu, "TOY", False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: free is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((free or 0) * 2**30, 80 * 2**30))
    (said,) = gpu.lacks()
    assert re.fullmatch(line, said), said


def test_a_part_that_does_not_exist_is_named(tmp_path: Path) -> None:
    code, said = minute(tmp_path, "frist", **TOY)
    assert code == 2 and "no such part: frist; there are first, runs, peers" in said, said
