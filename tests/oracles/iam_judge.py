"""An evaluator of IAM that is not ours (iam/judge.mjs), asked many questions at once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from requirement import missing, need_program

JUDGE = Path(__file__).parent / "iam"


@dataclass(frozen=True)
class Asked:
    """One request of a run, as the service sees it."""

    action: str
    resource: str
    context: dict[str, Any] = field(default_factory=dict)
    key: dict[str, Any] | None = None


def judged(policy: dict[str, Any], asked: Sequence[Asked]) -> list[str]:
    """Allowed, ImplicitlyDenied or ExplicitlyDenied, for each request."""
    return judged_each([(policy, asked)])[0]


def judged_each(cases: Sequence[tuple[dict[str, Any], Sequence[Asked]]]) -> list[list[str]]:
    """The same for many policies at once: the evaluator takes a second to begin."""
    node = need_program("node", "apt-get install nodejs npm")
    if not (JUDGE / "node_modules").is_dir():
        missing("the judge of IAM policies is not there; install it: cd tests/oracles/iam && npm ci --ignore-scripts")
    questions = [{"policy": policy, **asdict(one)} for policy, asked in cases for one in asked]
    said = subprocess.run([node, "judge.mjs"], cwd=JUDGE, input=json.dumps(questions), text=True, capture_output=True, check=True)
    answers = json.loads(said.stdout)
    assert not [(one, answer) for one, answer in zip(questions, answers, strict=True) if answer["result"] == "error"]
    rest = iter(answers)
    return [[next(rest)["result"] for _ in asked] for _, asked in cases]


def policy_of(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}
