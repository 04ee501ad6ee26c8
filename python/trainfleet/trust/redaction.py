"""Redacts secrets in text.

A variable's value is secret if TRAINFLEET_SECRETS (set from fleet.secrets) lists the variable, or
if its name ends in a suffix such as _TOKEN. Values are also redacted if they are escaped for JSON
or Python, URL-encoded or base64-encoded, even within longer base64 strings such as HTTP headers.
Because output is written line by line, the longer lines of a multi-line value are redacted
individually. Secrets that are not in any variable are recognized by a vendor prefix or by the
preceding text.

Imports only the standard library, because supervisors load this module at startup.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

NAMES = "TRAINFLEET_SECRETS"
HIDDEN = "***"
# Minimum length of a secret value, and of a line within one. Redacting shorter strings would garble
# ordinary text.
LEAST = 4
LEAST_LINE = 8
# Minimum length of a value that counts as secret only because of its variable's name.
LEAST_UNNAMED = 12
WRAPPED = (64, 76)  # base64 line widths in RFC 7468 and RFC 2045
# Names of variables that contain secrets. TRAINFLEET_ variables contain only job metadata, and
# public keys are not secret.
TELLING = re.compile(
    r"(?!TRAINFLEET_)(?!.*PUBLIC).*(_TOKEN|_KEY|_SECRET|_PASSWORD)|AWS_ACCESS_KEY_ID"
)
# A file path. Some variables with secret-looking names contain the path of the secret instead.
PATH = re.compile(r"~?/[\w.+@-]+(/[\w.+@-]+)*/?")
# Vendor prefix → pattern for the rest of the secret, from each vendor's documentation: AWS, Hugging
# Face, OpenAI, Anthropic, GitHub, GitLab, Slack, Google, PyPI, npm, NVIDIA, and JSON Web Tokens
# (RFC 7519).
PREFIXES = {
    "AKIA": "[A-Z2-7]{16}",
    "ASIA": "[A-Z2-7]{16}",
    "hf_": "[A-Za-z0-9]{16,}",
    "sk-": r"(?=[\w-]*[0-9])(?=[\w-]*[A-Z])[\w-]{20,}",
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), "[A-Za-z0-9]{20,}"),
    "github_pat_": r"\w{22,}",
    "glpat-": r"[\w-]{20,}",
    **dict.fromkeys(("xoxa-", "xoxb-", "xoxp-", "xoxr-", "xoxs-"), r"[\w-]{10,}"),
    "AIza": r"[\w-]{35}",
    "pypi-": r"[\w-]{50,}",
    "npm_": "[A-Za-z0-9]{36}",
    "nvapi-": r"[\w-]{40,}",
    "eyJ": r"[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
}
# Separators between a name and its value in URLs, headers, JSON, Python and shell, followed by the
# pattern for the value.
_IS = r"[\\\"']{0,3}\s{0,4}(?:=|%3D|:)\s{0,4}b?[\\\"']{0,3}"
_VALUE = r"(?![/~$<{*.])[^\s&\"'<>,;`\\]"
_NAMES = r"(?<!TRAINFLEET)_(?:TOKEN|KEY|SECRET|PASSWORD)"
# URL query parameters whose values are secret.
_SIGNED = "Signature|sig|AWSAccessKeyId|GoogleAccessId|access_token|api_key|apikey"
_AUTHORIZED = rf"Authorization{_IS}(?:Basic|Bearer|token)\s"
_ADDRESSED = r"[^/\s@:]*:[^/\s@]+(?=@)|(?<=https://)[^/\s@]+(?=@)|(?<=http://)[^/\s@]+(?=@)"
_CONTEXTS = tuple(  # pattern for the text before a secret, pattern for the secret, regex flags
    re.compile(f"({before})({secret})", flags)
    for before, secret, flags in (
        (rf"X-(?:Amz|Goog)-(?:Signature|Security-Token|Credential){_IS}", f"{_VALUE}+", re.I),
        (rf"[?&](?:{_SIGNED})=", f"{_VALUE}{{8,}}", re.I),
        (rf"Signature{_IS}", r"[0-9a-f]{64}\b", 0),  # AWS Authorization header
        (rf"aws_(?:secret_access_key|session_token|access_key_id){_IS}", f"{_VALUE}{{12,}}", re.I),
        (rf"(?:SecretAccessKey|SessionToken|AccessKeyId){_IS}", f"{_VALUE}{{12,}}", re.I),
        (rf"{_NAMES}{_IS}", f"{_VALUE}{{12,}}", 0),
        (_AUTHORIZED, f"{_VALUE}{{8,}}", re.I),
        (r"Bearer\s", rf"(?=\S*[0-9])(?=\S*[A-Z]){_VALUE}{{20,}}", 0),
        (r"(?:wandb\w*|api[ _-]?key)\W{1,12}", r"[0-9a-f]{40}\b", re.I),
        (r"://", _ADDRESSED, 0),
    )
)
_FORMS = re.compile(
    "|".join(rf"(?<![A-Za-z0-9]){prefix}{rest}" for prefix, rest in PREFIXES.items())
)
# Fast path: every recognizable secret contains at least one of these strings, and most log lines
# contain none.
_HINTS = (
    *(prefix.lower() for prefix in PREFIXES),
    "://",
    "_token",
    "_key",
    "_secret",
    "_password",
    "sig=",
    "signature",
    "accesskey",
    "x-amz-",
    "x-goog-",
    "aws_",
    "sessiontoken",
    "googleaccessid",
    "access_token",
    "authorization",
    "bearer",
    "wandb",
    "api",
)


def keep_secret(names: Iterable[str]) -> None:
    """Marks variables as secret from now on, in this process and its children."""
    known = filter(None, os.environ.get(NAMES, "").split(","))
    if all_names := list(dict.fromkeys((*known, *names))):
        os.environ[NAMES] = ",".join(all_names)


def hide(text: str) -> str:
    """Returns the text with every secret replaced by `***`."""
    covered = sorted([*_places(text), *_forms(text)])
    if not covered:
        return text
    parts, end = [], 0
    for start, stop in covered:
        if start >= end:
            parts += [text[end:start], HIDDEN]
        end = max(end, stop)
    return "".join([*parts, text[end:]])


def looks_secret(text: str) -> bool:
    """Returns whether any part of the text looks like a secret."""
    return any(True for _ in _forms(text))


def hide_bytes(line: bytes) -> bytes:
    """Redacts secrets in bytes that may not be valid UTF-8."""
    return hide(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def hide_all(value: Any) -> Any:
    """Redacts secrets in all strings of a JSON value, except dictionary keys."""
    match value:
        case str():
            return hide(value)
        case dict():
            return {key: hide_all(inner) for key, inner in value.items()}
        case list() | tuple():
            return [hide_all(inner) for inner in value]
    return value


def _forms(text: str) -> Iterator[tuple[int, int]]:
    """Yields the spans of text that look like secrets."""
    lower = text.lower()
    if not any(hint in lower for hint in _HINTS):
        return
    for found in _FORMS.finditer(text):
        yield found.span()
    for pattern in _CONTEXTS:
        for found in pattern.finditer(text):
            yield found.span(2)


def _patterns() -> tuple[str, ...]:
    named = tuple(os.environ.get(name, "") for name in os.environ.get(NAMES, "").split(",") if name)
    telling = tuple(os.environ.get(name, "") for name in _telling(tuple(os.environ)))
    return _spellings(named, telling)


@functools.lru_cache(maxsize=4)
def _telling(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the variables that count as secret because of their names."""
    return tuple(name for name in names if TELLING.fullmatch(name))


@functools.lru_cache(maxsize=4)
def _spellings(named: tuple[str, ...], telling: tuple[str, ...]) -> tuple[str, ...]:
    """Returns every string to redact for the given values, in all their encodings."""
    values = [value.strip() for value in named]
    values += [
        value
        for value in map(str.strip, telling)
        if len(value) >= LEAST_UNNAMED and not _is_plain(value)
    ]
    found: dict[str, None] = {}
    for value in values:
        lines = [line.strip() for line in value.splitlines()]
        for part in (
            *([value] if len(value) >= LEAST else []),
            *(line for line in lines if len(line) >= LEAST_LINE),
        ):
            spelt = (
                json.dumps(part)[1:-1],
                json.dumps(part, ensure_ascii=False)[1:-1],
                repr(part)[1:-1],
                quote(part, safe="", errors="surrogateescape"),
                quote(part, errors="surrogateescape"),
            )
            found |= dict.fromkeys(
                (part, *spelt, *_encoded(part.encode("utf-8", "surrogateescape")))
            )
    return tuple(found)


def _is_plain(value: str) -> bool:
    """Returns whether a value is the path of an existing file, and therefore not a secret."""
    return bool(PATH.fullmatch(value)) and Path(value).expanduser().exists()


def _encoded(value: bytes) -> Iterator[str]:
    """Yields the value's base64 encodings at each of the three alignments, whole and split into
    lines.

    Omits boundary digits, because they also depend on the neighboring bytes.
    """
    texts = []
    for before in range(3):
        first, last = -(-8 * before // 6), 8 * (before + len(value)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            own = encode(bytes(before) + value).decode()[first:last]
            texts += [
                own,
                *(
                    own[at : at + width]
                    for width in WRAPPED
                    for at in range(0, len(own), width)
                    if not before
                ),
            ]
    return (text for text in texts if len(text) >= LEAST_LINE)


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Yields the spans of all known secret values in a text. Spans may overlap."""
    for pattern in _patterns():
        start = text.find(pattern)
        while start >= 0:
            yield start, start + len(pattern)
            start = text.find(pattern, start + 1)
