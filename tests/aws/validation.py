"""Every request as AWS's own models describe it, stricter than boto3: enums, patterns, lengths and numbers too.

boto3 checks types and what is required. `install` has every request of this process checked in full, whoever makes it and whoever
answers it: it is put where botocore's serializers, and our own entry (cloud/calls.py), ask whether a request is good.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import botocore.session
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator, ValidationErrors

PLAIN = ParamValidator.validate
SEEN: list[str] = []  # the shapes of all requests that were checked
# Java's classes of letters that Python's re lacks, as they stand between brackets.
LETTERS = r"a-zA-Z\u00aa-\u1fff\u2c00-\uffff"
CLASSES = {r"\p{L}": LETTERS, r"\p{Z}": r"\u0020\u00a0\u2000-\u200a", r"\p{N}": "0-9", r"\p{ASCII}": r"\x00-\x7f", r"\p{Alnum}": "a-zA-Z0-9",
           r"\p{Print}": r"\x20-\x7e", r"\p{Graph}": r"\x21-\x7e", r"\p{P}": r"!-/:-@\[-`{-~", r"\p{LD}": "a-zA-Z0-9", r"\p{Lu}": "A-Z",
           r"\p{Ll}": "a-z", r"\p{Nd}": "0-9", r"\p{M}": r"\u0300-\u036f", r"\p{S}": r"$+<=>^`|~"}  # fmt: skip


def strict(shape: Shape, value: Any, path: str = "") -> Iterator[str]:
    """What the model does not allow in a value, each with its path; types are boto3's affair."""
    kind, rules = shape.type_name, shape.metadata
    match kind, value:
        case "structure", dict():
            for name in value.keys() & shape.members.keys():
                yield from strict(shape.members[name], value[name], f"{path}.{name}")
        case "list", list() | tuple():
            yield from _size(rules, len(value), f"{path}: {len(value)} entries")
            for index, item in enumerate(value):
                yield from strict(shape.member, item, f"{path}[{index}]")
        case "map", dict():
            yield from _size(rules, len(value), f"{path}: {len(value)} entries")
            for name, item in value.items():
                yield from strict(shape.key, name, f"{path} key {name!r}")
                yield from strict(shape.value, item, f"{path}.{name}")
        case "string", str():
            yield from _text(shape, value, path)
        case (("integer" | "long" | "float" | "double"), int() | float()):
            yield from _size(rules, value, f"{path}: {value}")


def _text(shape: Shape, value: str, path: str) -> Iterator[str]:
    rules = shape.metadata
    if (allowed := rules.get("enum")) and value not in allowed:
        yield f"{path}: {value!r} is not one of {', '.join(allowed[:12])}{' ...' if len(allowed) > 12 else ''}"
    yield from _size(rules, len(value), f"{path}: {len(value)} characters")
    if pattern := rules.get("pattern"):
        compiled = translate(pattern)
        if compiled and not compiled.fullmatch(value):
            yield f"{path}: {value!r} does not match {pattern}"


def _size(rules: dict[str, Any], size: float, said: str) -> Iterator[str]:
    if size < rules.get("min", size):
        yield f"{said}, at least {rules['min']}"
    if size > rules.get("max", size):
        yield f"{said}, at most {rules['max']}"


@functools.cache
def translate(pattern: str) -> re.Pattern[str] | None:
    """A model's pattern, written for Java, as Python's; None for one that can't be said in Python."""
    alone = re.sub(
        r"(?<!\[)(\\p\{\w+\})(?![^\[]*\])",
        r"[\1]",
        pattern.replace(r"\w-", r"\w\-").replace("^(?i)", "(?i)^"),
    )
    inside = re.sub(r"\\p\{\w+\}", lambda match: CLASSES.get(match[0], ""), alone)
    try:
        return re.compile(inside)
    except re.error:
        return None


def install() -> None:
    """From now on each request of this process that is not as its model says raises botocore's ParamValidationError."""
    ParamValidator.validate = _whole


def _whole(self: ParamValidator, params: Any, shape: Shape) -> ValidationErrors:
    report = PLAIN(self, params, shape)
    SEEN.append(shape.name)
    problems = list(strict(shape, params))
    if not problems:
        return report
    plain = report.generate_report()
    report.has_errors = lambda: True
    report.generate_report = lambda: "\n".join(filter(None, [plain, *problems]))
    return report


@functools.cache
def _model(service: str) -> ServiceModel:
    return botocore.session.get_session().get_service_model(service)  # type: ignore[no-any-return]


def problems_of(service: str, operation: str, request: dict[str, Any]) -> list[str]:
    """All that is wrong with a request; none for a good one."""
    shape = _model(service).operation_model(operation).input_shape
    if shape is None:
        return []
    report = PLAIN(ParamValidator(), request, shape)
    return [*filter(None, report.generate_report().split("\n")), *strict(shape, request)]
