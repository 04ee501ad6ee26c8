"""Looks up AWS prices, in the Pricing API or else in a table of list prices. Also prices existing
resources.

The table contains US dollars in us-east-1 for on-demand Linux. Instance prices are in
instance_types.json. The others are from the public price lists of aws.amazon.com/ebs/pricing,
/fsx/lustre/pricing, /vpc/pricing and /s3/pricing. Other regions cost up to 50 % more.

SageMaker costs 15 to 25 % more than EC2 for the same machine. Prices for managed spot and some
instance types are available only from the API.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.tables import read_table
from ..hardware import node_types
from ..trust.errors import CloudError, ConfigError
from ..trust.untrusted_input import parse_json
from .calls import Calls, Json, Row, region_of

READ = "2026-11-22"
TABLE = f"list price in us-east-1, {READ}"
API, SPOT, PAID = "Pricing API", "spot price now", "paid with the block"
RESERVED = "paid with the training plan"
OF_SAGEMAKER = "SageMaker's list price in us-east-1, 2026-09-27"
WHERE_PRICES_ARE = "us-east-1"  # region whose Pricing API endpoint serves the prices of all regions
MONTH = 730.0  # hours per month, as in AWS's monthly prices
_LISTED: dict[str, dict[str, float]] = read_table(Path(__file__).with_name("prices.yaml"))
GIB_MONTH, HOUR, GB, FREE = (_LISTED[per] for per in ("gib_month", "hour", "gb", "free"))


Cost = tuple[str, float | None]  # description, and US dollars per hour (None: unknown)


@dataclass(frozen=True)
class Price:
    """A price in US dollars per hour (None: unknown), and its source."""

    usd: float | None
    source: str

    def times(self, count: int) -> float | None:
        """Returns the price of `count` units, in US dollars per hour."""
        return None if self.usd is None else self.usd * count


def of(kind: str, what: str, amount: float) -> float | None:
    """Returns the table's price in US dollars per hour, or None if unknown.

    `amount`: number of instances, addresses or NAT gateways, or GiB of storage. The kind `training`
    is a SageMaker instance.
    """
    if kind in ("instance", "training"):
        row = node_types.instance(what)
        if kind == "instance":
            each = row.usd_per_hour if row else node_types.HEADS.get(what)
        else:
            each = row.sagemaker_usd_per_hour if row else None
        return None if each is None else each * amount
    if kind in HOUR:
        return HOUR[kind] * amount
    rate = GIB_MONTH.get(what if what in GIB_MONTH else kind)
    return None if rate is None else rate * amount / MONTH


@dataclass
class Prices:
    """Prices in one region. Uses the table if there are no `calls` or the API does not respond."""

    calls: Calls | None = None
    trouble: str = ""  # why the table was used
    known: dict[tuple[str, str], Price] = field(default_factory=dict)

    def instance(self, name: str, capacity: str = "on-demand", zone: str = "") -> Price:
        """Returns the price of one EC2 machine. A capacity block's machines cost 0, because the
        block is prepaid.
        """
        if capacity == "block":
            return Price(0.0, PAID)
        kind = "spot" if capacity == "spot" else "on-demand"
        return self._priced(name, kind, zone)

    def training(self, name: str, is_reserved: bool = False) -> Price:
        """Returns the price of one SageMaker machine. A training plan's machines cost 0, because
        the plan is prepaid. Managed spot costs less.
        """
        return Price(0.0, RESERVED) if is_reserved else self._priced(name, "training", "")

    def _priced(self, name: str, kind: str, zone: str) -> Price:
        if (name, kind) not in self.known:
            listed = Price(of("instance", name, 1), TABLE)
            if kind == "training":
                listed = Price(of(kind, name, 1), OF_SAGEMAKER)
            self.known[name, kind] = self._ask(name, kind, zone) or listed
        return self.known[name, kind]

    def _ask(self, name: str, kind: str, zone: str) -> Price | None:
        if self.calls is None or self.trouble:
            return None
        try:
            if kind == "spot":
                usd = _spot(self.calls, name, zone)
            else:
                usd = _listed(self.calls.region, name, kind == "training")
        except CloudError as error:
            self.trouble = f"{error.what}: {error.why}"
            return None
        return None if usd is None else Price(usd, SPOT if kind == "spot" else API)


def _listed(region: str, name: str, is_training: bool) -> float | None:
    """Returns an instance type's on-demand price from the Pricing API, for EC2 or SageMaker
    training, or None if unknown.
    """
    wanted = {
        "instanceType": name,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    if is_training:
        # each use of an instance is a separate product; usage is filtered below
        wanted = {"instanceName": f"ml.{name}", "regionCode": region}
    filters = [
        {"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in wanted.items()
    ]
    request: Json = {
        "Filters": filters,
        "FormatVersion": "aws_v1",
        "MaxResults": 100 if is_training else 10,
    }
    service, usage = ("AmazonSageMaker", f"Train:ml.{name}") if is_training else ("AmazonEC2", "")
    answer = Calls(WHERE_PRICES_ARE)("pricing", "GetProducts", ServiceCode=service, **request)
    found = [usd for text in answer.get("PriceList") or () for usd in dollars(text, usage)]
    return min(found, default=None)


def dollars(text: Any, usage: str) -> Iterator[float]:
    """Yields the hourly on-demand prices in a Pricing API product.

    `usage`: the product's usage type without the region prefix (such as USE1-), or "" for any.
    """
    try:
        product = parse_json(text, API) if isinstance(text, str) else text
        if usage and not re.fullmatch(
            f"([A-Z0-9]+-)?{re.escape(usage)}", product["product"]["attributes"]["usagetype"]
        ):
            return
        for term in product["terms"]["OnDemand"].values():
            for part in term["priceDimensions"].values():
                usd = float(part["pricePerUnit"]["USD"])
                if part["unit"] == "Hrs" and 0 < usd < 10_000:
                    yield usd
    except (ValueError, TypeError, KeyError, AttributeError):
        return  # the text is not a product


def _spot(calls: Calls, name: str, zone: str) -> float | None:
    """Returns the current spot price in `zone`, or the highest across zones if `zone` is empty."""
    request: Json = {
        "InstanceTypes": [name],
        "ProductDescriptions": ["Linux/UNIX"],
        "MaxResults": 20,
    }
    if zone:
        request["AvailabilityZone"] = zone
    answer = calls("ec2", "DescribeSpotPriceHistory", **request)
    newest: dict[str, tuple[str, float]] = {}
    for row in answer.get("SpotPriceHistory") or ():
        zone, moment = str(row.get("AvailabilityZone")), str(row.get("Timestamp"))
        newest[zone] = max(newest.get(zone, ("", 0.0)), (moment, _number(row)))
    return max((usd for _, usd in newest.values() if usd), default=None)


def _number(row: Mapping[str, Any]) -> float:
    try:
        return float(row["SpotPrice"])
    except (KeyError, TypeError, ValueError):
        return 0.0


def in_region(config: Config) -> Prices:
    """Returns the prices in the config's region, or the table's prices if no region is set."""
    try:
        return Prices(Calls(region_of(config)))
    except ConfigError:
        return by_table()


@functools.cache
def by_table() -> Prices:
    return Prices()


def cost_of(kind: str, row: Row) -> Cost:
    """Returns an existing resource's description, and US dollars per hour (None: unknown)."""
    if kind in PRICED:
        return PRICED[kind](row)
    return "", 0.0 if kind in FREE else None


def stored(kind: str, size: float) -> Cost:
    """Returns the size and price of a bucket, image, snapshot or log group with `size` bytes."""
    return f"{size / 2**30:,.1f} GiB", of(kind, "", size / 2**30)


def _image(row: Row) -> Cost:
    """Prices a container image. Configs that share an image split its cost equally."""
    others = len(row.get("imageTags", ())) - 1
    what, usd = stored("image", float(row.get("imageSizeInBytes", 0)))
    shared = f", shared with {others} other config{'s' * (others > 1)}" if others else ""
    return what + shared, None if usd is None else usd / (others + 1)


def _snapshot(row: Row) -> Cost:
    """Prices a snapshot by its stored blocks, or by the disk's size if EC2 does not report them."""
    told = float(row.get("FullSnapshotSizeInBytes") or 0) / 2**30
    size = told or float(row.get("VolumeSize") or 0)
    return f"{'' if told else 'at most '}{size:,.1f} GiB snapshot", of("snapshot", "", size)


def _instance(row: Row) -> Cost:
    state = row["State"]["Name"]
    words = f"{row['InstanceType']} in {row['Placement']['AvailabilityZone']}, {state}"
    if state in ("stopped", "stopping", "shutting-down"):
        return words, 0.0
    return words, of("instance", str(row["InstanceType"]), 1)


def _training_job(row: Row) -> Cost:
    """Prices a training job. Once the job has finished, only its warm pool costs money."""
    machines, state = row.get("ResourceConfig"), str(row["TrainingJobStatus"])
    if not machines:
        return state, 0.0
    kind, count = str(machines["InstanceType"]), int(machines["InstanceCount"])
    words = f"{count} x {kind}, {state if state in ('InProgress', 'Stopping') else 'warm'}"
    return words, of("training", kind.removeprefix("ml."), count)


def _file_system(row: Row) -> Cost:
    lustre, size = row.get("LustreConfiguration", {}), float(row["StorageCapacity"])
    deployment = str(lustre.get("DeploymentType", ""))
    throughput = lustre.get("PerUnitStorageThroughput")
    kind = f"{deployment}-{throughput}" if throughput else deployment
    return f"{size:,.0f} GiB {deployment}", of("file system", kind, size)


def _volume(row: Row) -> Cost:
    size, type_ = float(row.get("Size") or 0), str(row.get("VolumeType", ""))
    return f"{size:,.0f} GiB {type_}", of("volume", type_, size)


PRICED: dict[str, Callable[[Row], Cost]] = {
    "instance": _instance,
    "volume": _volume,
    "snapshot": _snapshot,
    "AMI": lambda row: (f"{row.get('Name', '')}, {row.get('State', '')}; its snapshot costs", 0.0),
    "NAT gateway": lambda row: ("and its traffic", of("nat", "", 1)),
    "address": lambda row: (str(row.get("PublicIp", "")), of("address", "", 1)),
    "file system": _file_system,
    "log group": lambda row: stored("log group", float(row.get("storedBytes", 0))),
    "image": _image,
    "training job": _training_job,
}
