"""W&B, MLflow and Trackio themselves, each in its offline mode, read back what run/loggers.py has sent."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from requirement import missing

ROOT = Path(__file__).parents[2]
OFFLINE = {
    "wandb": {"WANDB_MODE": "offline"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///runs.db", "MLFLOW_DISABLE_TELEMETRY": "true"},
    "trackio": {"TRACKIO_DIR": "kept"},
}
SEND = """
import sys
from pathlib import Path
from trainfleet.run.loggers import Loggers
kind, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
one = Loggers([kind], "x", "x-1", {"train.steps": 4}, Path.cwd(), lambda kind, why: print(kind, "has failed:", why))
for step in range(first, last + 1):
    one.log(step, {"train/loss": 5.0 - step, "train/valid_loss/hf://a/../*.jsonl (text)": 1.0})
one.close("finished", 120)
"""
READ = {
    "wandb": "import glob; print(len(glob.glob('wandb/offline-run-*-x-1/run-x-1.wandb')))",
    "mlflow": "import mlflow; found = mlflow.search_runs(experiment_names=['trainfleet'], output_format='list'); "
    "print(len(found), found[0].data.metrics['train/loss'], found[0].data.params['train.steps'], found[0].info.status, "
    "len(mlflow.MlflowClient().get_metric_history(found[0].info.run_id, 'train/loss')))",
    "trackio": "import sqlite3; base = sqlite3.connect('kept/trainfleet.db'); "
    "print(*base.execute('select count(*), count(distinct run_name) from metrics').fetchone())",
}
WANTED = {"wandb": "2", "mlflow": "1 1.0 4 FINISHED 4", "trackio": "4 1"}


@pytest.mark.parametrize("kind", OFFLINE)
def test_the_real_library_in_its_offline_mode_keeps_a_run_that_went_on(
    kind: str, tmp_path: Path
) -> None:
    """In an environment of their own: these packages are large, and no part of ours."""
    python = os.environ.get("LOGGERS_PYTHON", str(ROOT / ".venv-loggers" / "bin" / "python"))
    if not Path(python).exists():
        missing(
            f"no {kind}; python3 -m venv .venv-loggers && .venv-loggers/bin/pip install -r tests/oracles/loggers.txt"
        )
    environment = os.environ | OFFLINE[kind] | {"PYTHONPATH": str(ROOT / "python")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [python, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0 and "has failed" not in done.stdout, done.stdout + done.stderr
        return done.stdout

    for first in (1, 3):  # the second command goes on with the run of the first
        run("-c", SEND, kind, str(first), str(first + 1))
        time.sleep(1.1)  # wandb names its folders by the second
    assert run("-c", READ[kind]).strip() == WANTED[kind]
