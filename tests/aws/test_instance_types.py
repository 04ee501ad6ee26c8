"""The file of instance types, renewed by what AWS answers: it says what EC2, botocore and the Pricing API say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import botocore.session
import instance_types
import pytest
from instance_types import renewed, write

from aws.rules import described
from trainfleet.hardware import node_types

FILE: dict[str, Any] = json.loads(node_types.TABLE.read_text())
TRAINED_ON = frozenset(
    botocore.session.get_session()
    .get_service_model("sagemaker")
    .shape_for("TrainingInstanceType")
    .enum
)  # type: ignore[attr-defined]
PRODUCT = {
    "terms": {
        "OnDemand": {
            "a": {"priceDimensions": {"b": {"unit": "Hrs", "pricePerUnit": {"USD": "55.5"}}}}
        }
    }
}
MADE_BY_THE_SCRIPT = "a change by hand keeps the script's form: scripts/instance_types.py"


def product(attributes: dict[str, str]) -> str:
    return json.dumps(PRODUCT | {"product": {"attributes": attributes}})


def test_the_file_says_what_ec2_and_botocore_say() -> None:
    answers = [{"InstanceTypes": [described(name) for name in FILE["types"]]}]
    assert renewed(FILE["types"], answers, TRAINED_ON) == FILE["types"]
    assert node_types.TABLE.read_text() == write(FILE), MADE_BY_THE_SCRIPT


def test_an_answer_s_figures_replace_the_file_s() -> None:
    bigger = described("p5.48xlarge") | {"InstanceStorageInfo": {"TotalSizeInGB": 99}}
    prices = [product({"instanceType": "p5.48xlarge", "usagetype": "BoxUsage"}),
              product({"instanceName": "ml.p5.48xlarge", "usagetype": "USE1-Train:ml.p5.48xlarge"}),
              product({"instanceName": "ml.g5.48xlarge", "usagetype": "USE1-Host:ml.g5.48xlarge"})]  # fmt: skip
    found = renewed(FILE["types"], [{"InstanceTypes": [bigger]}, {"PriceList": prices}], TRAINED_ON)
    row = node_types.type_of("p5.48xlarge", found["p5.48xlarge"])
    assert (row.nvme_gb, row.usd_per_hour, row.sagemaker_usd_per_hour) == (99, 55.5, 55.5)
    assert found["g5.48xlarge"] == FILE["types"]["g5.48xlarge"]


def test_a_type_that_the_file_lacks_is_printed_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "types.json").write_text(write(FILE))
    (answer := tmp_path / "answer.json").write_text(
        json.dumps({"InstanceTypes": [described("p4d.24xlarge"), described("m5.large")]})
    )
    monkeypatch.setattr(instance_types, "TABLE", file)
    instance_types.main([str(answer)])
    assert '"m5.large": {"vcpus": 2' in capsys.readouterr().out
    assert json.loads(file.read_text())["types"] == FILE["types"]
    assert "answer.json" in json.loads(file.read_text())["about"]["renewed"]
