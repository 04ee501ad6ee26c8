"""Finds secrets and hides them in text: by the name of their variable, and by their form.

Values are secret if TRAINFLEET_SECRETS names their variables (fleet.secrets), or if the names end
like a secret's. A value is hidden in four spellings: as it is, in JSON and Python, in URLs and in
base64, also inside longer base64, as in headers. If a value has several lines, each longer line is
hidden too, as logs are written line by line. Overlapping secrets are hidden together. A secret that
no variable here holds is recognized by its form: its maker's prefix, or the text before it.
Standard library only: supervisors start with it.
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
# characters of a value, and of one of its lines: shorter ones would hide half of every text
LEAST, LEAST_LINE = (4, 8)
LEAST_UNNAMED = 12  # characters of a value that only its variable's name marks as secret
WRAPPED = (64, 76)  # letters per line of base64: RFC 7468's, RFC 2045's
UNFINISHED = 4096  # characters of an unfinished line in which a secret may begin
# Variables that hold a secret; ours name jobs, and a public key is not secret.
TELLING = re.compile(
    r"(?!TRAINFLEET_)(?!.*PUBLIC).*(_TOKEN|_KEY|_SECRET|_PASSWORD)|AWS_ACCESS_KEY_ID"
)
PATH = re.compile(r"~?/[\w.+@-]+(/[\w.+@-]+)*/?")  # a path: such a variable may name a file instead
# Prefix → the rest of the secret: AWS's access keys, Hugging Face, OpenAI and Anthropic, GitHub,
# GitLab, Slack, Google, PyPI, npm, NVIDIA, JSON Web Tokens (RFC 7519). Each as its maker documents
# it.
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
# Text between a name and its value in URLs, headers, JSON, Python and shell; then such a value.
_IS = r"[\\\"']{0,3}\s{0,4}(?:=|%3D|:)\s{0,4}b?[\\\"']{0,3}"
_VALUE = r"(?![/~$<{*.])[^\s&\"'<>,;`\\]"
_NAMES = r"(?<!TRAINFLEET)_(?:TOKEN|KEY|SECRET|PASSWORD)"
# parameters in an address
_SIGNED = "Signature|sig|AWSAccessKeyId|GoogleAccessId|access_token|api_key|apikey"
_AUTHORIZED = rf"Authorization{_IS}(?:Basic|Bearer|token)\s"
_ADDRESSED = r"[^/\s@:]*:[^/\s@]+(?=@)|(?<=https://)[^/\s@]+(?=@)|(?<=http://)[^/\s@]+(?=@)"
_CONTEXTS = tuple(  # the text before a secret, and the secret
    re.compile(f"({before})({secret})", flags)
    for before, secret, flags in (
        (rf"X-(?:Amz|Goog)-(?:Signature|Security-Token|Credential){_IS}", f"{_VALUE}+", re.I),
        (rf"[?&](?:{_SIGNED})=", f"{_VALUE}{{8,}}", re.I),
        (rf"Signature{_IS}", r"[0-9a-f]{64}\b", 0),  # in AWS's Authorization header
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
_HINTS = (  # a text without one of these holds no form: this check passes most lines
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


def _begin(word: str, behind: str) -> str:
    """Returns a pattern for this word's beginnings, and for the word followed by `behind`."""
    for letter in reversed(word[1:]):
        behind = f"(?:{re.escape(letter)}{behind})?"
    return re.escape(word[0]) + behind


def _any(words: Iterable[str], behind: str) -> str:
    return "|".join(_begin(word, behind) for word in words)


_WORDS = ("Signature", "aws_", "SecretAccessKey", "SessionToken", "AccessKeyId", "Authorization",
          "Bearer", "wandb", "api_key", "api key", "api-key", "apikey")  # fmt: skip
_ENDINGS = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
# the end of an unfinished line, from the place where a secret may begin
_OPEN = re.compile(
    rf"(?:(?<![A-Za-z0-9])(?:{_any(PREFIXES, '[^ ]*')}|(?i:{_any(_WORDS, '.*')}))"
    rf"|(?i:{_any(('X-Amz-', 'X-Goog-'), '.*')})|{_any(_ENDINGS, '.*')}"
    rf"|{_any(('https://', 'http://', '://'), '[^/ @]*@?')}|[?&][A-Za-z_]*(?:=[^& ]*)?)\Z"
)


def keep_secret(names: Iterable[str]) -> None:
    """Registers variables with values to hide from now on, here and in every process that this one
    starts.
    """
    known = filter(None, os.environ.get(NAMES, "").split(","))
    if all_names := list(dict.fromkeys((*known, *names))):
        os.environ[NAMES] = ",".join(all_names)


def hide(text: str) -> str:
    """Returns the text with *** for every secret in it."""
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
    """Tells whether a text contains a secret's form."""
    return any(True for _ in _forms(text))


def hide_bytes(line: bytes) -> bytes:
    """Hides secrets like `hide`, in bytes that need not be UTF-8."""
    return hide(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def hide_all(value: Any) -> Any:
    """Hides secrets in all strings of a JSON value; keys are ours."""
    match value:
        case str():
            return hide(value)
        case dict():
            return {key: hide_all(inner) for key, inner in value.items()}
        case list() | tuple():
            return [hide_all(inner) for inner in value]
    return value


def begun(text: str) -> int:
    """Returns how many of the last characters must be held back because a secret may begin in
    them.
    """
    keep = _begun_form(text)
    for pattern in _patterns():
        sizes = range(len(pattern) - 1, keep, -1)
        keep = next((size for size in sizes if text.endswith(pattern[:size])), keep)
    cut = len(text) - keep
    for start, stop in sorted(_places(text), reverse=True) if keep else ():
        cut = start if start < cut < stop else cut
    return len(text) - cut


def _begun_form(text: str) -> int:
    """Counts like `begun`, for secrets recognized by their form: the end of the last line, after
    text that may come before a secret.
    """
    line = text[text.rfind("\n") + 1 :][-UNFINISHED:]
    return len(line) - found.start() if (found := _OPEN.search(line)) else 0


def _forms(text: str) -> Iterator[tuple[int, int]]:
    """Yields the places of text with a secret's form."""
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
    """Returns the variables that hold a secret according to their name."""
    return tuple(name for name in names if TELLING.fullmatch(name))


@functools.lru_cache(maxsize=4)
def _spellings(named: tuple[str, ...], telling: tuple[str, ...]) -> tuple[str, ...]:
    """Returns all strings to hide for these values."""
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
    """Tells whether a value is a file's path, and so not secret despite its variable's name."""
    return bool(PATH.fullmatch(value)) and Path(value).expanduser().exists()


def _encoded(value: bytes) -> Iterator[str]:
    """Yields a value in base64: at each offset the digits that depend only on it, and wrapped lines
    at offset 0.
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
    """Yields the places of all values in a text, including overlapping ones."""
    for pattern in _patterns():
        start = text.find(pattern)
        while start >= 0:
            yield start, start + len(pattern)
            start = text.find(pattern, start + 1)
