"""make doctor on real nodes: a planted wrong version and a planted slow link are named, and quarantine holds until it is lifted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema

from fleet.conftest import Run, lines
from fleet.lab import lab
from trainfleet.report import json_output


def test_the_gate_names_a_slow_node_and_a_wrong_version(run: Run) -> None:
    with lab(5) as nodes:
        assert run(nodes, "setup").returncode == 0
        packages = (
            Path(sys.executable).parents[1]
            / "lib"
            / f"python3.{sys.version_info.minor}"
            / "site-packages"
        )
        record = next(packages.glob("torch-*.dist-info"))
        nodes.run(1, "mv", str(record), str(record.with_name("torch-2.9.1.dist-info")))
        nodes.slow(3, "50mbit")

        found = run(nodes, "doctor")
        table = lines(found.stdout)
        assert found.returncode == 1, found.stdout + found.stderr
        assert "FAILED" in table["node1"] and "torch 2.9.1; 4 of 5 nodes have" in table["node1"], (
            found.stdout
        )
        assert "FAILED" in table["node3"] and "its link reaches 0.0" in table["node3"], found.stdout
        assert all(" ok" in table[name] for name in ("node0", "node2", "node4")), found.stdout
        assert (
            "all-reduce over 4 nodes" in found.stdout and "make doctor LIFT=node3" in found.stdout
        )

        other = run(
            nodes, "doctor", LIFT="node1"
        )  # a wrong version is no reason for quarantine: make setup mends it
        assert (
            other.returncode == 1
            and "node1 is not in quarantine; quarantined hosts: node3" in other.stderr
        )


def test_a_folder_that_is_not_shared_and_a_taken_port_are_found_by_trying(run: Run) -> None:
    with lab(3) as nodes:
        assert run(nodes, "setup").returncode == 0
        other = "mkdir -p /fsx/other/trainfleet && cp -r /fsx/trainfleet/ssh /fsx/other/trainfleet && mount --bind /fsx/other /fsx"
        nodes.run(1, "sh", "-c", other)  # all that facts show is as it should be
        nodes.run(0, "sh", "-c", "python3 -m http.server 29399 > /dev/null 2>&1 &")
        found = run(nodes, "doctor", JSON=1)  # alone on stdout, whatever is shown on the way
        told = json.loads(found.stdout)
        part = json.loads(json_output.FILE.read_text()) | {"$ref": "#/$defs/doctor"}
        jsonschema.validate(told, part, cls=jsonschema.Draft202012Validator)
        faults = {host["name"]: host["faults"] for host in told["hosts"]}
        table = lines("\n".join(told["lines"]))
        assert "its /fsx/trainfleet does not have the file that node0 wrote" in table["node1"], told
        assert "port 29399 is already in use" in table["node0"], told
        assert table["node2"].endswith(" ok") and found.returncode == 1 and not told["healthy"]
        assert all("; ".join(faults[name]) in table[name] for name in table), told
        assert [*faults] == ["node0", "node1", "node2"] and not faults["node2"]
