"""An evaluator of IAM that is not ours (iam/judge.mjs), asked many questions at once."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Sequence
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
    """The same for several policies."""
    return [
        [_said(json.dumps({"policy": policy, **asdict(one)})) for one in asked]
        for policy, asked in cases
    ]


def may(statements: list[dict[str, Any]]) -> Callable[[str, str, dict[str, Any]], bool]:
    """What these statements allow, for an account's `may`."""
    policy = policy_of(statements)
    return lambda action, resource, context: (
        judged(policy, [Asked(action, resource, context)]) == ["Allowed"]
    )


@functools.cache
def _judge() -> subprocess.Popen[str]:
    """The evaluator, which ends with its input."""
    node = need_program("node", "apt-get install nodejs npm")
    if not (JUDGE / "node_modules").is_dir():
        missing(
            "the judge of IAM policies is not there; install it: cd tests/oracles/iam && npm ci --ignore-scripts"
        )
    return subprocess.Popen(
        [node, "judge.mjs"], cwd=JUDGE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@functools.cache
def _said(question: str) -> str:
    judge = _judge()
    assert judge.stdin and judge.stdout
    judge.stdin.write(question + "\n")
    judge.stdin.flush()
    answer = json.loads(judge.stdout.readline())
    assert answer["result"] != "error", f"{question[-300:]}: {answer}"
    return str(answer["result"])


def policy_of(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}
