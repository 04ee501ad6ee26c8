"""What a newcomer types and writes wrongly is told as what it is: the line that is wrong, the path that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfleet.cli.variables import read_variables
from trainfleet.config import Settings, exports, load
from trainfleet.config.positions import read
from trainfleet.errors import ConfigError, InputError, RunError
from trainfleet.report.proposal import require_own


@pytest.mark.parametrize(
    "text, line, why",
    [("a:\n  steps 3\n  b: 8\n", 2, "has no `: `"), ("a:\n  steps:3\n\n  # so\n  b: 8\n", 5, "indented unlike"),
     ("a:\n  steps:3\n  b: 8\n", 2, "has no `: `"), ("a:\n  steps:\u00a03\n  b: 8\n", 2, "the character U+00A0"),
     ("a:\n  b\uff1a 3\n  c: 8\n", 2, "the character U+FF1A"), ("a:\n  b: 1\n    c: 2\n", 3, "indented deeper than line 2"),
     ("a: b: c\n", 1, "has a second `: `"), ("a: 'x': y\n", 1, "has a second `: `"), ("k" * 2000 + ": 1\n", 1, "more than 1,024")],
)  # fmt: skip
def test_yaml_is_blamed_on_the_line_that_is_wrong(text: str, line: int, why: str) -> None:
    (problem,) = read(text, "f").problems
    assert problem.line == line and why in problem.message


@pytest.mark.parametrize("value", ["a\nb", "\u202ex", "-rf", "~nobody-here/x", "$HOME/x", "\x1b[2J"])
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
    with pytest.raises(RunError, match=r"can't be made|is there already"):
        exports.require_new(Path(out))
    require_own(Path("new/plan"))
    exports.require_new(Path("runs/x/model"))


def refused(folder: Path, set: str) -> str:
    (folder / "config.yaml").write_text("name: base\ndata: {sources: [stdlib]}\n")
    with pytest.raises(ConfigError) as caught:
        load(Settings(folder / "config.yaml", set))
    return str(caught.value)


@pytest.mark.parametrize("key", ["model.preset", "data.tokenizer"])
def test_a_name_or_page_of_the_hub_leads_to_its_address(tmp_path: Path, key: str) -> None:
    for address in ("https://huggingface.co/meta-llama/Llama-2-7b/tree/main", "meta-llama/Llama-2-7b"):
        assert "did you mean hf://meta-llama/Llama-2-7b?" in refused(tmp_path, f"{key}={address}")
    assert "s3:// is nothing that models are read from" in refused(tmp_path, f"{key}=s3://bucket/x")
    assert "hf://tests" not in refused(tmp_path, f"{key}={tmp_path}/none")


def test_a_tokenizer_that_can_t_end_a_document_is_refused_by_the_plan(tmp_path: Path) -> None:
    (tmp_path / "tok.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}')
    assert "has no end-of-document token" in refused(tmp_path, f"data.tokenizer={tmp_path}/tok.json")


def test_only_thousands_are_put_together(tmp_path: Path) -> None:
    assert "did you mean 1300" in refused(tmp_path, "train.steps='1 300'")
    assert "did you mean" not in refused(tmp_path, "train.steps='4 4'")


def test_a_file_s_name_begins_no_line_of_its_own() -> None:
    assert str(InputError("is no JSON", where="a\nerror: b.jsonl:1")) == "a\\nerror: b.jsonl:1: is no JSON"


@pytest.mark.parametrize("backend", ["ec2", "ssh"])
def test_what_a_backend_lacks_is_told_by_its_own_name(tmp_path: Path, backend: str) -> None:
    from trainfleet.backends import terms_of

    (tmp_path / "config.yaml").write_text("name: base\ndata: {sources: [stdlib]}\n")
    with pytest.raises(ConfigError, match=f"the {backend} backend needs a folder"):
        load(Settings(tmp_path / "config.yaml", f"fleet.backend={backend}"), terms_of)
