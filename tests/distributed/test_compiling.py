"""`make compile`, and `make train` with a cold cache, as a user types them: real verbs, launcher, torchrun and ranks.

On the CPU torch's own compiler fills the cache, as TorchNeuron's would on Trn2: the same job, config and cache folder. For Trn1 two
stand-ins (tests/neuron_tools): AWS's closed `neuron_parallel_compile`, by its documented arguments and words, and a device of that
name that computes on the CPU. What that shows is how it is launched, read and judged, and nothing of AWS's compiler.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import verbs

TOOLS = Path(__file__).parents[1] / "neuron_tools"
CONFIG = """
name: line
data: {name: text, sources: [text], vocab_size: 340, validation_fraction: 0.1}
model: {layers: 2, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
train: {steps: 4, precision: fp32, global_batch_size: 8, sequence_length: 128, log_every: 1, validate_every: 2, validation_sequences: 4,
        spike_sigmas: 0, KEYS}
checkpoint: {every: never}
"""


def desk(folder: Path, keys: str, fleet: str = "") -> Path:
    (folder / "config.yaml").write_text(CONFIG.replace("KEYS", keys) + fleet)
    verbs.write_text(folder / "text")
    return folder


def compiled(folder: Path) -> set[str]:
    return {str(path) for path in (folder / ".compiled").rglob("*.so")}


def test_torch_s_compiler_fills_the_cache_that_training_then_has(tmp_path: Path) -> None:
    folder = desk(tmp_path, "compile: true")
    said = verbs.enter(folder, "compile")
    (run,) = (folder / "runs").glob("compile-*")
    assert f"compiling ahead of time in runs/{run.name}" in said and "next: make train" in said
    assert json.loads((run / "results.json").read_text())["seconds"]["compile"] > 0
    first = compiled(folder)
    assert first
    assert "nothing to do" in verbs.enter(folder, "compile")
    verbs.enter(folder, "train")
    assert compiled(folder) == first, "training compiled something that the cache did not have"
    assert "false compiles nothing" in verbs.enter(
        folder, "compile", "SET=train.compile=false", code=2
    )


@pytest.fixture
def trn1(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    folder = desk(
        tmp_path,
        "compile: false, activation_checkpointing: none",
        "fleet: {platform: neuron-xla, ranks_per_node: 2}\n",
    )
    path = f"{TOOLS}:{verbs.ROOT / 'python'}"
    return folder, {
        "PATH": f"{TOOLS}:{os.environ['PATH']}",
        "TOLD": str(folder / "told"),
        "PYTHONPATH": path,
    }


def told(folder: Path) -> list[list[str]]:
    return [json.loads(line)["words"] for line in (folder / "told").read_text().splitlines()]


def test_training_with_a_cold_cache_compiles_first_and_says_so(
    trn1: tuple[Path, dict[str, str]],
) -> None:
    folder, variables = trn1
    said = verbs.enter(folder, "train", variables=variables)
    assert (
        said.index("compiling ahead") < said.index("compiled 2 programs") < said.index("step 4/4")
    )
    assert "the longest took 2:03" in said or "the longest took 2 min" in said, said
    calls = told(folder)
    clears = [words for words in calls if words == ["--command", "clear-locks"]]
    assert len(clears) == 1 and all(
        "torch.distributed.run" in words for words in calls if words not in clears
    )
    (run,) = (folder / "runs").glob("compile-*")
    assert json.loads((run / "results.json").read_text())["status"] == "finished"
    cache = folder / ".compiled/neuron-xla"
    assert len(list(cache.rglob("model.neff"))) == 2
    again = verbs.enter(folder, "train", "SET=train.steps=6", variables=variables)
    assert "compiling ahead" not in again and told(folder) == calls, "the cache is warm"


def test_a_program_that_cant_be_compiled_keeps_from_training(
    trn1: tuple[Path, dict[str, str]],
) -> None:
    folder, variables = trn1
    said = verbs.enter(folder, "train", variables=variables | {"FAILS": "erf"}, code=1)
    assert "1 of 2 programs could not be compiled" in said
    assert "MODULE_161419538+abb26765: operator erf is not supported" in said
    assert not (folder / "runs/line").exists(), "nothing was trained"
    assert "compiling ahead" in verbs.enter(folder, "train", variables=variables), (
        "it is tried again"
    )
