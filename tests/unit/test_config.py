"""The config: every mistake is found at once, at its place, with what would be right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from trainfleet.backends import terms_of
from trainfleet.config import Config, Settings, dump_resolved, load, load_resolved
from trainfleet.config.families import FAMILIES, PRESETS
from trainfleet.config.key import Key, schema_of
from trainfleet.config.reference import FOLDER, files
from trainfleet.config.schema import faults, load_schema, walk
from trainfleet.launch.command import placed
from trainfleet.recipes import Recipe, all_recipes
from trainfleet.trust.errors import ConfigError, DataError, NoSource

ROOT = Path(__file__).parents[2]


def load_text(tmp_path: Path, text: str, set: str = "", **short: tuple[str, str]) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load(Settings(path, set, short), terms_of)[0]


def messages(tmp_path: Path, text: str, set: str = "", **short: tuple[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, set, **short)
    assert caught.value.exit_code == 2
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_a_merge_key_is_told_what_to_write_instead(tmp_path: Path) -> None:
    told = messages(tmp_path, "name: a\ntrain: &a {steps: 3}\ncheckpoint:\n  <<: *a\n")
    assert told[0].endswith(
        "checkpoint.<<: unknown key; YAML merge keys are not supported; write out the keys"
    )


WRITTEN = json.loads((FOLDER / "config.schema.json").read_text())
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.0, 1.5, 3, 7, 1e-9, 1e30, 2**63, "", "a", "auto", "none", "local", "a" * 5000, "s3://bucket/x", "/fsx", "a\n", "1-2", "15 min", "tiny", "a/b", "h100",
    [], ["a"], ["a", "a"], [""], ["wandb", "wandb"], [None], [1], [{"path": "a"}], [{"path": 1, "x": 2}], [{"name": "a"}], {}, {"x": 1}, {"path": "a"}, {"shard": 0}, {"name": 3},
)  # fmt: skip


@pytest.mark.parametrize("name", files())
def test_what_schema_holds_is_what_the_dataclasses_make(name: str) -> None:
    assert (ROOT / "schema" / name).read_text() == files()[name], (
        "python -m trainfleet.config.reference writes it"
    )


def test_the_schema_is_valid_and_every_key_is_described() -> None:
    Draft202012Validator.check_schema(WRITTEN)
    for key, part in walk(WRITTEN):
        assert part.get("description"), key
        assert "default" in part or key == ("name",), key


def test_defaults_obey_the_schema() -> None:
    for key, part in walk(load_schema()):
        if "default" in part:
            Draft202012Validator(part).validate(part["default"]), key


def test_what_is_checked_is_the_schema_that_editors_read() -> None:
    def bare(part: Any) -> Any:
        return (
            {
                name: bare(inner)
                for name, inner in part.items()
                if name != "description" or isinstance(inner, dict)
            }
            if isinstance(part, dict)
            else part
        )

    checked = json.loads(json.dumps(load_schema()))  # whose examples are tuples
    del checked["properties"]["train"]["properties"]["compile_only"]  # only make compile sets it
    assert (
        bare({name: part for name, part in WRITTEN.items() if name not in ("$schema", "title")})
        == checked
    )


def test_a_check_finds_what_the_jsonschema_package_finds() -> None:
    """Every key with values of every kind: the same rules of the same keys are broken. Patterns differ by design (whole_pattern)."""

    def theirs(value: Any, part: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        for error in Draft202012Validator(part).iter_errors(value):
            yield tuple(error.absolute_path), error.validator

    for key, part in walk(load_schema()):
        for value in VALUES:
            ours = {fault[:2] for fault in faults(value, part)}
            assert ours - {((), "pattern")} == set(theirs(value, part)) - {((), "pattern")}, (
                key,
                value,
            )
            assert ours == set(theirs(value, part)) or str(value).endswith("\n"), (key, value)


def test_a_table_is_the_list_of_what_may_be_written() -> None:
    model = load_schema()["properties"]["model"]["properties"]
    assert model["preset"]["anyOf"][0]["enum"] == [*PRESETS, None] and model["family"]["enum"] == [
        *FAMILIES,
        None,
    ]


@dataclass(frozen=True, kw_only=True)
class Part:
    must: str
    plain: bool = False
    derived: Annotated[int, Key(default=None, minimum=1)]
    words: Annotated[tuple[str, ...], Key(items={"maxLength": 3}, backends=("ssh",))] = ("a",)
    either: Annotated[int | str | None, Key(enum={"a": 0, 1: 0})] = 1


def test_a_field_makes_its_part_of_the_schema() -> None:
    assert schema_of(Part) == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "must": {"type": "string"},
            "plain": {"type": "boolean", "default": False},
            "derived": {"type": ["integer", "null"], "minimum": 1, "default": None},
            "words": {
                "type": "array",
                "items": {"type": "string", "maxLength": 3},
                "backends": ["ssh"],
                "default": ["a"],
            },
            "either": {"type": ["integer", "string", "null"], "enum": ["a", 1, None], "default": 1},
        },
        "required": ["must"],
    }


def test_config_yaml_is_complete_and_points_editors_to_the_schema() -> None:
    text = (ROOT / "config.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema/config.schema.json\n")
    Draft202012Validator(load_schema()).validate(yaml.safe_load(text))
    load(Settings(ROOT / "config.yaml"))


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_every_recipe_points_editors_to_the_schema_and_readers_to_the_keys(recipe: Recipe) -> None:
    assert recipe.text.startswith("# yaml-language-server: $schema=schema/config.schema.json\n")
    assert "\n# All keys with their units and defaults: schema/README.md." in recipe.text


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """name: first
fleet:
  backnd: local
  nodes: 0
data:
  sources: []
train:
  learning_rate: abc
  seqlen: 4
  global_batch_size: 7
  sequence_length: 100000
model:
  heads: 7
steps: 4
"""
    assert messages(tmp_path, text) == [
        "config.yaml:3: fleet.backnd: unknown key; did you mean backend?",
        "config.yaml:4: fleet.nodes: must be at least 1 and at most 16384 nodes, not 0",
        "config.yaml:6: data.sources: must not be empty",
        'config.yaml:8: train.learning_rate: must be a number, not "abc"',
        "config.yaml:9: train.seqlen: unknown key; did you mean sequence_length? Number of tokens per sequence",
        "config.yaml:10: train.global_batch_size: 7 is not a multiple of the 2 data-parallel ranks; nearest valid values: 6, 8",
        "config.yaml:11: train.sequence_length: 100000 is more than model.max_position_embeddings 1024",
        "config.yaml:12: model.kv_heads: 2 does not divide model.heads 7",
        "config.yaml:13: model.heads: 7 does not divide model.hidden_size 128",
        "config.yaml:14: steps: unknown key; did you mean train.steps?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("4\n", "must contain keys with values"),
        ("name: [x\n", "not valid YAML"),
        ("name: a\nname: b\n", "config.yaml:2: name: duplicate key; it is already on line 1"),
        ("fleet: {}\n", "needs the key 'name'"),
        (
            "name: a\ntrain: {learning_rate: -1}\n",
            "train.learning_rate: must be at least 1e-12 and at most 1, not -1",
        ),
        ("name: a\ntrain: {steps: 1.5}\n", "train.steps: must be a whole number, not 1.5"),
        ("name: a\ntrain: {steps: true}\n", "train.steps: must be a whole number, not true"),
        ("name: a\nfleet: 3\n", "fleet: must be a group of keys, not 3"),
        (
            "name: a\nfleet: {backend: batch, instance_type: trn1.32xlarge}\n",
            "fleet.shared_folder: null: batch nodes have no shared disk",
        ),
        ("name: a\nfleet: {backend: slrum, instance_type: trn1.32xlarge}\n", "did you mean slurm?"),
        (
            "name: a\nfleet: {backend: ssh, instance_type: trn1.32xlage}\n",
            "did you mean trn1.32xlarge?",
        ),
        (
            "name: a\nfleet: {backend: ssh, instance_type: trn1.2xlarge}\n",
            "trn1.2xlarge has no EFA",
        ),
        (
            "name: a\ndata: {sources: [4]}\n",
            "data.sources[0]: must be text or a group of keys, not 4",
        ),
        (
            "name: a\nmodel: {vocab_size: 300}\n",
            "model.vocab_size: 300 is smaller than the tokenizer's 4096",
        ),
        (
            "name: a\nmodel: {preset: null}\n",
            "model.hidden_size: is required because model.preset is null",
        ),
        (
            "name: a\ntrain: {micro_batch_size: 3}\n",
            "train.micro_batch_size: 3 does not divide a rank's 8 sequences; nearest valid values: 1, 2, 4",
        ),
        ("name: a\ntrain: {parallelism: {tensor: 3}}\n", "= 3 does not divide the world size 2"),
        ("name: ../evil\n", "must be at most 63 lower-case letters"),
        ("name: a\ntrain: {lr: 1e-3}\n", "train.lr: unknown key; did you mean learning_rate?"),
        (
            "name: a\ntrain: {batch_size: 8}\n",
            "train.batch_size: unknown key; did you mean global_batch_size?",
        ),
        (
            "name: a\ndata: {tokenizer: no/such.json}\n",
            "data.tokenizer: no/such.json: can't be read as a tokenizer: No such file",
        ),
        ("name: a\ntrain: {callback: after.py}\n", "; its name must end in _callback.py"),
        (
            "name: a\nfleet: {ssh: {port: 22}}\n",
            "fleet.ssh.port: unknown key; did you mean fleet.hosts? Hosts of the ssh backend",
        ),
        (
            "name: a\nmodel: {preset: lama-8b}\n",
            "is neither one of the known names nor a path; did you mean llama-3-8b?",
        ),
        ("name: a\nmodel: {preset: zzzz}\n", "is neither one of tiny, small, llama-2-7b,"),
        ("apiVersion: v1\nkind: Pod\nspec: {}\n", "config.yaml:1: is not a trainfleet config"),
        ("Resources:\n  A: {Type: x}\n", "config.yaml:1: is not a trainfleet config"),
        ("resources: {num_nodes: 1}\n", "resources: unknown key; did you mean fleet?"),
    ],
)
def test_each_mistake_says_what_would_be_right(tmp_path: Path, text: str, message: str) -> None:
    assert any(message in found for found in messages(tmp_path, text)), messages(tmp_path, text)


def test_a_remedy_that_is_known_reaches_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = DataError("is gone", where="hf://a/b", why="no network.", next="run hf download a/b")

    def fail(_: object) -> None:
        raise lost

    monkeypatch.setattr(sys.modules["trainfleet.config.load"], "vocabulary_size_of", fail)
    (found,) = messages(tmp_path, "name: a\n")
    assert "hf://a/b: is gone: no network; run hf download a/b" in found
    monkeypatch.undo()
    words = {"CONFIG": str(tmp_path / "config.yaml")}
    assert placed(NoSource(lost, 0), words).next == "run hf download a/b"


def test_variables_are_named_as_the_place_of_their_mistakes(tmp_path: Path) -> None:
    found = messages(
        tmp_path, "name: a\n", "train.stps=4 nonsense", NODES=("fleet.nodes", "4; touch x")
    )
    assert found == [
        'NODES: fleet.nodes: must be a whole number, not "4; touch x"',
        "SET: 'nonsense' is not key=value, such as SET='train.steps=50 train.seed=2'",
        "SET: train.stps: unknown key; did you mean steps?",
    ]


@pytest.mark.parametrize("typed", ["train.steps =5 train.seed= 2", "train.steps=5, train.seed=2"])
def test_set_shows_how_its_keys_are_parted(tmp_path: Path, typed: str) -> None:
    assert messages(tmp_path, "name: a\n", typed) == [
        "SET: needs spaces between its keys only; did you mean SET='train.steps=5 train.seed=2'?"
    ]


def test_values_are_typed_as_people_mean_them(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        "name: on\ntrain: {learning_rate: 3e-4}\n",
        "train.steps=50 data.sources=[a,b]",
        NODES=("fleet.nodes", "1"),
    )
    assert config.name == "on"
    assert config.train.learning_rate == 3e-4
    assert (config.train.steps, config.data.sources, config.fleet.nodes) == (50, ("a", "b"), 1)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=word):
            load(Settings(path))
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(Settings(tmp_path / "latin.yaml"))


def test_a_resolved_config_reads_back_as_it_was(tmp_path: Path) -> None:
    config = load(Settings(ROOT / "config.yaml"))[0]
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert load_resolved(tmp_path / "resolved.yaml") == config
    assert (
        load(Settings(tmp_path / "resolved.yaml"))[0] == config
    )  # CONFIG=runs/<name>/config.yaml works too


def test_a_name_of_before_gets_one_line_with_its_new_one(tmp_path: Path) -> None:
    """Each row of the changelog's table, typed where it stood."""
    rows = re.findall(
        r"^\| `((?:fleet|data|model|train|checkpoint)\.\S+)` \| `(\S+)` \|$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.M,
    )
    assert len(rows) > 35
    for old, now in rows:
        if "layout" in old:  # the group is told of, not what is in it
            old, now = ".".join(old.split(".")[:2]), "parallelism"
        with pytest.raises(ConfigError) as caught:
            load_text(tmp_path, "name: a\n", f"{old}=1")
        told = [problem.message for problem in caught.value.problems if problem.key == old]
        assert len(told) == 1 and f"did you mean {now.rpartition('.')[2]}?" in told[0], (old, told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("min_lr: 3e-5, learning_rate: 3e-4", "min_lr_ratio? Final learning rate, as a fraction of train.learning_rate; 3e-05 / 0.0003 is 0.1"),
        ("min_lr: 0.1, learning_rate: 3e-4", "as a fraction of train.learning_rate"),
    ],
)  # fmt: skip
def test_a_foreign_name_of_another_unit_says_so(tmp_path: Path, words: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, f"name: a\ntrain: {{{words}}}\n")
    assert caught.value.problems[0].message.endswith(told)


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_the_micro_batch_divides_for_every_world(tmp_path: Path, nodes: int) -> None:
    config = load_text(tmp_path, "name: a\n", NODES=("fleet.nodes", str(nodes)))
    assert (
        config.train.global_batch_size % (config.train.micro_batch_size * config.data_parallel) == 0
    )


def test_editors_find_the_schema() -> None:
    first = (ROOT / "config.yaml").read_text().splitlines()[0]
    assert ROOT / first.partition("$schema=")[2] == FOLDER / "config.schema.json", (
        "yaml-language-server reads it from the first line"
    )


def test_loading_a_config_is_light() -> None:
    """The control plane answers in a fraction of a second: no torch, no tokenizers, no matplotlib."""
    code = (
        "import sys; from pathlib import Path; from trainfleet.config import Settings, load; load(Settings(Path('config.yaml')));"
        "heavy = {'torch', 'tokenizers', 'matplotlib', 'rich', 'boto3'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT / "python")}
    )


def test_a_whole_number_may_be_written_as_a_power_of_ten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: a\ntrain: {steps: 1e3, learning_rate: 1}\n")
    train = load(Settings(tmp_path / "config.yaml", "fleet.nodes=2e0"))[0].train
    assert (
        isinstance(train.steps, int)
        and train.steps == 1000
        and isinstance(train.learning_rate, float)
    )


def test_a_run_of_an_older_version_lacks_new_keys_and_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: a\n")
    config = load(Settings(tmp_path / "config.yaml"))[0]
    old = yaml.safe_load(dump_resolved(config))
    del old["train"]["param_dtype"], old["checkpoint"]["keep"]
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(old))
    assert load_resolved(tmp_path / "resolved.yaml") == config
    (tmp_path / "resolved.yaml").write_text("just text")
    with pytest.raises(ConfigError, match="is not a resolved config"):
        load_resolved(tmp_path / "resolved.yaml")
