"""Placement of SageMaker training job hosts.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ...trust.errors import BackendError
from ...trust.untrusted_input import whole
from ..placement import NEXT, PORT, Placement, PlacementSource, Terms, checked

RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")


def read(file: Path = RESOURCES) -> Placement:
    """Returns a host's placement from its resourceconfig.json. The attempt is always 1, because
    SageMaker does not report retries.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        hosts, own = sorted(map(str, record["hosts"]), key=_by_number), str(record["current_host"])
        return checked(Placement(hosts.index(own), len(hosts), hosts[0], PORT, 1, own), str(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(
            "can't identify this host in the job",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            next=NEXT,
        ) from error


def _by_number(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders algo-2 before algo-10, as consoles and logs do."""
    return [
        (-1, part) if (number := whole(part)) is None else (number, "")
        for part in re.split(r"([0-9]+)", name)
    ]


# SageMaker allows 120 s:
# https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StoppingCondition.html
TERMS = Terms(grace=110, echoes=True, failure=Path("/opt/ml/output/failure"))
PLACEMENT = PlacementSource("sagemaker", read, lambda: RESOURCES.exists(), TERMS)
