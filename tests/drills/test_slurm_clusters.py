"""Other clusters than that of test_slurm.py: with accounting and without, and one whose head is reached by SSH."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from drills.test_slurm import config, job_of, steps, subprocess_of, until, write
from fleet.lab import lab
from fleet.slurmlab import cluster
from trainfleet.run.run_folder import Run
from verbs import begin, enter, finish, losses, write_text


@pytest.mark.parametrize("accounting", [True, False])
def test_with_accounting_and_without_a_job_of_old_is_known(accounting: bool) -> None:
    with lab(2) as nodes, cluster(nodes, accounting=accounting, age=2) as slurm:
        folder = nodes.shared / "work"
        folder.mkdir()
        write_text(folder / "text")
        run = write(
            folder,
            "kept",
            fleet={"slurm": {"account": "vision"}} if accounting else {},
            train={"steps": 10},
        )
        enter(folder, "train")
        number = job_of(run)
        until(
            lambda: not slurm.run("squeue", "-h", "-t", "all", "--me").stdout.strip(),
            "that squeue forgets",
            90,
        )
        assert "finished" in enter(folder, "status")
        assert "nothing to do" in enter(folder, "train")
        accounted = subprocess.run(
            ["sacct", "-X", "-n", "-P", "-j", number, "-o", "State"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ("COMPLETED" in accounted.stdout) is accounting
        if not accounting:
            return
        for fleet, expected in (
            (
                {"account": "vision", "qos": "long"},
                "fleet.slurm.qos: the account has no such QOS; root has account",
            ),
            (
                {"account": "nobody"},
                "fleet.slurm.account: the account may not run jobs there; root has account",
            ),
        ):
            write(folder, "bad", fleet={"slurm": fleet})
            said = subprocess_of(folder, "train")
            assert expected in said and "account vision with " in said, said
        run = write(
            folder, "cancelled", fleet={"slurm": {"account": "vision"}}, train={"steps": 100000}
        )
        first = begin(folder, "train")
        until(lambda: steps(run) >= 5, "step 5")
        slurm.run("scancel", job_of(run))
        assert "CANCELLED by root" in finish(first, code=1)
        slurm.stop_accounting()
        run = write(folder, "without", fleet={"slurm": {"account": "vision"}}, train={"steps": 10})
        enter(folder, "train")
        assert run.read_results()["status"] == "finished" and "finished" in enter(folder, "status")


def test_a_job_is_where_the_site_s_profile_puts_what_plain_sbatch_submits() -> None:
    """sbatch itself is the judge; a key of the config wins, plan says which variable set what, and a requeue changes nothing."""
    site = {
        "SBATCH_ACCOUNT": "text",
        "SBATCH_PARTITION": "short",
        "SBATCH_TIMELIMIT": "8",
        "SBATCH_QOS": "mine",
    }
    asked = ("Account", "Partition", "TimeLimit", "QOS")
    with lab(2) as nodes, cluster(nodes, accounting=True) as slurm:

        def places(number: str) -> dict[str, str]:
            said = slurm.run("scontrol", "show", "job", number).stdout
            return {
                name: value for name, value in re.findall(r"(\w+)=(\S*)", said) if name in asked
            }

        folder = nodes.shared / "work"
        folder.mkdir()
        write_text(folder / "text")
        plain = slurm.run(
            "env",
            *(f"{name}={value}" for name, value in site.items()),
            "sbatch",
            "--parsable",
            "--hold",
            "--wrap",
            "true",
        )
        judged = places(plain.stdout.strip())
        assert judged == {
            "Account": "text",
            "Partition": "short",
            "TimeLimit": "00:08:00",
            "QOS": "mine",
        }
        slurm.run("scancel", plain.stdout.strip())
        for name, own, changed in (("as-sbatch", {}, {}), ("own-keys", {"partition": "main", "time_limit_minutes": 9}, {"Partition": "main", "TimeLimit": "00:09:00"})):  # fmt: skip
            run = write(
                folder,
                name,
                fleet={"slurm": {"warn_before_seconds": 10, **own}},
                train={"steps": 100000},
            )
            planned = enter(folder, "plan", "VERBOSE=1", variables=site)
            assert (
                "# SBATCH_ACCOUNT sets --account=text" in planned
                and "#SBATCH --qos=mine" in planned
            ), planned
            assert (
                "# SBATCH_PARTITION is ignored: fleet.slurm.partition sets this option" in planned
            ) is bool(own), planned
            first = begin(folder, "train", variables=site)
            until(lambda: steps(run) >= 2 or first.poll() is not None, "step 2")  # noqa: B023
            assert first.poll() is None, finish(first)
            number = job_of(run)
            assert places(number) == judged | changed
            slurm.run("scontrol", "requeue", number)
            until(
                lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", number).stdout,  # noqa: B023
                "the requeue",
            )
            assert places(number) == judged | changed
            enter(folder, "stop")
            finish(first, code=130)


def test_typed_on_a_machine_without_slurm_it_is_handed_to_the_head_by_ssh(tmp_path: Path) -> None:
    with lab(2) as nodes, cluster(nodes) as slurm:
        write_text(nodes.shared / "text")
        for node in range(
            2
        ):  # the second one is the login node too: it has sbatch, and finds the cluster as others do
            (nodes.root(node) / "etc/profile.d/slurm.sh").write_text(
                f"export SLURM_CONF={slurm.folder}/slurm.conf\n"
            )
            nodes.run(node, "ln", "-sfn", str(slurm.folder), "/etc/slurm-lab")
        fleet = nodes.fleet(
            backend="slurm", hosts=[nodes.hosts()[1]], nodes=2, slurm={"warn_before_seconds": 10}
        )
        changes = {
            "data": {
                "name": "text",
                "sources": ["/fsx/text"],
                "vocab_size": 340,
                "validation_fraction": 0.1,
            }
        }
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump(config("afar", train={"steps": 40}) | changes | {"fleet": fleet})
        )
        bare = {"SLURM_CONF": "/nowhere/slurm.conf"}
        assert "partition main: 2 nodes" in enter(tmp_path, "setup", variables=bare)
        said = enter(tmp_path, "train", variables=bare)
        run = Run(nodes.shared / "trainfleet/runs/afar")
        assert run.read_results()["status"] == "finished" and len(losses(run.folder)) == 40, said
        assert "finished" in enter(tmp_path, "status", variables=bare)
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump(
                config("bad") | changes | {"fleet": fleet | {"slurm": {"partition": "gpu"}}}
            )
        )
        process = begin(tmp_path, "train", variables=bare)
        assert (
            "partition gpu does not exist; the cluster has main, short, shut"
            in process.communicate(timeout=60)[0]
        )


def test_a_node_without_power_is_lost_long_before_slurm_knows_it_and_the_next_job_is_not_put_on_it() -> (
    None
):
    """SlurmdTimeout as Slurm has it by itself, five minutes: until then the node counts as sound to slurmctld."""
    with lab(3) as nodes, cluster(nodes, patience=300) as slurm:
        folder = nodes.shared / "work"
        folder.mkdir()
        write_text(folder / "text")
        run = write(folder, "dark", train={"steps": 60})
        first = begin(folder, "train")
        until(lambda: (run.checkpoints / "step-00000010").exists(), "a checkpoint")
        hosts = slurm.run("squeue", "-h", "-j", job_of(run), "-o", "%N").stdout.strip()
        host = slurm.run("scontrol", "show", "hostnames", hosts).stdout.split()[1]
        nodes.destroy(int(host.removeprefix("node")))
        said = finish(first)
        verdicts = [event for event in run.read_events() if event["event"] == "verdict"]
        assert [
            (event["cause"], event["node"], event["host"], event["sure"]) for event in verdicts
        ] == [("lost-node", 1, host, True)], said
        assert "(slurmd), while 1 other node of the job answers" in verdicts[0]["words"]
        assert slurm.run("sinfo", "-h", "-n", host, "-o", "%T").stdout.strip() not in (
            "down",
            "down*",
        ), "it knew by itself"
        (restarted,) = [event for event in run.read_events() if event["event"] == "restarted"]
        assert restarted["cause"] == "lost-node" and restarted["who"] == f"node 1 ({host})"
        assert f"ExcNodeList={host}" in slurm.run("scontrol", "show", "job", job_of(run)).stdout
        assert run.read_results()["status"] == "finished" and len(losses(run.folder)) == 60, said
