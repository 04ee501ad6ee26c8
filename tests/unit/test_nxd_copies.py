"""Key-value heads that several tensor ranks have: NxD moves a model and keeps what it knows of a parameter, which is not their number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = """
name: lone
data: {name: text, sources: [text], vocab_size: 384}
model: {layers: 2, hidden_size: 48, heads: 4, kv_heads: 2, intermediate_size: 96}
fleet: {nodes: 4, ranks_per_node: 1, platform: neuron-xla}
train: {steps: 2, precision: fp32, global_batch_size: 8, micro_batch_size: 2, sequence_length: 64, compile: false, spike_sigmas: 0,
        parallelism: {tensor: 4}}
"""


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_checkpoint_has_each_copied_head_once_and_its_ranks_add_up(
    tmp_path: Path, rank: int
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, ROOT / "tests/nxd/lone.py", tmp_path / "config.yaml", str(rank)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (
        found["layers.0.self_attn.k_proj.weight"]
        == found["layers.1.self_attn.v_proj.weight"]
        == [[12, 48], [24, 48], 2, True]
    )
    assert found["layers.0.self_attn.q_proj.weight"] == [[12, 48], [48, 48], 1, False]
    assert found["embed_tokens.weight"] == [[96, 48], [384, 48], 1, False]
