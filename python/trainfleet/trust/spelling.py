"""Finds the known word closest to a misspelled key, value, verb, variable or recipe."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

CLOSE = 0.6  # minimum similarity for a suggestion
SLIP = 0.75  # minimum similarity to count as a typo
# Cyrillic and Greek letters → the Latin letters that look identical.
LETTERS = str.maketrans("аеорсухіѕјԁԛԝοανικτρυ", "aeopcyxisjdqwoaviktpu")


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X?` for the closest known word, or "" if no word is close."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word closest to `word`, or None if no word is close.

    Case and punctuation are ignored. Abbreviations of known words also match.
    """
    names = {form: name for name in known if (form := plain(name))}
    form = plain(word)
    if not form or form in names:
        return names.get(form)
    parts = [name for name in names if _has_parts(name, form)]
    best = max(names, key=lambda name: (likeness(form, name), -len(name)), default="")
    close = likeness(form, best) >= CLOSE or distance(form, best) <= 1
    initials = [name for name in names if "".join(part[0] for part in name.split("_")) == form]
    short = [name for name in names if _is_within(form, name)]
    # llama-1b matches llama-3.2-1b, but no other size
    for found in (parts, [best] * close, initials, short):
        if found:
            return names.get(min(found, key=len))
    return None


def slip(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that `word` is probably a typo of, or None if no word is close."""
    form = plain(word)
    names = {plain(name): name for name in known}
    near = [
        name
        for name in names
        if abs(len(name) - len(form)) <= max(1, (1 - SLIP) * max(len(name), len(form)) + 1)
    ]
    best = max(near, key=lambda name: (likeness(form, name), -len(name)), default="")
    sure = best and (likeness(form, best) >= SLIP or (distance(form, best) <= 1 and len(form) > 1))
    return names[best] if sure else None


def plain(word: str) -> str:
    """Converts a word to snake_case.

    learningRate, Learning-Rate and LEARNING_RATE all become learning_rate.
    """
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word[:80])
    letters = unicodedata.normalize("NFKD", parted.lower().translate(LETTERS))
    return re.sub(
        r"[^a-z0-9.]+", "_", "".join(c for c in letters if not unicodedata.combining(c))
    ).strip("_")


def likeness(word: str, other: str) -> float:
    """Returns the similarity of two words based on edit distance, from 0 to 1 (identical)."""
    return 1 - distance(word, other) / max(len(word), len(other), 1)


def distance(word: str, other: str) -> int:
    """Returns the restricted Damerau-Levenshtein distance, which counts a swap of adjacent letters
    as one edit.
    """
    before: list[int] = []
    row: list[int] = [*range(len(other) + 1)]
    for i, letter in enumerate(word, 1):
        last, before, row = before, row, [i]
        for j, mate in enumerate(other, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != mate))
            if i > 1 and j > 1 and letter == other[j - 2] and word[i - 2] == mate:
                least = min(least, last[j - 2] + 1)
            row.append(least)
    return row[-1]


def _has_parts(name: str, form: str) -> bool:
    """Returns whether `name` contains all parts of `form` in order. `form` must have several parts
    and a digit.
    """
    parts = iter(name.split("_"))
    several = len(form) > 2 and "_" in form and any("0" <= letter <= "9" for letter in form)
    return several and all(part in parts for part in form.split("_"))


def _is_within(word: str, name: str) -> bool:
    """Returns whether `word` could abbreviate `name`: its letters occur in `name` in order, and
    both start with the same letter.
    """
    letters = iter(name)
    return len(word) > 2 and name[0] == word[0] and all(letter in letters for letter in word)
