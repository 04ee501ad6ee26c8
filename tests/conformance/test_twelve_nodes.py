"""More nodes than ten on every backend: where an order of letters would put algo-10 and node10 before algo-2 and node2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from conformance.test_backends import (
    ROOT,
    Bench,
    engine,
    failing,
    of_each,
    on_hosts,
    on_slurm,
    on_this_machine,
)
from fleet.lab import lab
from fleet.slurmlab import cluster
from trainfleet.backends import BACKENDS

TWELVE = 12


@contextmanager
def twelve(name: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A backend with that many nodes."""
    if name in ("batch", "sagemaker"):
        with engine(name, folder, patch, TWELVE) as made:
            yield made
    elif name == "local":
        yield from on_this_machine(folder, patch)
    else:
        with lab(TWELVE) as nodes, cluster(nodes) if name == "slurm" else nullcontext():
            yield from (
                on_slurm(nodes, patch)
                if name == "slurm"
                else on_hosts(name, nodes, folder, patch, TWELVE)
            )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", of_each(BACKENDS))
def test_twelve_nodes_are_numbered_as_numbers_and_each_has_its_log_and_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their placements, logs and exit codes are of the same nodes, also where an engine names hosts in an order of letters."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "python"))
    with twelve(name, tmp_path, monkeypatch) as bench:
        request = bench.plan("exit-last", "7", "10", nodes=TWELVE)
        status = bench.until_ended(bench.backend.submit(request), 120)
        said = request.job_log.read_text() if request.job_log.exists() else ""
        for log in sorted(bench.folder.parent.glob("slurm/*.log"))[
            : 0 if failing(status) == {10: 7} else 20
        ]:
            print(log.name, log.read_text()[-2000:], sep="\n")  # what the daemons saw
        assert failing(status) == {10: 7}, (status, said)
        assert [record["node"] for record in bench.records(request)] == [
            str(node) for node in range(TWELVE)
        ]
        assert {record["nodes"] for record in bench.records(request)} == {str(TWELVE)}
