"""What a run costs from set-up to teardown: one computation for plans, for the limit and for what is counted while it runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from trainfleet.backends import backend_of, terms_of
from trainfleet.backends.slurm import cluster_file
from trainfleet.cloud import spending
from trainfleet.cloud.prices import by_table
from trainfleet.config import Config, Settings, load
from trainfleet.plan.estimate import Bill, BillStage, estimate
from trainfleet.plan.plan import make_plan
from trainfleet.plan.sizing import Wish, answer, sizes
from trainfleet.recipes import FOLDER
from trainfleet.run.run_folder import Run, append_line
from trainfleet.trust.errors import ConfigError
from trainfleet.watch import budget
from trainfleet.watch.budget import Budget

HOUR = 3600.0
# Two nodes of $10 an hour beside a head of $1: half an hour of set-up of which events cover a tenth, and half an hour of idling.
BILL = Bill(10.0, 1.0, (BillStage("stack", 15, "x", nodes=False), BillStage("driver", 12, "x"), BillStage("start", 3, "x", counted=True)),
            (BillStage("idle", 30, "x"),), lingers=0.5)  # fmt: skip


def config_of(recipe: str, settings: str = "") -> Config:
    return load(Settings(FOLDER / f"{recipe}.yaml", settings), terms_of)[0]


def test_a_bill_is_the_sum_of_its_stages() -> None:
    assert BILL.setup(2) == pytest.approx(0.25 * 1 + 0.2 * 21 + 0.05 * 21)
    assert BILL.uncounted(2) == pytest.approx(0.25 * 1 + 0.2 * 21)
    assert BILL.idle(2) == pytest.approx(0.5 * 21)
    assert BILL.whole(2, 3.0) == pytest.approx(BILL.setup(2) + 3 * 21 + BILL.idle(2))


def spent(run: Run, limit: float | None, events: list[dict[str, object]], now: float) -> Budget:
    config = config_of("roberta-large-p3dn-ec2", "fleet.nodes=2 budget.max_usd=1000")
    run.events.mkdir(parents=True, exist_ok=True)
    for event in events:
        append_line(run.events / "launcher-a.jsonl", event)
    return Budget(
        run, replace(config, budget=replace(config.budget, max_usd=limit)), BILL, clock=lambda: now
    )


LAUNCHED: dict[str, object] = {"event": "launched", "time": 0.0, "nodes": 2}


def test_what_a_run_has_cost_begins_with_its_set_up(tmp_path: Path) -> None:
    costs = spent(Run(tmp_path), None, [], HOUR)
    assert costs.spent(HOUR) == 0, "no launch, no set-up of its own"
    costs = spent(Run(tmp_path), None, [LAUNCHED], HOUR)
    assert costs.spent(HOUR) == pytest.approx(BILL.uncounted(2) + 21)


def test_what_there_is_beside_the_nodes_is_paid_for_in_queues_too(tmp_path: Path) -> None:
    waits: dict[str, object] = {"event": "queued", "time": 0.0, "phase": "queued"}
    runs: dict[str, object] = {"event": "running", "time": 2 * HOUR}
    costs = spent(Run(tmp_path), None, [LAUNCHED, waits, runs], 3 * HOUR)
    assert costs.spent(3 * HOUR) == pytest.approx(BILL.uncounted(2) + 20 + 3 * 1)


def test_a_run_stops_while_its_budget_still_pays_for_idle_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "LOOK_EVERY", 0.0)
    limit = (
        BILL.whole(2, 1.0) - BILL.setup(2) + BILL.uncounted(2)
    )  # an hour, and the nodes until they are gone
    said = list[str]()
    assert not spent(Run(tmp_path), limit, [LAUNCHED], HOUR - 10).is_spent(said.append)
    assert "including its nodes until they are removed" in said[0]
    costs = spent(Run(tmp_path), limit, [], HOUR + 1)
    assert costs.is_spent() and costs.words().startswith(
        f"${BILL.idle(2):,.2f} of its budget.max_usd ${limit:,.2f} are left"
    )


def test_a_run_that_could_not_pay_for_its_end_is_not_begun_again(tmp_path: Path) -> None:
    stopped: dict[str, object] = {"event": "stopped", "time": HOUR}
    costs = spent(Run(tmp_path), 30.0, [LAUNCHED, stopped], HOUR)
    assert costs.spent(HOUR, under_way=False) < 30
    with pytest.raises(
        ConfigError,
        match=r"already, and its nodes will cost \$10.50 until they are removed; its limit is \$30.00",
    ):
        costs.require()


def test_the_limit_holds_for_set_up_and_idle_time_too() -> None:
    config = config_of("roberta-large-p3dn-ec2", "train.steps=10")
    bill = backend_of(config).bill()
    needs = estimate(config, bill)
    assert (
        bill and needs.elapsed and needs.usd == pytest.approx(bill.whole(8, needs.elapsed / HOUR))
    )
    assert needs.around > 100 * needs.elapsed / HOUR * bill.hour(8), "this run is all set-up"
    short = replace(config, budget=replace(config.budget, max_usd=100.0))
    with pytest.raises(
        ConfigError,
        match=r"set-up and idle time are already estimated at \$175.25, over the limit of \$100.00",
    ):
        make_plan(short, [], [], [], bill)
    dear = config_of("llama-3-8b-p5-ec2")
    whole = backend_of(dear).bill()
    assert whole
    costs = estimate(dear, whole).usd
    assert costs
    tight = replace(dear, budget=replace(dear.budget, max_usd=costs - 100))
    with pytest.raises(
        ConfigError, match=r"of it for set-up and idle time.*; train.steps: \d+ fits it"
    ) as refused:
        make_plan(tight, [], [], [], whole)
    steps = int(str(refused.value).rpartition("train.steps: ")[2].split()[0])
    make_plan(replace(tight, train=replace(dear.train, steps=steps)), [], [], [], whole)
    predicted = estimate(dear, whole).predicted(1)["usd"]
    assert predicted == pytest.approx(costs - whole.idle(8)), "what is spent when it ends"


RECIPES = {
    "roberta-large-p3dn-ec2": {"driver", "EFA", "idle nodes"},
    "trn1-single-node": {"driver", "idle nodes"},
    "llama-2-7b-trn1-ec2": {"driver", "EFA", "idle nodes"},
    "llama-2-7b-trn1-batch": {"stack", "boot", "idle machines"},
    "llama-2-7b-p4d-sagemaker": {"download of the image", "warm pool"},
    "bert-large-trn1-parallelcluster": {"cluster and head", "boot of the nodes", "idle nodes"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_on_aws_keeps_its_budget_with_set_up_and_idle_time(name: str) -> None:
    config = config_of(name)
    bill = backend_of(config).bill()
    assert bill and {stage.name for stage in (*bill.before, *bill.after)} >= RECIPES[name]
    assert (
        bill.setup(config.fleet.nodes) > 0
        and bill.idle(config.fleet.nodes) > 0
        and bill.lingers > 0
    )
    assert all(stage.why for stage in (*bill.before, *bill.after))
    make_plan(config, [], [], [], bill)


def test_a_cluster_s_bill_has_its_head_its_file_system_and_the_nodes_that_always_stand() -> None:
    config = config_of("bert-large-trn1-parallelcluster")
    found = {row.name: row for row in cluster_file.costs(config, by_table()).rows}
    assert set(found) == {"nodes", "volumes", "file system", "head", "NAT", "addresses"}
    bill = backend_of(config).bill()
    stays = sum(found[name].usd or 0 for name in ("head", "file system", "NAT", "addresses"))
    assert bill and bill.rest == pytest.approx(stays) and bill.rest > 0.68
    assert bill.node * 16 == pytest.approx((found["nodes"].usd or 0) + (found["volumes"].usd or 0))
    queues = "fleet.slurm.parallelcluster.queues=[{name: a}, {name: b, instance_type: p5.48xlarge, min: 1, max: 1}]"
    two = config_of("bert-large-trn1-parallelcluster", f"{queues} fleet.slurm.partition=a")
    other = backend_of(two).bill()
    assert other and other.rest == pytest.approx(bill.rest + 55.04)
    static = "fleet.slurm.parallelcluster.queues=[{name: a, min: 16}] fleet.slurm.partition=a"
    always = backend_of(config_of("bert-large-trn1-parallelcluster", static)).bill()
    assert always and always.lingers == math.inf and always.setup(16) > 2 * bill.setup(16)


def test_the_head_counts_as_the_machine_that_plans() -> None:
    config = config_of("llama-3-8b-p5-ec2")
    fleet = replace(
        config.fleet,
        hosts=("a=10.0.0.1",),
        fsx=replace(config.fleet.fsx, dns_name="fs-1.fsx", mount_name="m"),
    )
    assert backend_of(replace(config, fleet=fleet)).bill() == backend_of(config).bill()


def test_an_unknown_price_makes_no_bill() -> None:
    config = config_of("llama-3-8b-p5-ec2")
    assert (
        spending.of_ec2(
            replace(config, fleet=replace(config.fleet, instance_type="p5e.48xlarge"))
        ).bill(8)
        is None
    )
    assert list(spending.describe_whole(None, 8, 1.0)) == []


def test_both_tables_agree_and_every_stage_says_where_its_minutes_come_from() -> None:
    config = config_of("llama-2-7b-trn1-batch")
    costs = spending.of_batch(config, by_table())
    bill = costs.bill(4)
    assert bill and bill.hour(4) == pytest.approx(spending.hourly(costs.rows))
    said = "\n".join(spending.describe_whole(bill, 4, 10.0))
    assert (
        f"{bill.whole(4, 10.0):,.2f}  which budget.max_usd limits" in said
        and "min, assumed" in said
    )
    assert (
        "published job logs: 2.5 to 2.9 min" in said
        and f"then ${bill.rest:,.2f} an hour for the remaining resources" in said
    )
    assert "of unknown length" in "\n".join(spending.describe_whole(bill, 4, None))


def test_dollars_that_are_wished_for_pay_for_set_up_too() -> None:
    config, bill = (
        config_of("llama-3-8b-p5"),
        Bill(55.04, 0.0, (BillStage("s", 30, "x"),), (BillStage("i", 30, "x"),)),
    )
    wish = Wish(days=1, usd=5000)
    chosen = answer(sizes(config, wish, bill), wish)
    assert chosen.usd and chosen.usd <= 5000.5
    assert chosen.usd == pytest.approx(bill.whole(chosen.nodes, chosen.days * 24))
    with pytest.raises(
        ConfigError, match=r"USD: \$40: set-up and idle time of one node already cost \$55"
    ):
        sizes(config, Wish(days=1, usd=40), bill)
