"""What a newcomer types and writes wrongly is told as what it is: the line that is wrong, the path that was meant."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import Path

import pytest

import verbs
from trainfleet.cli.variables import read_variables
from trainfleet.config import Settings, dump_resolved, load, platforms
from trainfleet.config.yaml_lines import read
from trainfleet.report import plots
from trainfleet.report.proposal import require_own
from trainfleet.run.run_folder import unwritable
from trainfleet.trust.errors import ConfigError, InputError, RunError
from trainfleet.trust.spelling import nearest


@pytest.mark.parametrize(
    "text, line, why",
    [("a:\n  steps 3\n  b: 8\n", 2, "has no `: `"), ("a:\n  steps:3\n\n  # so\n  b: 8\n", 5, "not indented like"),
     ("a:\n  steps:3\n  b: 8\n", 2, "has no `: `"), ("a:\n  steps:\u00a03\n  b: 8\n", 2, "the character U+00A0"),
     ("a:\n  b\uff1a 3\n  c: 8\n", 2, "the character U+FF1A"), ("a:\n  b: 1\n    c: 2\n", 3, "indented deeper than line 2"),
     ("a: b: c\n", 1, "has a second `: `"), ("a: 'x': y\n", 1, "has a second `: `"), ("k" * 2000 + ": 1\n", 1, "more than 1,024")],
)  # fmt: skip
def test_yaml_is_blamed_on_the_line_that_is_wrong(text: str, line: int, why: str) -> None:
    (problem,) = read(text, "f").problems
    assert problem.line == line and why in problem.message


@pytest.mark.parametrize(
    "value", ["a\nb", "\u202ex", "-rf", "~nobody-here/x", "$HOME/x", "\x1b[2J"]
)
@pytest.mark.parametrize("name", ["OUT", "CONFIG"])
def test_a_variable_that_is_no_path_that_anyone_means_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_variables("plan", ("OUT", "CONFIG"), [f"{name}={value}"], {})
    assert name in str(caught.value) and "\n" not in caught.value.problems[0].message


@pytest.mark.parametrize("out", ["runs/x", "data/x", "file/plan", "loop", "gone"])
def test_a_folder_that_can_t_be_made_is_refused_before_all_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("gone").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="OUT: "):
        require_own(Path(out))
    with pytest.raises(RunError, match=r"can't be created|already exists"):
        platforms.require_new(Path(out))
    require_own(Path("new/plan"))
    Path("mine").mkdir()
    Path("mine/cluster.yaml").touch()  # has a plan's name, but was not planned
    with pytest.raises(ConfigError, match="not written by make plan"):
        require_own(Path("mine"))
    platforms.require_new(Path("runs/x/model"))


def refused(folder: Path, set: str) -> str:
    (folder / "config.yaml").write_text("name: base\ndata: {sources: [stdlib]}\n")
    with pytest.raises(ConfigError) as caught:
        load(Settings(folder / "config.yaml", set))
    return str(caught.value)


@pytest.mark.parametrize("key", ["model.preset", "data.tokenizer"])
def test_a_name_or_page_of_the_hub_leads_to_its_address(tmp_path: Path, key: str) -> None:
    for address in (
        "https://huggingface.co/meta-llama/Llama-2-7b/tree/main",
        "meta-llama/Llama-2-7b",
    ):
        assert "did you mean hf://meta-llama/Llama-2-7b?" in refused(tmp_path, f"{key}={address}")
    assert "models can't be read from s3://" in refused(tmp_path, f"{key}=s3://bucket/x")
    assert "hf://tests" not in refused(tmp_path, f"{key}={tmp_path}/none")


def test_a_tokenizer_that_can_t_end_a_document_is_refused_by_the_plan(tmp_path: Path) -> None:
    (tmp_path / "tok.json").write_text(
        '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}'
    )
    assert "has no end-of-document token" in refused(
        tmp_path, f"data.tokenizer={tmp_path}/tok.json"
    )


def test_only_thousands_are_put_together(tmp_path: Path) -> None:
    assert "did you mean 1300" in refused(tmp_path, "train.steps='1 300'")
    assert "did you mean" not in refused(tmp_path, "train.steps='4 4'")


def test_a_file_s_name_begins_no_line_of_its_own() -> None:
    assert (
        str(InputError("is not JSON", where="a\nerror: b.jsonl:1"))
        == "a\\nerror: b.jsonl:1: is not JSON"
    )


@pytest.mark.parametrize("backend", ["ec2", "ssh"])
def test_what_a_backend_lacks_is_told_by_its_own_name(tmp_path: Path, backend: str) -> None:
    from trainfleet.backends import terms_of

    (tmp_path / "config.yaml").write_text("name: base\ndata: {sources: [stdlib]}\n")
    with pytest.raises(ConfigError, match=f"the {backend} backend needs a folder"):
        load(Settings(tmp_path / "config.yaml", f"fleet.backend={backend}"), terms_of)


def test_a_setting_that_is_no_number_is_told(tmp_path: Path) -> None:
    said = verbs.enter(tmp_path, "runs", code=1, variables={"TRAINFLEET_STARTED": "abc"})
    assert (
        "TRAINFLEET_STARTED is 'abc', not a number" in said
        and "next: unset TRAINFLEET_STARTED" in said
    )


@pytest.mark.parametrize(
    "number, remedy",
    [(errno.EFBIG, "ulimit -f"), (errno.EROFS, "read-only"), (errno.EACCES, "writable for")],
)
def test_each_cause_of_what_can_t_be_written_has_its_remedy(number: int, remedy: str) -> None:
    assert remedy in unwritable(Path("runs/x/lock"), OSError(number, os.strerror(number))).next


@pytest.mark.parametrize("verb", ["sample", "eval", "export OUT=m"])
def test_a_run_without_a_checkpoint_is_told_before_anything_is_loaded(
    tmp_path: Path, verb: str
) -> None:
    """Nothing of torch: the message comes from the control plane."""
    (tmp_path / "runs/base").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("name: base\ndata: {sources: [stdlib]}\n")
    (tmp_path / "runs/base/config.yaml").write_text(
        dump_resolved(load(Settings(tmp_path / "config.yaml"))[0])
    )
    said = verbs.enter(tmp_path, *verb.split(), code=1)
    assert "error: base: the run has no checkpoint yet" in said and not (tmp_path / "m").exists()


def test_the_next_command_is_about_the_config_that_was_typed(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a few words\n" * 100)
    (tmp_path / "other.yaml").write_text("name: other\ndata: {sources: [text]}\n")
    assert verbs.enter(tmp_path, "plan", "CONFIG=other.yaml").endswith(
        "\nnext: make train CONFIG=other.yaml\n"
    )
    (tmp_path / "other.yaml").rename(tmp_path / "config.yaml")
    assert verbs.enter(tmp_path, "plan").endswith("\nnext: make train\n")


def test_what_sizes_a_fleet_says_a_command_that_does(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: base\ndata: {sources: [stdlib]}\n")
    said = verbs.enter(tmp_path, "plan", "TOKENS=1e12", code=2)
    command = shlex.split(said.partition("next: make ")[2].partition("; ")[0])
    assert "answer: NODES=" in verbs.enter(tmp_path, *command)


def test_a_run_whose_results_are_no_file_is_listed_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "runs/odd/results.json").mkdir(parents=True)
    assert "unreadable: is a folder, not a file" in verbs.enter(tmp_path, "runs")


def test_curves_without_a_number_are_drawn_without_a_word_of_the_library_s(
    recwarn: pytest.WarningsRecorder,
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.01, 0.01), layout="constrained")
    figure.subplots().set_title("loss")
    assert plots.svg(figure, "loss").startswith("<svg") and not recwarn.list


@pytest.mark.parametrize("lost", ["config.yaml", "half a config.yaml", "checkpoints"])
def test_what_a_finished_run_has_lost_comes_back_or_is_told(tmp_path: Path, lost: str) -> None:
    """The next command that other verbs name, make train, has to help."""
    (tmp_path / "config.yaml").write_text(
        "name: base\ndata: {sources: [text]}\ntrain: {steps: 4, sequence_length: 16}\n"
    )
    verbs.write_text(tmp_path / "text")
    run = tmp_path / "runs/base"
    (run / "checkpoints/step-00000004").mkdir(parents=True)
    told = {
        "status": "finished",
        "steps": 4,
        "last_checkpoint": "runs/base/checkpoints/step-00000004",
    }
    (run / "results.json").write_text(json.dumps(told))
    if lost == "checkpoints":
        (run / "checkpoints/step-00000004").rmdir()
        assert "is finished, but its checkpoints are gone" in verbs.enter(tmp_path, "train", code=1)
        return
    if lost.startswith("half"):
        (run / "config.yaml").write_text("name: base\ntrain: [")
    else:
        assert "config.yaml is missing\n  next: make train" in verbs.enter(
            tmp_path, "checkpoints", code=1
        )
    assert "nothing to do" in verbs.enter(tmp_path, "train")
    assert "has no committed.json" in verbs.enter(tmp_path, "checkpoints", code=1)


def test_a_known_name_of_punctuation_only_is_no_word_to_suggest() -> None:
    """A dataset's columns may have any names."""
    assert nearest("zzz", ["_"]) is None and nearest("textt", ["---", "text"]) == "text"
