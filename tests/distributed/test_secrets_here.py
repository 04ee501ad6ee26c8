"""A canary in a run that fails with it on this machine: found in no file, in no process list and in nothing that is said."""

from __future__ import annotations

import time
from pathlib import Path

import sabotage
import verbs

ROOT = Path(__file__).parents[2]
CONFIG = """
name: line
fleet: {secrets: [THE_KEY, LONGER_KEY, THE_PEM]}
data: {name: text, sources: [text], vocab_size: 340, validation_fraction: 0.1}
model: {layers: 2, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
train: {steps: 6, precision: fp32, global_batch_size: 8, sequence_length: 32, log_every: 1, validation_sequences: 8}
"""


def test_a_run_that_fails_with_a_secret_keeps_it(tmp_path: Path) -> None:
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "config.yaml").write_text(CONFIG)
    verbs.write_text(desk / "text")
    paths = f"{ROOT / 'python'}:{sabotage.lay(tmp_path / 'sabotage')}"
    variables = sabotage.SECRETS | sabotage.UNNAMED | {"PYTHONPATH": paths}

    process, seen = verbs.begin(desk, "train", variables=variables), []
    while process.poll() is None:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = entry.read_bytes()
            except OSError:
                continue
            seen += [command for part in sabotage.NEVER if part in command]
        time.sleep(0.05)
    said = [verbs.finish(process, code=1)]
    assert "ValueError" in said[0] and "***" in said[0], said[0]
    said += [verbs.enter(desk, verb, variables=variables) for verb in ("status", "logs", "report")]
    run = desk / "runs/line"
    assert "401 for ***" in "".join(path.read_text() for path in run.rglob("*.jsonl")), (
        "the failure itself is not recorded"
    )
    log = (run / "logs/node-1.log").read_text()
    assert "***" in log and f"{len(sabotage.UNNAMED)} that nobody names" in log
    assert (run / "results.json").exists() and "401 for ***" in (run / "report.html").read_text()
    assert not [text for text in said for part in sabotage.NEVER if part.decode() in text]
    assert sabotage.leaks(desk) == [] and not seen
