"""make plan DAYS, USD, TOKENS: any two give the third and the nodes; goodput follows from failures; auto's search is exhaustive."""

from __future__ import annotations

import random
import re
import shlex
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest
from goodput_simulation import simulate

from trainfleet.cli import main as command
from trainfleet.config import Config, Settings, load
from trainfleet.config.goodput import best_minutes, failures_of, foresee, rates, share
from trainfleet.config.layout_search import KEYS, candidates, ranked
from trainfleet.config.layouts import best
from trainfleet.hardware import node_types
from trainfleet.plan.estimate import Bill, estimate
from trainfleet.plan.sizing import Wish, answer, knee, sizes, surely
from trainfleet.recipes import FOLDER
from trainfleet.report.sizing_tables import describe_layouts
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import ConfigError

RECIPE = FOLDER / "llama-3-8b-p5.yaml"
PRICE = Bill(55.04)


def config(settings: str = "train.global_batch_size=2048") -> Config:
    return load(Settings(RECIPE, settings))[0]


def test_any_two_of_days_dollars_and_tokens_give_the_third_and_the_nodes() -> None:
    tokens = 1e12
    by_days = answer(
        sizes(config(), Wish(days=14, tokens=tokens), PRICE), Wish(days=14, tokens=tokens)
    )
    assert by_days.days <= 14 and by_days.usd and by_days.nodes > 1
    wish = Wish(usd=by_days.usd * 1.001, tokens=tokens)
    assert (
        answer(sizes(config(), wish, PRICE), wish).days <= by_days.days
    )  # the same dollars buy no less
    wish = Wish(days=by_days.days, usd=by_days.usd)
    assert answer(sizes(config(), wish, PRICE), wish).tokens == pytest.approx(tokens, rel=0.1)


@pytest.mark.thorough
def test_what_nothing_meets_is_refused_with_what_would() -> None:
    for wish, key in ((Wish(days=0.01, tokens=1e13), "DAYS"), (Wish(usd=10, tokens=1e13), "USD")):
        found = sizes(config(), wish, PRICE)
        with pytest.raises(ConfigError) as caught:
            answer(found, wish)
        message = str(caught.value)
        assert f"{key}=" in message and [problem.where for problem in caught.value.problems] == [
            key
        ]
        met = replace(wish, **{key.lower(): float(message.split(f"{key}=")[1].split()[0])})
        assert answer(found, met).nodes  # what is offered can be met
    with pytest.raises(ConfigError, match=r"no size meets both DAYS and USD: 2 days cost .* take"):
        wish = Wish(days=2, usd=260_000, tokens=1e12)
        answer(sizes(config(), wish, PRICE), wish)
    with pytest.raises(ConfigError, match="no list price"):
        sizes(config("fleet.instance_type=p5e.48xlarge"), Wish(usd=1, tokens=1e9), None)


def test_what_bounds_the_fleet_is_told_and_what_has_no_accelerator_is_refused() -> None:
    found = sizes(config("train.global_batch_size=64"), wish := Wish(days=1, tokens=1e13), PRICE)
    with pytest.raises(
        ConfigError,
        match=r"1 day: 64 nodes, the fastest .* more nodes need a larger train.global_batch_size",
    ):
        answer(found, wish)
    with pytest.raises(ConfigError, match=r"c7i.8xlarge has no accelerator"):
        sizes(
            replace(config(), fleet=replace(config().fleet, instance_type="c7i.8xlarge")),
            wish,
            PRICE,
        )


@pytest.mark.parametrize(
    ("name", "why"),
    [("p6e-gb200.36xlarge", "ARM"), ("trn3.48xlarge", "Trainium3"), ("p3.2xlarge", "no EFA")],
)
def test_a_type_that_is_left_out_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"not in the table of instance types: .*{why}"):
        config(f"fleet.instance_type={name}")


def test_a_plan_for_v100_says_which_number_format_it_uses() -> None:
    _, derived = load(Settings(FOLDER / "roberta-large-p3dn-ec2.yaml", "train.precision=auto"))
    (row,) = (row for row in derived if row.key == "train.precision")
    assert (
        row.value == "fp16"
        and "V100-32GB has no bf16 instructions" in row.why
        and "125 TFLOP/s" in row.why
    )


def test_the_verb_shows_table_and_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    words = ["plan", f"CONFIG={RECIPE}", "TOKENS=1e11", "DAYS=7"]
    assert command([*words, f"OUT={out}"]) == 2
    assert "OUT: saves the plan of one fleet, not a comparison" in capsys.readouterr().err
    assert command(words) == 0
    said = capsys.readouterr().out
    assert (
        "answer: NODES=" in said
        and "tokens per parameter" in said
        and "goodput" in said
        and "\n  * " in said
    )
    for _ in range(2):  # the second time, the folder is an earlier plan's
        assert command(["plan", f"CONFIG={RECIPE}", f"OUT={out}"]) == 0
    said = capsys.readouterr().out
    assert "layouts, fastest first" in said and said.count("  *  ") == 2
    for word in ("nan", "-1", "1e99", "0", "1;ls", "٣"):
        assert command(["plan", f"CONFIG={RECIPE}", f"DAYS={word}"]) == 2
        assert "must be a number above 0" in capsys.readouterr().err
    assert command(["plan", f"CONFIG={RECIPE}", "DAYS=soon", "USD=7", "TOKENS=0"]) == 2
    assert [
        line.split(":")[-2].split()[-1] for line in capsys.readouterr().err.splitlines()[:2]
    ] == ["DAYS", "TOKENS"]


def test_the_best_layouts_are_the_fastest_of_all_that_fit() -> None:
    found, device = best(config(), 5), node_types.INSTANCE_TYPES["p5.48xlarge"].accelerator
    assert (
        device
        and len(found) == 5
        and [choice.seconds for choice in found] == sorted(choice.seconds for choice in found)
    )
    every = ranked(config(), set(KEYS), device)
    assert found[0] is not None and min(choice.seconds for choice in every) == found[0].seconds
    tried = {
        layout.train.parallelism
        for layout in candidates(
            config("fleet.nodes=48 train.global_batch_size=128"), set(KEYS), device
        )
    }
    assert {layout.pipeline * layout.tensor * layout.context % 3 for layout in tried} == {
        0
    }  # 384 = 3 x 128


@pytest.mark.parametrize(
    "settings",
    [
        "train.parallelism.virtual_stages=2 train.parallelism.pipeline=4",
        "train.parallelism.context=8",
    ],
)
def test_the_table_marks_the_config_s_own_layout_however_slow(settings: str) -> None:
    own = config(settings)
    found = best(own, 5)
    assert len(found) == 5 and [choice.config for choice in found].count(own) == 1
    rows = [line for line in describe_layouts(own, found, None) if line.startswith("  *  ")]
    assert len(rows) == 1


def test_goodput_is_what_a_run_with_random_failures_keeps() -> None:
    draw, between, interval, stall, restart = random.Random(1), 9000.0, 600.0, 5.0, 90.0
    clock = useful = 0.0
    failure = draw.expovariate(1 / between)
    while clock < 3e7:
        if clock + interval + stall < failure:
            clock, useful = clock + interval + stall, useful + interval
        else:
            clock = failure + restart
            failure = clock + draw.expovariate(1 / between)
    assert share(between, interval, stall, restart) == pytest.approx(useful / clock, abs=0.005)


def test_the_interval_that_auto_takes_loses_least() -> None:
    between, stall = 3600 / (failures_of("H100-80GB")[0] * 16384), 6.0
    taken = best_minutes(between, stall)
    shares = {minutes: share(between, minutes * 60, stall, 90) for minutes in range(1, 61)}
    assert shares[taken] > max(shares.values()) - 1e-3
    auto, derived = load(Settings(RECIPE, "checkpoint.every=auto"))
    assert (
        auto.checkpoint.every.endswith(" min") if isinstance(auto.checkpoint.every, str) else False
    )
    assert any(row.key == "checkpoint.every" and "every" in row.why for row in derived)


def test_a_fleet_that_fails_as_that_of_llama_3_did_keeps_more_than_nine_tenths() -> None:
    """419 interruptions in 54 days of 16,384 H100, and over 90 % of useful time (arXiv:2407.21783, 3.3.4)."""
    large = config(
        "fleet.nodes=2048 train.global_batch_size=2048 model.preset=llama-3-70b checkpoint.every=auto"
    )
    found = foresee(large, 30.0)
    assert 54 * 24 * 3600 / found.between_failures == pytest.approx(419, rel=0.02)
    assert 0.90 < found.share < 0.99


def test_failures_are_those_published_for_the_device_or_of_all_others() -> None:
    assert all(2020 < row.year < 2027 and len(row.source) > 10 for row in rates())
    h100, a100, other = (failures_of(name) for name in ("H100-80GB", "A100-40GB", "NeuronCore-v2"))
    assert h100[0] == pytest.approx(419 / (16384 * 54 * 24)) and "Llama 3" in h100[1]
    assert (
        a100[0] == pytest.approx(6.5 / (1000 * 24 * 8)) and "5 published rates of A100" in a100[1]
    )
    assert h100[0] < other[0] < a100[0] and "this one has none" in other[1]
    fleet = config("fleet.instance_type=p4d.24xlarge fleet.nodes=128")
    assert foresee(fleet, 30.0).between_failures == pytest.approx(3600 / (a100[0] * 1024))


def test_goodput_is_what_the_real_watch_keeps_of_days_on_a_clock_that_is_not_waited_for(
    tmp_path: Path,
) -> None:
    fleet = config(
        "fleet.nodes=2048 train.global_batch_size=16384 model.preset=llama-3-70b checkpoint.every=auto fleet.backend=slurm"
    )
    found, expected = simulate(fleet, 30.0, 1.0, Run(tmp_path)), foresee(fleet, 30.0)
    assert found.restarts > 3 and found.commands == 1
    assert found.share == pytest.approx(found.known, abs=1e-3) and found.share == pytest.approx(
        expected.share, abs=0.02
    )


def test_tokens_alone_ask_about_the_fleet_and_the_table_marks_the_knee() -> None:
    found = sizes(config(), wish := Wish(tokens=1e12), PRICE)
    assert answer(found, wish, 8).nodes == 8
    least, best_knee = min(size.each for size in found), knee(found)
    assert best_knee.each <= 1.1 * least
    assert all(size.each > 1.1 * least for size in found if size.nodes > best_knee.nodes)
    assert answer(found, wish, 7) is best_knee  # 2,048 sequences do not divide over 7 nodes


def test_dollars_alone_buy_the_most_tokens() -> None:
    found = sizes(config(), wish := Wish(usd=100_000), PRICE)
    chosen = answer(found, wish, 8)
    assert chosen.tokens == max(size.tokens for size in found) and chosen.usd == pytest.approx(
        100_000
    )


def test_a_date_is_met_with_a_margin_for_what_one_run_of_ten_takes_longer() -> None:
    found = sizes(config(), wish := Wish(days=14, tokens=1e12), PRICE)
    even, sure = answer(found, wish), surely(found, wish)
    assert sure and even.days <= 14 < even.days * exp(even.spread)
    assert sure.days * exp(sure.spread) <= 14
    assert surely(found, Wish(days=found[-1].days, tokens=1e12)) is None


def test_a_user_reads_the_answer_for_the_fleet_the_knee_and_the_confidence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["plan", f"CONFIG={RECIPE}", "TOKENS=1e12"]) == 0
    said = capsys.readouterr().out
    assert (
        re.search("answer: NODES=8: 1e\\+12 tokens in [0-9]+-[0-9]+ days for about", said)
        and "the knee is NODES=" in said
        and "\n  k " in said
    )
    assert command(["plan", f"CONFIG={RECIPE}", "TOKENS=1e12", "DAYS=14"]) == 0
    assert "finishes in time with 50 % confidence; with 90 %: NODES=" in capsys.readouterr().out


def test_a_date_alone_has_a_margin_and_the_next_command_repeats_the_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"CONFIG={RECIPE}", "SET=train.steps=90000 train.seed=3", "NODES=4"]
    assert command(["plan", *words, "DAYS=14"]) == 0
    said = capsys.readouterr().out
    assert "        finishes in time with 90 % confidence\n" in said
    then = f"CONFIG={RECIPE} SET='train.seed=3 train.steps=90000'"
    assert re.search(rf"next: make plan {then} NODES=[0-9]+\n$", said)
    typed = f"CONFIG={RECIPE} SET='train.steps=90000 train.seed=3'"
    assert command(["plan", *words]) == 0
    assert capsys.readouterr().out.endswith(f"then run make setup {typed} NODES=4\n")


def test_the_next_command_plans_what_the_answer_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokens, within a budget that suffices, also if the words set other steps."""
    words = ["SET=train.seed=3 train.steps=700 budget.max_usd=900", "TOKENS=1e11", "DAYS=2"]
    assert command(["plan", f"CONFIG={RECIPE}", *words]) == 0
    said = capsys.readouterr().out
    usd = re.search(r"answer: .* for about \$([0-9,]+)", said)
    then = shlex.split(said.rpartition("next: make ")[2])
    steps = round(1e11 / config("").step_tokens)
    assert usd and then[2].startswith(f"SET=train.seed=3 train.steps={steps} budget.max_usd="), then
    assert float(then[2].rpartition("=")[2]) > float(usd[1].replace(",", "")) > 900
    assert command(then) == 0, capsys.readouterr().err
    assert f": {steps:,} steps on" in capsys.readouterr().out


def test_every_plan_tells_what_failures_and_checkpoints_take_and_judges_the_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Time and dollars are those of the clock, not of steps alone; what results are compared with stays the steps' own."""
    large = "fleet.nodes=512 train.global_batch_size=4096 train.steps=100000 budget.max_usd=null"
    rare, often = (config(f'{large} checkpoint.every="{every} min"') for every in (180, 3))
    needs, better = (estimate(each, PRICE) for each in (rare, often))
    assert needs.goodput and needs.seconds and needs.elapsed and needs.usd and better.usd
    assert needs.elapsed == pytest.approx(needs.seconds / needs.goodput.share)
    assert needs.usd == pytest.approx(PRICE.whole(512, needs.elapsed / 3600))
    assert better.usd < 0.97 * needs.usd
    tokens = 4096 * 8192 * 100000
    assert needs.predicted(tokens)["tokens_per_second"] == pytest.approx(tokens / needs.seconds)
    said = {}
    for every in (180, 3):
        words = f"SET={large} checkpoint.every='{every} min'"
        assert command(["plan", f"CONFIG={RECIPE}", words]) == 0
        said[every] = " ".join(capsys.readouterr().out.split())
    assert re.search(r"8[0-9.]+% of it is training; about [0-9.]+ failures", said[180])
    assert "(H100: Llama 3, arXiv:2407.21783, section 3.3)" in said[180]
    assert "waiting in a queue or for machines is not included" in said[180]
    assert re.search(r"checkpoint.every: [0-9]+ min would raise the share by [0-9.]+%", said[180])
    assert "raise the share" not in said[3]
