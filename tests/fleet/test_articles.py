"""Recipes of AWS's articles, small: their own lines with sizes changed, on machines that the pretended account makes and takes away."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws.metal import on_metal
from fleet.lab import lab
from fleet.test_cloud import Place, account_on, running
from trainfleet.recipes import recipe_named
from trainfleet.run.run_folder import Run, read_lines
from verbs import enter, write_text

TINY = {
    "layers": 2,
    "hidden_size": 32,
    "heads": 2,
    "kv_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 384,
    "max_position_embeddings": 32,
}
SHORT = {"steps": 20, "precision": "fp32", "schedule_steps": 20, "warmup_steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 32, "log_every": 1,
         "validation_sequences": 8, "learning_rate": 6e-3}  # fmt: skip


def twin(name: str, source: str, metal: dict[str, Any] | None = None) -> dict[str, Any]:
    """The recipe with fewer and smaller everything: on two nodes at most of `metal`, or else on this machine."""
    config: dict[str, Any] = yaml.safe_load(recipe_named(name).text)
    fleet = config["fleet"]
    there = fleet | (metal or {}) | {"aws": {**fleet["aws"], **(metal or {}).get("aws", {})}}
    config["fleet"] = (there if metal else {"backend": "local"}) | {"nodes": min(2, fleet["nodes"])}
    config["data"] |= {
        "name": "text",
        "sources": [source],
        "vocab_size": 340,
        "validation_fraction": 0.1,
    }
    config["model"] |= TINY
    config["train"] |= SHORT
    config["checkpoint"]["every"] = 10
    return config


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name, family", [("roberta-large-p3dn-ec2", "roberta"), ("trn1-single-node", "bert")]
)
def test_a_recipe_makes_its_machines_trains_and_cleans(
    tmp_path: Path, name: str, family: str
) -> None:
    with lab(2) as nodes, account_on(nodes) as (account, _, address):
        text, before = write_text(nodes.shared / "text"), dict(account.things)
        config = twin(name, "/fsx/text", on_metal(nodes) | {"python": sys.executable})
        count, place = config["fleet"]["nodes"], Place(tmp_path / "there", address, nodes, **config)
        here = tmp_path / "here"
        here.mkdir()
        (here / "config.yaml").write_text(yaml.safe_dump(twin(name, str(text))))

        assert "+ a new stack of" in place.type("plan")
        assert f"{count} of {count} hosts ready" in place.type("setup")
        assert len(running(account)) == count
        planned = place.type("plan")
        assert (
            family in planned
            and f"node {count - 1} of {count}" in planned
            and f"{count} data-parallel" in planned
        )
        place.type("tokenize")
        place.type("train")
        enter(here, "train")

        run, same = Run(nodes.shared / "trainfleet/runs" / name), Run(here / "runs" / name)
        lines, others = list(read_lines(run.metrics)), list(read_lines(same.metrics))
        assert [line["step"] for line in lines] == list(range(1, 21))
        assert [line["loss"] for line in lines] == pytest.approx(
            [line["loss"] for line in others], rel=1e-4
        )  # dropout and masks too
        assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
        results = run.read_results()
        assert (results["status"], results["model"]["family"]) == ("finished", family)
        assert (results["nodes"], results["backend"]) == (count, "ec2") and results[
            "last_checkpoint"
        ].endswith("step-00000020")

        for profiled, root in (
            (enter(here, "profile"), here),
            (place.type("profile"), nodes.shared / "trainfleet"),
        ):
            assert "steps 4 to 6 of rank 0" in profiled and "backward" in profiled
            (trace,) = root.glob(f"runs/{name}-profile-*/profile/trace.json.gz")
            assert (
                b"traceEvents" in gzip.decompress(trace.read_bytes())
                and not (trace.parents[1] / "checkpoints").exists()
            )
        assert len(running(account)) == count, "it was measured on the machines that were there"

        assert f"no resources of {name} are left" in place.type("clean", "PURGE=1", "YES=1")
        assert not [thing for thing in account.living() if thing.id not in before]
