"""What an examiner's first look at bad and unusual input found: each message has what to type, and what is right is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from report_runs import make_run

from trainfleet.backends.slurm.client import Said, SlurmClient
from trainfleet.backends.slurm.resources import Partitions
from trainfleet.cli import main
from trainfleet.config import Settings
from trainfleet.launch.command import config_of
from trainfleet.report import plots
from trainfleet.trust.errors import BackendError, ConfigError, RunError, TrainfleetError
from trainfleet.trust.untrusted_input import converting
from trainfleet.watch.verdict import Verdict

from foreign.documents import LINES, read  # isort: skip


def told(text: str, folder: Path) -> str:
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config_of(Settings(folder / "config.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\ntrain:\n\tsteps: 5\n", ":3: not valid YAML: is indented with a tab"), ("name: a\ntrain: steps: 5\n", ':2: not valid YAML: has a second `: `'), ("name: {{ run }}\n", ":1: is an unfilled template"),
        ("name: a\n<<<<<<< HEAD\nx: 1\n", ":2: has an unresolved merge conflict"), ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), ("<html>", "is a web page"), ("name: 'a\n", "quote that is not closed"),
        ("name: a\ntrain:\n  steps:5\n", "add a space: steps: 5"), ("name: a\ntrain.steps: 5\n", "write steps on a separate line below train:"), ("name: a\ntrain: {steps: '500'}\n", "did you mean 500,"),
        ("name: a\ntrain: {steps: 10_000}\n", "did you mean 10000,"), ("name: a\ncheckpoint: {export_hf: yes}\n", "did you mean true?"), ("name: a\nfleet: {rendezvous_port: None}\n", "did you mean null?"), ("name: a\ndata: {sources: books}\n", 'did you mean ["books"]?'),
        ("name: a\ntrain:\n", "it has no keys; indent them"), ("name: a\ntr\u0430in: {}\n", "contains U+0430; did you mean train?"), ("".join(f"k{i}: 1\n" for i in range(90)), "and 66 more"),
        ("name: a\nfleet:\n  spot: true\n  nodes:2\ndata:\n", ':4: not valid YAML: has no `: ` after its key: "nodes:2"'), ("name: a\nfleet: {nodes: }\n", "not null; write a value, or remove the key"),
        ("name: a\nfleet: {python: 3.10}\n", "must be text or null, not 3.1; put it in quotes"), ("name: a\nbudget: 9\n", "indent its keys below it, such as max_usd: ..."),
        ("name: a\nbudget:\n  - max_usd: 9\n", "remove the dash before each key"), ("name: a\ndata: {sources: {path: x}}\n", 'did you mean [{"path": "x"}]?'), ("name: a\nfleet: {nodes: 2 nodes}\n", "did you mean 2,"),
        ("name: a\ntraining:\n  lr: 1\n  steps: x\n", ':3: training.lr: unknown key; did you mean learning_rate?'), ("name: a\ntraining:\n  lr: 1\n  steps: x\n", ':4: training.steps: must be a whole number, not "x"'),
        ("name: a\nsetup: |\n  a\n  b\n", "setup: unknown key"), ("name: a\ntrain:\n  steps: |\n    5\n", "has several lines"), ("name: a\non: {}\n", "on: unknown key; known keys: "), ("[train]\nlr = 1\n", "write `key: value`, not TOML"),
        ("name: a\ntrain: {precision: 16}\n", "did you mean fp16?"), ("name: My run/2\n", "did you mean my-run-2?"), ("name: a\nfleet: {aws: {region: us-esat-1}}\n", 'write it like "us-east-1"'), ("name: a\ndata: {sources: ['s3:/b/x']}\n", "begins with s3:/; supported: paths, s3://"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_plain_words(text: str, words: str, tmp_path: Path) -> None:
    assert words in told(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "name: a\t\ntrain:\n  steps:\t5\t# x\n\t\n \t # y\n",
        '{\n\t"name": "a",\n\t"train": {\n\t\t"steps": 5\n\t}\n}\n',
    ],
)
def test_tabs_separate_where_they_indent_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert config_of(Settings(tmp_path / "config.yaml"))[0].train.steps == 5


def test_a_config_of_another_name_is_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text("name: a\n")
    for asked in (tmp_path / "config.yaml", tmp_path):
        with pytest.raises(ConfigError, match=r"next: make plan CONFIG=\S*config.yml"):
            config_of(Settings(asked))


@pytest.mark.parametrize(
    "words",
    [
        "export OUT=s3://b/x",
        "plan CONFIG=https://x/y.yaml",
        "sample TOP_P=1.5",
        "sample LENGTH=1000001",
        "plan SET=" + "a" * 40_000,
    ],
)
def test_a_variable_that_means_nothing_is_refused_in_few_words(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainfleet.cli.models.run_trained", lambda variables: None)
    monkeypatch.setattr("trainfleet.launch.run_location.forwarded", lambda verb, variables: None)
    (tmp_path / "config.yaml").write_text("name: a\n")
    assert main(words.split()) == 2 and list(tmp_path.iterdir()) == [tmp_path / "config.yaml"]
    assert (
        words.split()[1].partition("=")[0] in (said := capsys.readouterr().err)
        and len(said) < 1000
        and "next: " in said
    )


def test_plots_are_drawn_through_no_link(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", steps=20)
    victim = tmp_path / "victim.png"
    victim.write_text("v")
    run.plots.mkdir(exist_ok=True)
    (run.plots / "loss.png").unlink(missing_ok=True)
    (run.plots / "loss.png").symlink_to(victim)
    plots.draw(run)
    assert victim.read_text() == "v" and not (run.plots / "loss.png").is_symlink()
    run.plots.rename(tmp_path / "elsewhere")
    run.plots.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is a link"):
        plots.draw(run)


@pytest.mark.parametrize("said", ["", "<html>502</html>", "slurm 22.05.8", "\x1b[2Jidle"])
def test_a_cluster_that_answers_with_no_partitions_is_none(said: str) -> None:
    def ask(words: object, stdin: str = "", environment: Mapping[str, str] | None = None) -> Said:
        return Said(0, said, "")

    with pytest.raises(BackendError, match="Slurm is not usable here"):
        Partitions(SlurmClient(ask)).apply()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("é".encode("utf-16"), "utf-16"),
        (b"\x1f\x8b\x08\0", "name it .gz"),
        (b"caf\xe9 au lait " * 9, "latin1"),
        (b"abc\xe2\x82", "download it again"),
        (bytes(range(256)), "find its type"),
    ],
)
def test_bytes_that_are_no_text_are_not_called_latin(content: bytes, words: str) -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        content.decode()
    assert words in converting(content, caught.value.start)


def test_marks_and_ends_of_line_in_a_text_are_text(tmp_path: Path) -> None:
    assert read("a.jsonl", b"\xef\xbb\xbf" + LINES)(tmp_path) == read("b.jsonl", LINES)(tmp_path)
    lines = '{"text": "a\u2028b\x85c"}\n{"text": "d"}\n'.encode()
    assert read("c.json", lines)(tmp_path) == read("c.jsonl", lines)(tmp_path)
    with pytest.raises(TrainfleetError, match=r"SET='data\.text_field=content'"):
        read("d.jsonl", json.dumps({"id": "x", "content": "y"}).encode())(tmp_path)


@pytest.mark.parametrize(("words", "code"), [("> /dev/full", 1), ("2>&-", 0), ("<&- >&- 2>&-", 0)])
def test_what_cannot_be_said_is_an_error_and_a_closed_stream_none(words: str, code: int) -> None:
    path = os.pathsep.join(
        [str(Path(__file__).parents[2] / "python"), os.environ.get("PYTHONPATH", "")]
    )
    command = f"exec {sys.executable} -m trainfleet recipes {words}"
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == code
        and "Traceback" not in done.stderr
        and ("No space left" in done.stderr) == (code == 1)
    )


def test_the_head_of_a_traceback_alone_is_not_quoted() -> None:
    told = str(
        Verdict("checkpoint", "w", 0, None, "a", ("b", "Traceback (most recent call last):"), "n")
    )
    assert "| b" in told and "Traceback" not in told
