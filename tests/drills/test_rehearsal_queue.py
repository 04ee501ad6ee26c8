"""make rehearse in jobs of the pretended AWS Batch and SageMaker, whose nodes share no disk: promises are kept, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import verbs
from aws import elsewhere
from aws.schedulers import site
from trainfleet.storage import s3

CONFIG = """
name: mine
data: {tokenized_path: "s3://bucket/sets"}
checkpoint: {path: "s3://bucket/checkpoints"}
"""
# For every Python that a verb starts here; nodes have a path of their own.
ATTACH = """
import os, runpy, sys
sys.path.append({tests!r})
runpy.run_path({tests!r} + "/strict/sitecustomize.py")
os.environ[{variable!r}] = {where!r}
from aws import elsewhere
elsewhere.attach()
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["batch", "sagemaker"])
def test_a_rehearsal_in_jobs_of_a_service_keeps_every_promise_and_leaves_nothing(
    backend: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    faults = ["rank-killed", "nan", "notice", "read-only"]
    with site(tmp_path / "engine") as account:
        where = account.environment[elsewhere.VARIABLE]
        (tmp_path / "site").mkdir()
        attach = ATTACH.format(
            tests=str(verbs.ROOT / "tests"), variable=elsewhere.VARIABLE, where=where
        )
        (tmp_path / "site" / "sitecustomize.py").write_text(attach)
        fleet = {"fleet": {"nodes": 2} | account.fleet(backend)}
        (tmp_path / "config.yaml").write_text(CONFIG + yaml.safe_dump(fleet))
        said = verbs.enter(
            tmp_path,
            "rehearse",
            f"FAULTS={' '.join(faults)}",
            "YES=1",
            timeout=1100,
            variables={"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{verbs.PACKAGES}"},
        )
        tell(said)
        told = {
            line.split()[0]: line for line in said.splitlines() if line.startswith(tuple(faults))
        }
        assert all(told[fault].endswith(" kept") for fault in faults[:-1]), said
        assert "not tried here: checkpoints are in S3" in told["read-only"], said
        assert not account.cluster.processes() and not s3.list_objects("s3://bucket/"), said
