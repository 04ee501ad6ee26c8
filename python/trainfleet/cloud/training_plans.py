"""SageMaker's flexible training plans, as capacity that is bought ahead (capacity_blocks.py).

A plan is found again by its name's beginning and its tags. Its name says when it begins: SageMaker takes a name once, so that one
offer is not bought twice. Only offers in one piece are taken, as a run would stand between two.

Sources: SageMaker developer guide, "Reserve training plans for your training jobs"; botocore's model of SageMaker, whose list has
the types; the actions that a purchase needs, AWS's policy AmazonSageMakerTrainingPlanCreateAccess.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ..config import Config
from . import clock
from .calls import Calls
from .capacity_blocks import AHEAD, GONE, HeldCapacity, Offer, cheapest_first, fee
from .prices import by_table
from .resource_types import is_ours, tags_of
from .template_inputs import own_tags, pairs, slug

FOR = "training-job"
TYPES = (
    "p4d.24xlarge", "p4de.24xlarge", "p5.4xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge",
    "p6-b300.48xlarge", "trn1.32xlarge", "trn2.48xlarge",
)  # fmt: skip
MOST_NAME = 40  # characters of a config's name in a plan's, which has 64


class TrainingPlans:
    """Plans for a config's training jobs."""

    name = "training plan"

    def __init__(self, config: Config, calls: Calls) -> None:
        self.config, self.calls = config, calls

    @property
    def named(self) -> str:
        """What the names of this config's plans begin with."""
        return f"trainfleet-{slug(self.config.fleet_name, MOST_NAME)}-"

    def placed(self, config: Config, held: HeldCapacity | None) -> Config:
        """With the plan as that of its jobs."""
        own = replace(config.fleet.sagemaker, training_plan=held.id if held else None)
        return replace(config, fleet=replace(config.fleet, sagemaker=own))

    def by_list(self) -> float | None:
        return by_table().training(self.config.fleet.instance_type or "", False).usd

    def offers(self, hours: int) -> list[Offer]:
        fleet, now = self.config.fleet, datetime.fromtimestamp(clock.now(), UTC)
        answer = self.calls(
            "sagemaker", "SearchTrainingPlanOfferings", InstanceType=f"ml.{fleet.instance_type}", InstanceCount=fleet.nodes,
            DurationHours=hours, TargetResources=[FOR], StartTimeAfter=now, EndTimeBefore=now + AHEAD + timedelta(hours=hours),
        )  # fmt: skip
        return cheapest_first(offer for row in answer["TrainingPlanOfferings"] for offer in _offer(row, fleet.nodes))

    def held(self) -> list[HeldCapacity]:
        return [
            HeldCapacity(row["TrainingPlanArn"], row["Status"].lower(), row["StartTime"].timestamp(), row["EndTime"].timestamp(),
                 fee(row))
            for row in self.calls.pages("sagemaker", "ListTrainingPlans", "TrainingPlanSummaries")
            if row["TrainingPlanName"].startswith(self.named) and row["Status"].lower() not in GONE and "StartTime" in row
            and self._is_ours(row["TrainingPlanArn"])
        ]  # fmt: skip

    def _is_ours(self, arn: str) -> bool:
        tags = tags_of(self.calls("sagemaker", "ListTags", ResourceArn=arn).get("Tags"))
        return is_ours(tags, self.config.fleet_name)

    def buy(self, offer: Offer) -> None:
        name = f"{self.named}{datetime.fromtimestamp(offer.starts, UTC):%Y%m%d%H%M}"
        own = pairs(own_tags(self.config.fleet_name))
        self.calls("sagemaker", "CreateTrainingPlan", TrainingPlanName=name, TrainingPlanOfferingId=offer.id, Tags=own)


def _offer(row: dict[str, Any], nodes: int) -> Iterator[Offer]:
    """An offer of so many machines in one piece and at a price in US dollars; none else."""
    pieces, usd = row.get("ReservedCapacityOfferings", ()), fee(row)
    if len(pieces) == 1 and usd is not None and pieces[0]["InstanceCount"] >= nodes and "StartTime" in pieces[0]:
        (piece,) = pieces
        starts, ends = piece["StartTime"].timestamp(), piece["EndTime"].timestamp()
        yield Offer(row["TrainingPlanOfferingId"], starts, ends, usd, str(piece.get("AvailabilityZone", "")))
