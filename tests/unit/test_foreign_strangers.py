"""What a stranger and an engineer in her first hour type: told with its place and its reason, and no secret with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import verbs
from trainfleet.cli import main
from trainfleet.cli.variables import VARIABLES, read_variables
from trainfleet.config import Settings, load
from trainfleet.config.types import Data
from trainfleet.config.vocabulary import Vocabulary
from trainfleet.data import bpe
from trainfleet.data.sources import plan_units
from trainfleet.node import placement
from trainfleet.node.placements import read_batch, read_fleet, read_slurm
from trainfleet.run.records import Lines
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import BackendError, ConfigError, DataError, InputError
from trainfleet.trust.redaction import hide

SECRET = "hunter2-and-more"
CONFIG = "name: base\ndata:\n  name: words\n  sources:\n    - text\n    - {source}\n"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a few words\n" * 100)
    return tmp_path


def refused(*lines: str, set: str = "") -> str:
    path = Path("config.yaml")
    path.write_text("\n".join(["name: base", *lines]) + "\n")
    with pytest.raises(ConfigError) as caught:
        load(Settings(path, set))
    return str(caught.value)


@pytest.mark.parametrize(
    "source, why",
    [("txet", "did you mean text?"), ("pipe.txt", "is a pipe"), ("gone.txt", "it links to nowhere"), ("~/text", "works only in a shell"),
     ("lfs", "git lfs pull"), ("none-*.txt", "no file matches")],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["plan", "tokenize"])
def test_a_source_that_is_not_there_is_told_with_its_line_and_reason(
    desk: Path, capsys: pytest.CaptureFixture[str], verb: str, source: str, why: str
) -> None:
    os.mkfifo("pipe.txt")
    Path("gone.txt").symlink_to("nowhere")
    Path("lfs").mkdir()
    Path("lfs/a.jsonl").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 99\n"
    )
    Path("config.yaml").write_text(CONFIG.format(source=source))
    assert main([verb]) == 2
    said = capsys.readouterr().err
    assert (
        "config.yaml:6: data.sources[1]: " in said
        and why in said
        and not (desk / "data/words").exists()
    )


@pytest.mark.parametrize(
    "lines",
    [f"secrets: [HF_TOKEN={SECRET}]", f"secrets: {{HF_TOKEN: {SECRET}}}", f"secrets: [{{HF_TOKEN: {SECRET}}}]",
     f"secrets: HF_TOKEN={SECRET}", f"secret_arns: [HF_TOKEN={SECRET}]", f"secret_arns: {{HF_TOKEN: {SECRET}}}"],
)  # fmt: skip
def test_a_secret_that_stands_where_its_name_should_is_not_shown(desk: Path, lines: str) -> None:
    said = refused("fleet:", f"  {lines}")
    assert SECRET not in said and "config.yaml:3: fleet.secret" in said and "HF_TOKEN" in said


def test_a_password_in_an_address_is_not_shown() -> None:
    assert hide(f"no answer from http://me:{SECRET}@10.0.0.1:9/x, nor https://{SECRET}@host/") == (
        "no answer from http://***@10.0.0.1:9/x, nor https://***@host/"
    )
    assert hide("http://host/a@b and s3://bucket/x@1") == "http://host/a@b and s3://bucket/x@1"


def test_set_takes_yaml_s_own_quotes_and_blanks_in_brackets(desk: Path) -> None:
    Path("config.yaml").write_text("name: base\n")
    given = """data.sources=["te xt",{path: text, text_field: a}] 'name=two' train.steps="7" fleet.secrets=[]"""
    config, _ = load(Settings(Path("config.yaml"), given))
    assert config.name == "two" and config.train.steps == 7
    assert [source.path for source in config.data.mixture] == ["te xt", "text"]
    assert "bracket that is not closed" in refused(set="data.sources=[a name=b")


def test_a_variable_of_pages_is_refused_in_a_line(desk: Path) -> None:
    for name in set(VARIABLES) - {"PROMPT", "SET"}:
        with pytest.raises(ConfigError, match="has 20,000 characters") as caught:
            read_variables("status", (name,), [f"{name}={'a' * 20_000}"], {})
        assert len(str(caught.value)) < 300
    assert len(refused(set="a" * 20_000)) < 300


def test_a_tilde_in_a_path_is_the_home_that_a_shell_would_have_put_there(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read_variables("plan", ("OUT",), ["OUT=~/plan"], {}) == {"OUT": "/home/me/plan"}
    assert read_variables("plan", ("OUT",), ["OUT=a~b"], {}) == {"OUT": "a~b"}


@pytest.mark.parametrize(
    "reader, told, why",
    [(read_batch, {"NODE_RANK": "abc"}, "AWS_BATCH_JOB_ID is not set"),
     (read_fleet, {"TRAINFLEET_NODE": "0", "TRAINFLEET_NODES": "1", "TRAINFLEET_MEET": "a", "TRAINFLEET_PORT": "99999"}, "is not a valid rendezvous port"),
     *((read_slurm, {"SLURM_STEP_NODELIST": hosts, "SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}, "is not a valid host list")
       for hosts in ("a[1-99999999999]", "a[x]", "a[1-", "a[]", "a]"))],
)  # fmt: skip
def test_an_environment_that_is_no_placement_is_refused_before_anything_starts(
    reader: object, told: dict[str, str], why: str
) -> None:
    with pytest.raises(BackendError, match=why):
        reader(told)  # type: ignore[operator]


@pytest.mark.parametrize("module", [["trainfleet.data", "config.yaml"],
                                    ["trainfleet.node.entrypoint", "--on", "fleet", "--folder", "runs/a", "--", "trainfleet.engine", "runs/a"]])  # fmt: skip
def test_a_number_of_a_job_that_is_none_is_refused_before_the_job_starts(
    desk: Path, module: list[str]
) -> None:
    own = placement.Placement(0, 1, "127.0.0.1").environment() | {
        "PYTHONPATH": verbs.PACKAGES,
        "WORKERS": "abc",
    }
    done = subprocess.run(
        [sys.executable, "-m", *module], env=os.environ | own, capture_output=True, text=True
    )
    assert done.returncode == 1 and "error: WORKERS is 'abc', not a number" in done.stderr
    assert "Traceback" not in done.stderr and not list(desk.glob("runs/a/heartbeats/*"))


def test_files_of_records_without_an_end_are_not_read_for_ever(desk: Path) -> None:
    run = Run(desk / "runs/base")
    run.folder.mkdir(parents=True)
    run.metrics.touch()
    os.truncate(run.metrics, 2**36)
    with pytest.raises(InputError, match="is larger than 4 GiB"):
        list(run.read_metrics())
    lines = Lines(run.metrics)
    lines.offset = 2**32
    assert lines.new() == []


def test_a_word_without_an_end_is_learned_from_in_parts() -> None:
    word, words = "ab" * 200_000, "some words and\n\nlines "
    assert (
        "".join(parts := bpe.LONG_WORD.split(words + word)) == words + word
        and max(map(len, parts)) <= 1000
    )
    assert bpe.LONG_WORD.split(words) == [words]


def empty_tar(path: Path) -> None:
    tarfile.open(path, "w").close()


@pytest.mark.parametrize(
    "name, make, why",
    [("a.tar", empty_tar, "the files contain no text"), ("a.jsonl", lambda path: path.write_text("<html>404"), "is a web page"),
     ("a.jsonl", lambda path: path.write_text('[\n {"text": "a"}\n]\n'), "rename the file to .json")],
)  # fmt: skip
def test_a_source_without_text_is_told_as_what_it_is(
    desk: Path, name: str, make: Callable[[Path], None], why: str
) -> None:
    make(desk / name)
    data = Data("d", (name,), "text", "bpe", 300, 0.1)
    with pytest.raises(DataError) as caught:
        bpe.train(data, plan_units(data))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "set, why",
    [("checkpoint.path=~/x", "only a shell expands"), ('checkpoint.path="$HOME/x"', "only a shell expands"),
     ("train.init_from=config.yaml", "is not a folder"), ("data.tokenizer=text", "the folder has no tokenizer.json"),
     ("train.loggers=[wandb,wandb]", 'lists "wandb" twice')],
)  # fmt: skip
def test_a_path_that_would_be_taken_for_another_is_refused(desk: Path, set: str, why: str) -> None:
    Path("config.yaml").write_text("name: base\ndata: {sources: [text]}\n")
    said = verbs.enter(desk, "plan", f"SET={set}", code=2)
    assert why in said and "SET: " in said


def test_a_tokenizer_that_makes_each_word_a_book_is_refused(desk: Path) -> None:
    blown = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 10**6}]}
    table = {"type": "Precompiled", "precompiled_charsmap": "A" * 10**6}
    for normalizer, is_good in ((blown, False), (table, True)):
        content = json.dumps(
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "normalizer": normalizer}
        )
        if is_good:
            assert Vocabulary(content, "tok.json").vocabulary == {"a": 0}
        else:
            with pytest.raises(DataError, match="1,000,000 characters"):
                _ = Vocabulary(content, "tok.json").vocabulary


def test_any_locale_s_terminal_gets_what_it_can_show(desk: Path) -> None:
    Path("config.yaml").write_text("name: base\ndata: {sources: [text]} # ü\n", encoding="utf-8")
    for told in ({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii:strict"}):
        said = verbs.enter(desk, "plan", variables=told | {"PYTHONCOERCECLOCALE": "0"})
        assert "next: make train" in said and "Traceback" not in said


def test_a_report_is_drawn_whatever_the_date_of_the_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from matplotlib.figure import Figure

    from trainfleet.report import plots

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "x")
    assert plots.svg(Figure(), "loss").startswith("<svg")
