"""What a site's environment says to sbatch: it applies as sbatch applies it, a key of the config wins, and a plan shows both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from requirement import need_program
from trainfleet.backends import terms_of
from trainfleet.backends.head import HEAD
from trainfleet.backends.slurm import Slurm, sbatch
from trainfleet.backends.slurm.client import Said, SlurmClient, ask_here
from trainfleet.config import Config, Settings, load
from trainfleet.launch import provisioning
from trainfleet.plan.job import train_job
from trainfleet.trust.errors import BackendError

SAID = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF")
SITE = {
    "SBATCH_ACCOUNT": "text",
    "SBATCH_PARTITION": "short",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_OUTPUT": "/x",
    "SBATCH_REQUEUE": "1",
}
PARTITIONS = "".join(
    f"PartitionName={name} Default={default} State=UP TotalNodes=4\n"
    for name, default in (("short", "NO"), ("long", "YES"))
)


def config_of(folder: Path, **slurm: Any) -> Config:
    fleet = {"backend": "slurm", "nodes": 2, "shared_folder": str(folder), "slurm": slurm}
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "ours", "fleet": fleet}))
    return load(Settings(folder / "config.yaml"), terms_of)[0]


class Cluster:
    """Slurm's commands as they are asked, in a site's environment."""

    def __init__(self, site: Mapping[str, str]) -> None:
        self.site, self.submissions = site, list[tuple[list[str], str, Mapping[str, str]]]()

    def ask(self, words: Sequence[str], stdin: str, environment: Mapping[str, str] | None) -> Said:
        if words[0] == "sbatch":
            self.submissions.append((list(words), stdin, environment or {}))
        answers = {"env": "hello\n" + "".join(f"{name}={value}\0" for name, value in self.site.items()), "scontrol": PARTITIONS,
                   "sinfo": "n0\nn1\nn2\nn3\n", "sbatch": "7"}  # fmt: skip
        return Said(0, answers.get(words[0], ""), "")


def submitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, site: Mapping[str, str], **slurm: Any
) -> Cluster:
    monkeypatch.chdir(folder)
    config, cluster = config_of(folder, **slurm), Cluster(site)
    backend = Slurm(config)
    backend.engine = SlurmClient(cluster.ask)
    backend.submit(backend.plan(replace(train_job(config), launch="x"), {}))
    return cluster


def test_what_no_key_sets_is_the_site_s_and_the_script_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, looked, first), (words, text, second) = submitted(tmp_path, monkeypatch, SITE).submissions
    for line in ("#SBATCH --account=text", "#SBATCH --partition=short", "# SBATCH_ACCOUNT sets --account=text",
                 "# SBATCH_PARTITION sets --partition=short", "# SBATCH_EXPORT is ignored: trainfleet sets this option",
                 "# SBATCH_REQUEUE is ignored: fleet.slurm.requeue sets this option"):  # fmt: skip
        assert line in text.splitlines()
    assert (
        looked == text
        and first.items() <= second.items()
        and not any(name.startswith("SBATCH_") for name in second)
    )
    given = set(words[2].removeprefix("--export=").split(",")) & set(SAID)
    assert provisioning.inherited(
        config_of(tmp_path)
    ) == f"environment inherited by jobs: {', '.join(SAID)}" and given == set(SAID)
    assert "--export" in words[2] and "SBATCH" not in words[2] and text.count("--output=") == 1


def test_a_key_of_the_config_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = SITE | {
        "SBATCH_TIMELIMIT": "1-00:00:00",
        "SBATCH_REQ_SWITCH": "1",
        "SBATCH_MEM_PER_NODE": "9G",
    }
    slurm = {"partition": "long", "time_limit_minutes": 90, "options": ["--switches=2"]}
    text = submitted(tmp_path, monkeypatch, site, **slurm).submissions[1][1]
    for line in ("#SBATCH --partition=long", "#SBATCH --time=90", "#SBATCH --switches=2", "#SBATCH --mem=0", "#SBATCH --account=text",
                 "# SBATCH_PARTITION is ignored: fleet.slurm.partition sets this option"):  # fmt: skip
        assert line in text.splitlines()
    assert all(
        text.count(f"#SBATCH --{name}=") == 1 for name in ("partition", "time", "switches", "mem")
    )


@pytest.mark.parametrize(
    ("variable", "value", "option"),
    [
        ("SBATCH_TIMELIMIT", "1-00:00:00", "--time=1-00:00:00"), ("SBATCH_TIMELIMIT", "90", "--time=90"), ("SBATCH_TIMELIMIT", "2-12", "--time=2-12"),
        ("SBATCH_GPUS_PER_NODE", "h100:8", "--gpus-per-node=h100:8"), ("SBATCH_CONSTRAINT", "a&b", "--constraint=a&b"),
        ("SLURM_HINT", "nomultithread", "--hint=nomultithread"), ("SBATCH_OVERCOMMIT", "", "--overcommit"),
        ("SBATCH_SPREAD_JOB", "no", ""), ("SBATCH_QOS", "", ""), ("SBATCH_FROB", "1", ""), ("SBATCH_NO_REQUEUE", "", ""),
    ],
)  # fmt: skip
def test_a_variable_is_an_option_as_sbatch_has_it(
    tmp_path: Path, variable: str, value: str, option: str
) -> None:
    plain, config = config_of(tmp_path), config_of(tmp_path)
    cluster = Cluster({variable: value, "SBATCH_WAIT4SWITCH": "10:00"})
    backend = Slurm(config)
    backend.engine = SlurmClient(cluster.ask)
    text = backend.plan(train_job(config), {}).artifacts[0].text
    bare = Slurm(plain)
    bare.engine = SlurmClient(Cluster({}).ask)
    more = {*text.splitlines()} - {*bare.plan(train_job(plain), {}).artifacts[0].text.splitlines()}
    assert {line for line in more if line.startswith("#SBATCH")} == (
        {f"#SBATCH {option}"} if option else set()
    )
    assert len(more) <= 2 and (not option or f"# {variable} sets {option}" in more)


@pytest.mark.parametrize("value", ["a b", "a\nb", "a'b", 'a"', "a#b", "\x1b[0m"])
def test_a_value_that_a_script_can_not_hold_is_told_of(tmp_path: Path, value: str) -> None:
    with pytest.raises(BackendError, match="can't be written to a batch script") as refused:
        sbatch.with_site_options(config_of(tmp_path), {"SBATCH_ACCOUNT": value})
    assert refused.value.where == "SBATCH_ACCOUNT" and "unset SBATCH_ACCOUNT" in refused.value.next


def test_every_variable_of_the_real_sbatch_is_an_option_or_ours() -> None:
    text = Path(need_program("sbatch", "apt-get install slurm-client")).read_bytes()
    names = {
        name.decode() for name in re.findall(rb"\0(SBATCH_[A-Z0-9_]+|SLURM_HINT)(?=\0)", text)
    } - {sbatch.WAIT}
    assert len(names) > 50
    assert not {
        name
        for name in names
        if sbatch.option_of(name)
        not in (*sbatch.OURS, *sbatch.KNOWN.pattern.split("|"), "array-inx", "debug")
    }


@pytest.mark.parametrize("on_head", [True, False])
def test_no_command_goes_by_what_a_profile_says_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_head: bool
) -> None:
    """A filter of squeue's would hide jobs, a question of scancel's would wait for ever."""
    said = {
        "SBATCH_PARTITION": "short",
        "SQUEUE_PARTITION": "short",
        "SCANCEL_INTERACTIVE": "1",
        "SLURM_CONF": "/etc/s.conf",
    }
    (tmp_path / "squeue").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "squeue").chmod(0o755)
    (tmp_path / ".bash_profile").write_text(
        "".join(f"export {name}={value}\n" for name, value in said.items())
        + f"PATH={tmp_path}:$PATH\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if on_head:
        monkeypatch.setenv(HEAD, "1")
    else:
        for name, value in said.items():
            monkeypatch.setenv(name, value)
    seen = ask_here(["squeue"]).out
    assert "SLURM_CONF=/etc/s.conf" in seen and not re.search("SBATCH_|SQUEUE_|SCANCEL_", seen)
    assert sbatch.site_options(SlurmClient()) == {"SBATCH_PARTITION": "short"}
