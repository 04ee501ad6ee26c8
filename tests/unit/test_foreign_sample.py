"""What was written elsewhere: a sample of the bad inputs of tests/foreign (all of them: make drills), and each audit's find by name."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreign import commands, configs, documents, folders, models, spelling
from foreign.cases import Case, judge_all
from foreign.configs import written
from trainfleet.cli import main
from trainfleet.config import Settings, dump_resolved, load_name, load_resolved
from trainfleet.config.schema import VALUE_SYNONYMS, load_schema, synonyms, walk, whole_pattern
from trainfleet.config.tables import read_table
from trainfleet.config.yaml_lines import read
from trainfleet.launch.command import config_of
from trainfleet.recipes import all_recipes
from trainfleet.run.run_folder import Run, is_locked
from trainfleet.trust import untrusted_input
from trainfleet.trust.errors import ConfigError, InputError, TrainfleetError
from trainfleet.trust.validation import fit

ROOT = Path(__file__).parents[2]


def sampled(cases: Iterable[Case], count: int) -> list[Case]:
    found = list(cases)
    return random.Random(11).sample(found, min(count, len(found)))


@pytest.mark.parametrize(
    ("cases", "count"),
    [
        (configs.values, 26), (configs.texts, 13), (configs.duplicates, 13), (configs.contradictions, 16), (configs.sources, 3), (lambda: configs.drawn(7, 40), 8), (commands.sets, 13), (commands.variables, 16),
        (commands.config_files, 8), (models.shapes, 16), (models.tokenizers, 16), (lambda: models.encoders(7, 60), 8), (folders.configs, 4), (folders.files, 4), (folders.values, 6), (folders.manifests, 13), (folders.summaries, 8),
        (documents.records, 10), (documents.tables, 5), (documents.bombs, 3), (documents.tars, 3), (lambda: documents.drawn(7, 60), 13),
    ],
)  # fmt: skip
def test_a_bad_input_is_refused_at_once_with_its_place(
    cases: Callable[[], Iterable[Case]], count: int, tmp_path: Path
) -> None:
    assert judge_all(sampled(cases(), count), tmp_path / "cases") == []


@pytest.mark.parametrize(
    ("meant", "least"),
    [(lambda: spelling.slips(3), 0.95), (spelling.cases, 1.0), (spelling.synonyms, 1.0)],
)
def test_the_key_that_was_meant_is_named(
    meant: Callable[[], Iterable[spelling.Meant]], least: float, tmp_path: Path
) -> None:
    some = random.Random(5).sample(list(meant()), 40)
    count, wrong = spelling.missed(iter(some), tmp_path)
    assert len(wrong) <= (1 - least) * count, "\n".join(wrong)


def test_the_words_of_others_are_understood(tmp_path: Path) -> None:
    count, wrong = spelling.missed_others(tmp_path)
    assert count >= 200 and len(wrong) <= 0.05 * count, "\n".join(wrong)


def test_a_pattern_of_the_schema_is_of_whole_texts_and_may_have_a_dollar_among_its_letters() -> (
    None
):
    for rule, good, wrong in (
        ("^[a-z]+$", "ab", "ab\n"),
        ("^[a$]+$", "a$", "a\n"),
        (r"^a\$$", "a$", "a"),
        ("^(x|y$)", "y", "y\n"),
    ):
        pattern = whole_pattern(rule)
        assert re.search(pattern, good) and not re.search(pattern, wrong), rule
    for _, part in walk(load_schema()):
        if "pattern" in part:
            re.compile(whole_pattern(part["pattern"]))


def test_every_synonym_is_of_a_key_and_none_is_a_key() -> None:
    keys = {key for key, _ in walk(load_schema())}
    assert {path for paths in synonyms().values() for path in paths} <= keys
    assert sum(map(len, synonyms().values())) >= 100


def test_every_value_of_another_trainer_is_of_a_key_and_its_value_is_suggested(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.yaml"
    for key, values in read_table(VALUE_SYNONYMS).items():
        for meant, words in values.items():
            for word in words:
                file.write_text(written(tuple(key.split(".")), json.dumps(word)))
                with pytest.raises(ConfigError, match=f"did you mean {meant}\\?"):
                    config_of(Settings(file))


def test_good_configs_stay_good(tmp_path: Path) -> None:
    for recipe in all_recipes():
        (tmp_path / "config.yaml").write_text(recipe.text)
        config, _ = config_of(Settings(tmp_path / "config.yaml"))
        (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
        assert load_resolved(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    "text",
    [
        "fleet: {hosts: ['gpu-[01-08].example', 'spare=10.0.0.9', 'a:2222', 'u@b', '[::1]:22', 'x=u@c.d-e.f:22']}", "data: {sources: [books, ../other/*.txt, s3://my-bucket/a/b, hf://owner/name:train]}",
        "data: {sources: [{path: a, weight: 2}, {path: b, weight: 1}], tokenized_path: s3://my.bucket-1/a}", "checkpoint: {path: /fsx/check points, every: 15 min}", "checkpoint: {every: 1.0e2}", "train: {steps: +5, learning_rate: 3e-4, activation_memory_budget: 0.5, compile: true}", "model: {preset: null, family: llama, layers: 1, hidden_size: 8, heads: 2, kv_heads: 1, intermediate_size: 8, max_position_embeddings: 256}",
        "x: &x {steps: 7}\ntrain: *x", "train: !!map {steps: !!int 5, learning_rate: !!float 0.1, optimizer: !!str adamw}", "fleet: {shared_folder: /fsx/train-fleet_1.0/a@b}", "train: {parallelism: auto}", "budget: {max_usd: 1e3}",
        "model: {family: bert}", "model: {preset: llama-3-8b, family: llama, layers: 2}", "train: {weight_decay: 0.0, min_lr_ratio: 0e-999, epsilon: 1.0e-30, gradient_clip: 1e-9}",
    ],
)  # fmt: skip
def test_what_is_unusual_and_right_is_taken(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"\ufeffname: a\n{text}\n")
    if text.startswith(
        "x:"
    ):  # an anchor needs a place; the key that holds it is still one too many
        with pytest.raises(ConfigError) as caught:
            config_of(Settings(tmp_path / "config.yaml"))
        assert [problem.key for problem in caught.value.problems] == ["x"]
    else:
        config_of(Settings(tmp_path / "config.yaml"))


@pytest.mark.parametrize("word", ["nmae=x", "nam.e=x", "NAME=x", "name=", "x"])
@pytest.mark.parametrize("verb", ["stop", "status", "logs", "report", "clean", "checkpoints"])
def test_a_look_with_a_wrong_set_is_at_no_other_run(
    verb: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("name: a\ntrain: {steps: x}\n")
    assert load_name(Settings(Path("config.yaml"))) == "a", (
        "the file's own mistakes keep nobody from looking"
    )
    assert main([verb, f"SET={word}"]) == 2
    assert "SET" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_what_a_run_says_of_itself_is_refused_with_file_line_and_key(tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    run.folder.mkdir()
    run.results.write_text('{\n  "name": "r",\n  "status": "<b>"\n}\n')
    with pytest.raises(
        InputError,
        match=r"results\.json: status: must be one of running, finished, failed, stopped, not",
    ):
        run.read_results()
    run.metrics.write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo\n{"step": "3"}\n')
    with pytest.raises(
        InputError, match=r'metrics\.jsonl:3: step: must be a whole number, 0 or more, not "3"'
    ):
        list(run.read_metrics())
    run.metrics.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "lo\n')
    assert [line["step"] for line in run.read_metrics()] == [1], (
        "half a line is what a crash leaves"
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": 1, "a": 2}',
        "[" * 5000,
        '{"a": ' + "9" * 5000 + "}",
        '"\\ud800"',
        "[" * 40 + "]" * 40,
        "{",
        "",
    ],
)
def test_json_is_strict(text: str) -> None:
    with pytest.raises(InputError) as caught:
        untrusted_input.parse_json(text, "f.json")
    assert caught.value.where.startswith("f.json:")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 101)
    (tmp_path / "latin").write_bytes(b"a\nb\xe9")
    for name, words in (
        ("pipe", "is a pipe"),
        (".", "is a folder"),
        ("large", "is larger than"),
        ("latin", "not UTF-8"),
        ("large/x", "can't be read"),
        ("x" * 300, "can't be read"),
    ):
        with pytest.raises(InputError, match=words):
            untrusted_input.read_text(tmp_path / name, 100)
    with pytest.raises(InputError, match="is a device"):
        untrusted_input.read_text(Path("/dev/zero"), 100)
    with pytest.raises(FileNotFoundError):
        untrusted_input.read_text(tmp_path / "none", 100)


def test_a_lock_or_a_config_that_is_a_pipe_keeps_nobody_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lock", "config.yaml"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="is a pipe"):
        is_locked(tmp_path)
    assert main(["config", "RECIPE=first-run", f"CONFIG={tmp_path / 'config.yaml'}", "YES=1"]) == 2
    assert "is a pipe, not a file" in capsys.readouterr().err


def test_a_config_of_other_bytes_is_not_written_over_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes("name: é\n".encode("latin-1"))
    assert main(["config", "RECIPE=first-run", f"CONFIG={tmp_path / 'config.yaml'}"]) == 1
    assert "would be lost" in capsys.readouterr().err


def test_a_type_is_checked_all_the_way_down() -> None:
    assert fit(dict[str, tuple[int, ...] | None], {"a": [1, 2], "b": None}) == {
        "a": (1, 2),
        "b": None,
    }
    for kind, value, key in (
        (int, True, ""),
        (int, 1.0, ""),
        (float, float("nan"), ""),
        (dict[str, list[int]], {"a": [1, "x"]}, "a[1]"),
        (tuple[int, int], [1], ""),
        (str | None, 3, ""),
    ):
        with pytest.raises(InputError) as caught:
            fit(kind, value)
        assert caught.value.key == key


FUZZ = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
    database=None,
)
YAMLISH = st.text(
    st.sampled_from("ab:-[]{}&*!|>'\"%@`#?,\n\t 0159.eE~<=\\\x00\x1b\u2028\ud800é"), max_size=120
)


@FUZZ
@given(st.one_of(YAMLISH, st.binary(max_size=80).map(lambda raw: raw.decode("latin-1"))))
def test_any_text_is_a_document_or_a_problem(text: str) -> None:
    document = read(text, "c.yaml")
    assert document.problems or untrusted_input.show(document.value)


@FUZZ
@given(text=YAMLISH)
def test_any_set_is_taken_or_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: a\n")
    try:
        config_of(Settings(tmp_path / "config.yaml", text))
    except ConfigError as error:
        assert all(problem.where == "SET" for problem in error.problems)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_subnormal=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        "step",
        "status",
        "seconds",
        "model",
        "started",
        "time",
        "event",
        "layout",
        "sample",
        "nodes",
        "loss",
        "tokens",
        "traceback",
    ]
)


@FUZZ
@given(record=st.dictionaries(KEYS, JSON, max_size=6))
def test_any_record_is_read_or_refused(record: dict[str, object], tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    run.events.mkdir(parents=True, exist_ok=True)
    for path in (run.results, run.metrics, run.events / "node-0-1.jsonl"):
        path.write_text(json.dumps(record) + "\n")
    for look in (run.read_results, lambda: list(run.read_metrics()), run.read_events):
        try:
            look()
        except TrainfleetError as error:
            assert "r/" in str(error)
