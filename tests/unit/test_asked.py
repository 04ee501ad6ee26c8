"""A run keeps the config that was asked for, and what goes on from there derives all else anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainfleet.backends import terms_of
from trainfleet.cli.variables import typed
from trainfleet.config import Config, Settings, dump_asked, dump_resolved, load
from trainfleet.launch import training
from trainfleet.launch.command import config_of, plan_of, settings_of
from trainfleet.recipes import recipe_named
from trainfleet.report import history, panels, summary
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import ConfigError

MINE = "name: mine\ndata: {sources: [text]}\ntrain: {steps: 4, sequence_length: 32}\n"


def planned(path: Path, nodes: int, set: str = "") -> Config | str:
    """The config on so many nodes, or why it is refused."""
    try:
        return load(Settings(path, set, {"NODES": ("fleet.nodes", str(nodes))}), terms_of)[0]
    except ConfigError as error:
        return "\n".join(problem.message for problem in error.problems)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that was launched with SET and NODES, in a folder whose config.yaml asks for another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a few words\n" * 200)
    Path("config.yaml").write_text(MINE)
    plan = plan_of(*config_of(settings_of({"SET": "name=other train.seed=7", "NODES": "1"})))
    run = Run(Path("runs/other"))
    training.prepare(plan, run)
    return run


@pytest.mark.parametrize("nodes", [1, 16])
@pytest.mark.parametrize(
    "recipe", ["first-run", "ssh-4-nodes", "llama-3-8b-p5", "llama-2-7b-trn1-batch"]
)
def test_on_any_number_of_nodes_it_plans_as_the_user_s_own_file_would(
    recipe: str, nodes: int, tmp_path: Path
) -> None:
    path, asked = tmp_path / "recipe.yaml", tmp_path / "given.yaml"
    path.write_text(recipe_named(recipe).text)
    asked.write_text(dump_asked(*load(Settings(path))))
    assert load(Settings(asked))[0] == load(Settings(path))[0]
    assert planned(asked, nodes) == planned(path, nodes)


def test_a_larger_fleet_gets_the_layout_that_fits_it(tmp_path: Path) -> None:
    """The layout of four nodes once stood in given.yaml, and 16 were refused: 64 sequences do not divide over 128 ranks."""
    path, asked = tmp_path / "recipe.yaml", tmp_path / "given.yaml"
    path.write_text(recipe_named("llama-3-8b-p5").text)
    short = {"NODES": ("fleet.nodes", "4")}
    asked.write_text(
        dump_asked(
            *load(Settings(path, "train.global_batch_size=64 train.micro_batch_size=null", short))
        )
    )
    found = planned(asked, 16)
    assert isinstance(found, Config) and found.train.parallelism.tensor > 1, found
    assert "tensor" not in asked.read_text()


def test_what_a_verb_has_changed_is_asked_for_too(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINE)
    config, derivation = load(Settings(tmp_path / "c.yaml"))
    short = replace(config, name="mine-profile", train=replace(config.train, profile_steps="2-3"))
    (tmp_path / "given.yaml").write_text(dump_asked(short, derivation))
    assert (
        load(Settings(tmp_path / "given.yaml"))[0] == short
        and "micro_batch_size" not in (tmp_path / "given.yaml").read_text()
    )


def test_each_way_to_go_on_begins_with_what_was_asked_for(run: Run) -> None:
    assert settings_of({"RUN": "other"}).path == run.given
    assert typed({"RUN": "other"}) == " CONFIG=runs/other/given.yaml"
    assert "train CONFIG=runs/other/given.yaml" in str(summary.next_commands(history.read(run)))
    assert dict(panels.given(run)) == {
        "name": "other", "fleet.nodes": "1", "data.sources": "['text']", "train.steps": "4", "train.sequence_length": "32",
        "train.seed": "7",
    }  # fmt: skip


@pytest.mark.parametrize(
    "last", ["name: *i", "name: &z [*z]", "name: !!python/object/apply:os.system [x]"]
)
def test_a_received_config_that_expands_without_end_leaves_the_report(last: str, run: Run) -> None:
    lines = [
        "a: &a [x,x,x,x,x,x,x,x,x]",
        *(
            f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
    ]
    run.given.write_text("\n".join([*lines, last]))
    assert dict(panels.given(run)) == {}


def test_a_run_of_an_older_version_is_still_gone_on_with(run: Run) -> None:
    config = load(Settings(run.given))[0]
    run.given.write_text(dump_resolved(config))
    assert load(Settings(run.given))[0] == config
    run.given.unlink()
    assert (
        settings_of({"RUN": "other"}).path == run.config
        and typed({"RUN": "other"}) == " CONFIG=runs/other/config.yaml"
    )
