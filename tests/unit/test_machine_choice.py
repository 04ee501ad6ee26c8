"""make plan TOKENS= ANY=1: all machines side by side, the cheapest that is in time, and the reason for each that is absent."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from math import exp

import pytest

from trainfleet.cli import main as command
from trainfleet.config import Config, Settings, load
from trainfleet.hardware import node_types
from trainfleet.hardware.node_types import INSTANCE_TYPES, Tariff
from trainfleet.plan.sizing import SURE, Bid, Wish, best, bids, chance, knee, size_of, sizes
from trainfleet.recipes import FOLDER
from trainfleet.trust.errors import ConfigError

RECIPE = FOLDER / "llama-3-8b-p5.yaml"
KINDS = ("p5.48xlarge", "p5e.48xlarge", "g5.48xlarge", "trn2u.48xlarge", "trn1.2xlarge")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five types instead of all, because each is searched."""
    monkeypatch.setattr(
        node_types, "INSTANCE_TYPES", {kind: INSTANCE_TYPES[kind] for kind in KINDS}
    )


def config(settings: str = "") -> Config:
    return load(Settings(RECIPE, f"train.global_batch_size=2048 {settings}"))[0]


def test_every_type_has_a_price_with_source_and_date_or_none_is_known() -> None:
    """Of trn2u, neither EC2's on-demand list nor its capacity block rates have a price (2026-11)."""
    unknown = [name for name, row in INSTANCE_TYPES.items() if not row.tariffs]
    assert unknown == ["trn2u.48xlarge"]
    for row in INSTANCE_TYPES.values():
        for tariff in row.tariffs:
            assert re.search("20[0-9]{2}-[01][0-9]-[0-3][0-9]$", tariff.source), row.name
            assert tariff.usd_per_hour > 0 and tariff.terms in row.sold, row.name


def test_a_bid_is_what_the_sizes_of_its_type_and_price_are() -> None:
    wish = Wish(tokens=1e12)
    (on_demand, block), every = bids(config(), wish), sizes(config(), wish, None)
    assert (on_demand.tariff.terms, block.tariff.terms) == ("on-demand", "block")
    assert on_demand.size.nodes <= knee(every).nodes
    (known,) = (size for size in every if size.nodes == on_demand.size.nodes)
    assert on_demand.size.days == known.days
    hours = on_demand.size.nodes * on_demand.size.days * 24
    assert on_demand.size.usd == pytest.approx(hours * on_demand.tariff.usd_per_hour)
    assert block.size.nodes <= node_types.BLOCK_NODES
    # with DAYS, the smallest fleet that is nearly always in time
    (bid, _) = bids(config(), Wish(14.0, tokens=1e12))
    (half,) = (size for size in every if size.nodes == bid.size.nodes // 2)
    assert bid.chance and bid.chance >= SURE > (chance(half, 14.0) or 0.0)
    # at the end of the spread, one of ten runs is late
    assert chance(bid.size, bid.size.days * exp(bid.size.spread)) == pytest.approx(0.9)
    assert chance(bid.size, bid.size.days) == pytest.approx(0.5)


def test_the_cheapest_that_is_in_time_is_chosen() -> None:
    device = config().fleet.rank_device
    assert device
    size = size_of(config(), 8, Wish(tokens=1e12), None, device)
    assert size

    def bid(name: str, usd: float, likely: float | None) -> Bid:
        return Bid(name, Tariff("on-demand", 1, ""), replace(size, usd=usd), likely, True)

    found = [bid("late", 1, 0.5), bid("dear", 3, 0.99), bid("right", 2, 0.95)]
    assert best(found).name == "right"
    assert best([*found[:1], bid("later", 0.5, 0.1)]).name == "late"
    assert best([bid("b", 2, None), bid("a", 1, None)]).name == "a"


def test_limits_and_unknown_prices_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"costs at least \$[0-9,]+"):
        bids(config(), Wish(usd=1000, tokens=1e12))
    with pytest.raises(ConfigError, match="no price: it is not in EC2's on-demand list"):
        bids(config("fleet.instance_type=trn2u.48xlarge"), Wish(tokens=1e12))
    small = load(Settings(RECIPE, "fleet.instance_type=g5.48xlarge fleet.nodes=64"))[0]
    with pytest.raises(ConfigError, match="no tried number of nodes holds the model"):
        bids(small, Wish(1e-3, tokens=1e12))  # 512 sequences do not divide over 65,536 ranks


@pytest.mark.usefixtures("few")
def test_a_user_reads_which_machine_why_not_the_others_and_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"CONFIG={RECIPE}", "SET=train.seed=3", "TOKENS=1e12", "DAYS=14", "ANY=1"]
    assert command(["plan", *words]) == 0
    said = capsys.readouterr().out
    rows = re.findall(
        r"^ +\*?~? +(p5e?|g5).48xlarge +[0-9]+ +(on-demand|block) .* ([0-9.]+) %", said, re.M
    )
    assert [row[:2] for row in rows] == [("p5e", "block"), ("p5", "block"), ("p5", "on-demand")]
    each = [
        float(usd.replace(",", ""))
        for usd in re.findall(r"\$([0-9,]+)  [0-9]+ data-parallel", said)
    ]
    assert each == sorted(each) and len(each) == 3
    assert "too slow for DAYS: g5.48xlarge" in said
    assert "trn2u.48xlarge: no price" in said
    assert re.search("trn1.2xlarge: .*no EFA", said)
    assert "on-demand list price in us-east-1, 2026-11-22" in " ".join(said.split())
    nodes = re.search(r"answer: ([0-9]+) x p5e.48xlarge in a capacity block", said)
    assert nodes and re.search("has a 9[0-9]% chance of meeting DAYS=14", said)
    steps = round(1e12 / load(Settings(RECIPE))[0].step_tokens)
    changes = f"fleet.instance_type=p5e.48xlarge train.steps={steps}"
    then = f"CONFIG={RECIPE} SET='train.seed=3 {changes}' NODES={nodes[1]}"
    assert said.endswith(f"next: make plan {then}\n")
    assert command(["plan", *shlex.split(then)]) == 0


@pytest.mark.usefixtures("few")
def test_own_machines_are_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    own = (
        "SET=fleet.instance_type=null fleet.accelerator.name=h100 fleet.accelerator.usd_per_hour=20"
    )
    assert command(["plan", f"CONFIG={RECIPE}", own, "TOKENS=1e12", "ANY=1"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\n  \* +8 x H100-80GB +[0-9]+ +own ", said)
    assert "fleet.instance_type=" not in said.split("next: ")[1].replace(
        "fleet.instance_type=null", ""
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ANY=1", "ANY: compares machines for a number of tokens; set TOKENS too"),
        ("ANY=1 DAYS=7", "ANY: compares machines for a number of tokens; set TOKENS too"),
        ("ANY=maybe TOKENS=1e12", "ANY: must be 1 or 0"),
        ("ANY=1 TOKENS=1", "TOKENS: 1 is less than one step of"),
        ("TOKENS=1", "TOKENS: 1 is less than one step of"),
        ("ANY=1 TOKENS=1e18", "TOKENS: 1e+18 is more than 1e+16"),
        ("ANY=1 TOKENS=lots", "TOKENS: must be a number above 0"),
        (
            "ANY=1 TOKENS=1e12 USD=1",
            "ANY: no machine can train on so many tokens within DAYS and USD",
        ),
    ],
)
@pytest.mark.usefixtures("few")
def test_what_no_machine_can_do_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["plan", f"CONFIG={RECIPE}", *words.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and said in lines[0] and lines[1].startswith("  next: ")
