"""Updates instance_types.json from AWS API responses: `PYTHONPATH=python python
scripts/instance_types.py RESPONSE.json ...`.

A response is the output of `aws ec2 describe-instance-types`, or of `aws pricing get-products` for
AmazonEC2 or AmazonSageMaker in us-east-1, with the filters of prices.py. botocore's model lists the
types on which SageMaker trains. Values that no API publishes stay unchanged; their source is in the
file's `about`. A type that is not in the file is printed, to be completed by hand.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

from trainfleet.cloud.prices import dollars
from trainfleet.hardware.node_types import TABLE
from trainfleet.trust.untrusted_input import parse_json

Row = dict[str, Any]
CARD = 4  # maximum number of interfaces that a node needs on card 0


def described(answer: Row) -> Row:
    """Converts an entry of DescribeInstanceTypes to a row of the file."""
    network = answer["NetworkInfo"]
    cards, gpus = network["NetworkCards"], answer.get("GpuInfo", {}).get("Gpus", ())
    speed = re.fullmatch(
        r"(?:Up to )?(?:([0-9]+)x )?([0-9.]+) Gigabit", network["NetworkPerformance"]
    )
    efa = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    first = next((place for place, card in enumerate(cards) if "efa" in card["InterfaceTypes"]), 0)
    # Neuron devices are not counted here, because a rank is a logical core
    return {
        "vcpus": answer["VCpuInfo"]["DefaultVCpus"],
        "memory_gib": answer["MemoryInfo"]["SizeInMiB"] // 1024,
        **({"accelerators": sum(gpu["Count"] for gpu in gpus)} if gpus else {}),
        **({"network_gbps": int(int(speed[1] or 1) * float(speed[2]))} if speed else {}),
        "efa": efa,
        "slots": min(CARD, cards[0]["MaximumNetworkInterfaces"]),
        **({"first_efa": first} if first else {}),
        "nvme_gb": answer.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
        "sold": sorted(kind.removeprefix("capacity-") for kind in answer["SupportedUsageClasses"]),
    }


def priced(product: str) -> tuple[str, Row]:
    """Returns a Pricing API product's instance type, and its price under the file's key."""
    attributes = parse_json(product, "PriceList")["product"]["attributes"]
    is_training = "instanceName" in attributes
    name = (
        attributes["instanceName"].removeprefix("ml.")
        if is_training
        else attributes["instanceType"]
    )
    usd = min(dollars(product, f"Train:ml.{name}" if is_training else ""), default=None)
    return name, {} if usd is None else {
        "sagemaker_usd_per_hour" if is_training else "usd_per_hour": usd
    }


def renewed(rows: dict[str, Row], answers: list[Row], trained_on: frozenset[str]) -> dict[str, Row]:
    """Returns the rows updated from the responses, with a new row for each unknown type."""
    found = {name: dict(row) for name, row in rows.items()}
    for answer in answers:
        told = [
            (entry["InstanceType"], described(entry)) for entry in answer.get("InstanceTypes", ())
        ]
        for name, row in (*told, *map(priced, answer.get("PriceList", ()))):
            found.setdefault(name, {}).update(row)
    for name, row in found.items():
        row["sagemaker"] = f"ml.{name}" in trained_on
    return found


def write(table: Row) -> str:
    """Formats the file, with one line per type."""
    types = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table["types"].items()
    )
    rest = {
        key: json.dumps(table[key], indent=1).replace("\n", "\n ")
        for key in ("about", "heads", "left_out")
    }
    return (
        f'{{\n "about": {rest["about"]},\n "types": {{\n{types}\n }},\n "heads": {rest["heads"]},\n'
        f' "left_out": {rest["left_out"]}\n}}\n'
    )


def main(paths: list[str]) -> None:
    import botocore.session

    table = parse_json(TABLE.read_text(encoding="utf-8"), str(TABLE))
    model = botocore.session.get_session().get_service_model("sagemaker")
    trained_on = frozenset(model.shape_for("TrainingInstanceType").enum)
    answers = [parse_json(Path(path).read_text(encoding="utf-8"), path) for path in paths]
    found = renewed(table["types"], answers, trained_on)
    for name in found.keys() - table["types"].keys():
        print(f"not in the file: {json.dumps({name: found.pop(name)})}")
    if paths:
        table["about"]["renewed"] = (
            f"by {', '.join(Path(path).name for path in paths)}, {datetime.date.today()}"
        )
    TABLE.write_text(write(table | {"types": found}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
