"""cfn-lint, AWS's own judge of templates, on every template that we make: all instance types, kinds of capacity and networks."""

from __future__ import annotations

import functools

import pytest
from cfnlint.config import ConfigMixIn
from cfnlint.decode.decode import decode_str
from cfnlint.runner import Runner

from aws.fleets import every
from trainfleet.cloud.template import render

CASES = {name: (config, inputs) for name, config, inputs in every()}
# The image is a plain string in the stack's parameters, so that an update keeps it.
IGNORED = ["W2506"]


@functools.cache
def judge(region: str) -> Runner:
    return Runner(ConfigMixIn(regions=[region], ignore_checks=IGNORED))


def problems(text: str, region: str) -> list[str]:
    data, unread = decode_str(text)
    found = [*unread, *judge(region).validate_template(data)]
    return [f"{match.rule.id} {'/'.join(map(str, match.path or ()))}: {match.message}" for match in found]


@pytest.mark.parametrize("name", CASES)
def test_every_template_is_sound_to_cfn_lint(name: str) -> None:
    config, inputs = CASES[name]
    assert problems(render(config, inputs), inputs.region) == []


def test_cfn_lint_would_see_what_is_wrong() -> None:
    config, inputs = CASES["p5.48xlarge-on-demand"]
    for good, bad in (('"HttpTokens":"required"', '"HttpTokens":"must"'), ('{"Ref":"Vpc"}', '{"Ref":"Vcp"}'), ('"gp3"', '"gp9"')):
        text = render(config, inputs)
        assert good in text and problems(text.replace(good, bad), inputs.region)
