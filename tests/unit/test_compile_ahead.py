"""Compiling ahead: what decides that it is due, how it is started on a node, and what is read of the compiler's words."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trainfleet.backends import terms_of
from trainfleet.config import Config, Settings, load
from trainfleet.launch import compiling
from trainfleet.node import entrypoint, precompile
from trainfleet.node.placement import Placement
from trainfleet.plan import job as neuron
from trainfleet.plan.job import Job, train_job
from trainfleet.plan.measurement import compile_only
from trainfleet.report import measurements
from trainfleet.trust.errors import ConfigError
from trainium import CONFIG

TOOLS = Path(__file__).parents[1] / "neuron_tools"
FAILED = """
INFO ||NEURON_CC_WRAPPER||: Extracting graphs (/c/neuronxcc-2.26/MODULE_77+abb26765/model.hlo.pb) for ahead-of-time compilation.
ERROR: Unsupported operator: erf
/c/neuronxcc-2.26/MODULE_88+abb26765/model.hlo.pb: [NCC_EVRF009] The combined memory needed for activations exceeds the limit
INFO:         "/c/neuronxcc-2.26/MODULE_77+abb26765/model.hlo.pb": {
INFO:             "status": false,
INFO:         "/c/neuronxcc-2.26/MODULE_88+abb26765/model.hlo.pb": {
INFO:             "status": false,
INFO:         "/c/neuronxcc-2.26/MODULE_99+abb26765/model.hlo.pb": {
INFO:             "status": true,
INFO:             "compile_time": 61.5
"""


def read(folder: Path, settings: str = "", kind: str = "trn1.32xlarge") -> Config:
    (folder / "config.yaml").write_text(CONFIG.replace("TYPE", kind))
    return load(Settings(folder / "config.yaml", settings), terms_of)[0]


def test_the_run_that_compiles_is_named_after_what_its_programs_depend_on(tmp_path: Path) -> None:
    name = compiling.name_of(read(tmp_path))
    assert name.startswith("compile-") and len(name) == 20
    for same in (
        "train.steps=9",
        "name=other",
        "train.learning_rate=1e-5",
        "train.seed=3",
        "data.name=else",
    ):
        assert compiling.name_of(read(tmp_path, same)) == name, same
    for other in (
        "train.micro_batch_size=2",
        "fleet.nodes=8",
        "train.weight_decay=0.2",
        "model.layers=30",
        "train.sequence_length=2048",
    ):
        assert compiling.name_of(read(tmp_path, other)) != name, other


def test_a_job_that_compiles_is_the_same_job_recorded(tmp_path: Path) -> None:
    config = read(tmp_path)
    job, short = train_job(config), train_job(compile_only(config, "compile-x"))
    assert not job.ahead and job.beats and short.ahead and not short.beats
    assert (job.module, job.nodes, job.ranks_per_node) == (
        short.module,
        short.nodes,
        short.ranks_per_node,
    )
    more = {"NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1"}
    assert short.environment == {**job.environment, **more}, (
        "flags and cache are the same, or nothing would be found in it"
    )
    assert Job.of(short.record()) == short


@pytest.mark.parametrize(
    ("settings", "kind", "cache"),
    [
        ("", "trn1.32xlarge", "/fsx/.compiled/neuron-xla"),
        ("", "trn2.48xlarge", "/fsx/.compiled/neuron"),
        (
            "fleet.backend=batch fleet.container=build fleet.shared_folder=s3://bucket/x data.tokenized_path=s3://bucket/sets checkpoint.path=s3://bucket/checkpoints",
            "trn1.32xlarge",
            "s3://bucket/x/compiled/neuron-xla",
        ),
    ],
)
def test_the_cache_is_where_all_nodes_see_it(
    tmp_path: Path, settings: str, kind: str, cache: str
) -> None:
    config = read(tmp_path, settings, kind)
    assert cache in neuron.neuron_environment(config).values()
    assert neuron.compiles_ahead(config)


def test_stochastic_rounding_goes_with_bf16(tmp_path: Path) -> None:
    name = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
    assert neuron.neuron_environment(read(tmp_path, "train.precision=bf16"))[name] == "1"
    assert neuron.neuron_environment(read(tmp_path, "train.precision=fp32"))[name] == "0"


def test_what_compiles_nothing_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "name: x\ndata: {name: t, sources: [stdlib]}\ntrain: {compile: false}"
    )
    config = load(Settings(tmp_path / "config.yaml", ""), terms_of)[0]
    assert not compiling.is_due(config)
    with pytest.raises(ConfigError, match="compiles nothing"):
        compiling.require(config)


def test_a_node_starts_its_ranks_through_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    order = entrypoint.parse(
        [
            "--on",
            "fleet",
            "--folder",
            "runs/c",
            "--ranks",
            "2",
            "--ahead",
            "--",
            "trainfleet.engine",
            "runs/c",
        ]
    )
    command = entrypoint.command_of(order, Placement(0, 1, "127.0.0.1"))
    assert command[1:5] == ["-m", "trainfleet.node.precompile", sys.executable, "-m"] and command[
        -2:
    ] == [
        "trainfleet.engine",
        "runs/c",
    ]


@pytest.mark.parametrize(
    ("node", "busy", "clears"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_locks_are_cleared_by_the_first_node_and_while_nobody_compiles(
    tmp_path: Path, node: int, busy: bool, clears: bool
) -> None:
    for run in (
        ("own", "other") if busy else ("own",)
    ):  # an attempt of this very run, killed just now, holds none back
        (tmp_path / f"runs/{run}/heartbeats").mkdir(parents=True)
        (tmp_path / f"runs/{run}/heartbeats/node-0").touch()
    told = tmp_path / "told"
    environment = os.environ | {
        "PATH": f"{TOOLS}:{os.environ['PATH']}", "TOLD": str(told), "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(precompile.__file__).parents[2]),
    }  # fmt: skip
    line = [
        sys.executable,
        "-m",
        "trainfleet.node.precompile",
        "sh",
        "-c",
        'echo "extracts: $NEURON_EXTRACT_GRAPHS_ONLY"',
        f"--node-rank={node}",
        "runs/own",
    ]
    answer = subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0 and "extracts: 1" in answer.stdout, answer.stderr
    words = [json.loads(entry)["words"] for entry in told.read_text().splitlines()]
    assert (["--command", "clear-locks"] in words) == clears
    assert ("keeping the locks in the cache, because other may own some" in answer.stdout) == busy


def test_a_missing_tool_is_told_of_with_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = subprocess.run([sys.executable, "-m", "trainfleet.node.precompile", "x"], capture_output=True, text=True, timeout=60,
                            env=os.environ | {"PYTHONPATH": str(Path(precompile.__file__).parents[2])})  # fmt: skip
    assert (
        answer.returncode == 1
        and "neuron_parallel_compile is missing" in answer.stderr
        and "Traceback" not in answer.stderr
    )


def test_programs_that_failed_are_listed_with_the_operator() -> None:
    found = measurements.compilation_in([FAILED.splitlines()])
    assert found.failed == ["MODULE_77+abb26765", "MODULE_88+abb26765"] and found.seconds == {
        "MODULE_99+abb26765": 61.5
    }
    first, second = found.explained()
    assert first == "MODULE_77+abb26765: operator erf is not supported"
    assert second.startswith("MODULE_88+abb26765: NCC_EVRF009] The combined memory")


def test_a_program_that_another_node_compiled_did_not_fail() -> None:
    assert (
        measurements.compilation_in(
            [FAILED.splitlines(), FAILED.replace("false", "true").splitlines()]
        ).failed
        == []
    )


def test_hostile_words_stay_words() -> None:
    line = (
        "x" * 100_000 + 'MODULE_1+a/ "status": false \x1b[31m Unsupported operator: ' + "y" * 10_000
    )
    found = measurements.compilation_in(
        [[line, "NCC_EVRF001 \x1b]0;title\x07 \u202e" + "z" * 100_000]]
    )
    assert all(len(words) < 400 and words.isprintable() for words in found.explained())


def test_the_tool_s_stand_in_can_be_run() -> None:
    assert (TOOLS / "neuron_parallel_compile").stat().st_mode & stat.S_IXUSR
