"""Parses YAML and records the line of every key.

Follows YAML 1.2, so `on` is a string and `3e-4` a number.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..trust.errors import Problem
from ..trust.untrusted_input import shortened, show, unprintable
from .tables import read_table

Key = tuple[str | int, ...]
# Maximum number of values in a document, with aliases expanded. A fleet of 4,096 hosts needs half
# as many.
MOST = 20_000
DEEPEST = 12  # maximum nesting depth; the schema has five levels
LARGEST = 2**63
SMALLEST = 2.0**-126  # smallest nonzero magnitude: the smallest normal fp32 number
PREFIX = "tag:yaml.org,2002:"
# Allowed tags. Any other tag would create a Python object.
TAGS: dict[type[yaml.Node], tuple[str, ...]] = {
    yaml.ScalarNode: tuple(PREFIX + name for name in ("str", "int", "float", "bool", "null")),
    yaml.SequenceNode: (f"{PREFIX}seq",),
    yaml.MappingNode: (f"{PREFIX}map",),
}
LONGEST_KEY = 64  # maximum key length in characters
_COLON = re.compile(r":(?=\s|$)", re.ASCII)
BROKEN = object()  # placeholder for a value with a reported problem


class _Loader(yaml.SafeLoader):
    """YAML loader with YAML 1.2 core scalars.

    PyYAML follows YAML 1.1, where `3e-4` is a string, `1_000` and `1:30` are numbers and `on` is
    true.
    """

    depth = count = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Limits the nesting depth and the number of nodes, because PyYAML's recursion is
        unbounded.
        """
        self.depth, self.count = self.depth + 1, self.count + 1
        if self.depth > DEEPEST or self.count > MOST:
            what = (
                f"is nested more than {DEEPEST} levels deep"
                if self.depth > DEEPEST
                else f"has more than {MOST:,} values"
            )
            raise yaml.MarkedYAMLError(problem=what, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def scan_to_next_token(self) -> None:
        """Also skips tabs, which YAML allows as separators but not as indentation."""
        super().scan_to_next_token()
        while self.peek() == "\t" and (
            self.flow_level or not self.allow_simple_key or self._only_blanks()
        ):
            self.forward()
            super().scan_to_next_token()

    def _only_blanks(self) -> bool:
        """Returns whether the rest of the line is blank or a comment."""
        length = 0
        while self.peek(length) in ("\t", " "):
            length += 1
        return self.peek(length) in "\0\r\n#"


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first)
    )


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if re.fullmatch("[-+]?0[0-9]+", text):
        raise ValueError(
            f"is {text}, which YAML 1.1 reads as octal and YAML 1.2 as decimal; remove the "
            "leading 0"
        )
    if len(text) > 20 or abs(number := int(text)) >= LARGEST:
        raise ValueError(
            f"is a number of {len(text.lstrip('+-'))} digits, which is too large for any key"
        )
    return number


def _real(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | int:
    number = float(
        str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan")
    )
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {shortened(node.value)}")
    if abs(number) < SMALLEST and re.search("[1-9]", node.value.lower().partition("e")[0]):
        raise ValueError(
            f"is {shortened(node.value)}, which is too small for 32 bits; use 0 or a larger number"
        )
    # so that 1e3 is a valid step count; float keys convert it back
    return int(number) if number.is_integer() else number


def _boolean(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node)).lower()
    if text not in ("true", "false"):  # possible only with an explicit tag
        raise ValueError("must be true or false")
    return text == "true"


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _real)
_Loader.add_constructor("tag:yaml.org,2002:bool", _boolean)


@dataclass
class YamlDocument:
    """Parsed document, with the location of each key and the problems found.

    A location is a file and line, or the variable that set the key.
    """

    value: Any
    source: str
    lines: dict[Key, int] = field(default_factory=dict)
    overridden: dict[Key, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    text: str = ""

    def where(self, key: Key) -> tuple[int, str]:
        """Returns a key's line (0 for a variable) and location.

        A missing key gets the location of its nearest parent.
        """
        below = (name for known, name in self.overridden.items() if known[: len(key)] == key)
        if key not in self.lines and (name := next(below, None)):
            return 0, name  # the group exists only because a variable set a key in it
        for end in range(len(key), -1, -1):
            if key[:end] in self.overridden:
                return 0, self.overridden[key[:end]]
            if key[:end] in self.lines:
                return self.lines[key[:end]], f"{self.source}:{self.lines[key[:end]]}"
        return 1, f"{self.source}:1"

    def report(self, key: str, message: str) -> None:
        """Records a problem at a key's location."""
        self.problems.append(Problem(*self.where(tuple(key.split("."))), key, message))

    def set(self, key: Key, value: Any, source: str) -> None:
        """Sets a key on behalf of the variable `source`, and removes the keys below it."""
        size = len(key)
        self.lines = {known: line for known, line in self.lines.items() if known[:size] != key}
        self.overridden = {
            known: name for known, name in self.overridden.items() if known[:size] != key
        } | {key: source}
        target = self.value
        for part in key[:-1]:
            target = target.setdefault(part, {})
        target[key[-1]] = value


def read(text: str, source: str) -> YamlDocument:
    """Parses a config file.

    Records syntax errors, duplicate keys and values that no key accepts as problems.
    """
    document = YamlDocument(None, source, text=text)
    document.value = _Reader(document, (), lambda line: (line, f"{source}:{line}")).read(text)
    return document


def read_value(text: str, variable: str, key: Key) -> YamlDocument:
    """Parses the value in `SET='key=value'` as YAML, so that 4, 3e-4, null and [a, b] keep their
    types.
    """
    document = YamlDocument(None, variable)
    document.value = _Reader(document, key, lambda line: (0, variable)).read(text)
    return document


def dotted(key: Key) -> str:
    """Formats ("data", "sources", 0) as `data.sources[0]`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _plainly(error: yaml.MarkedYAMLError) -> str:
    """Describes a syntax error without PyYAML's terminology."""
    told = " ".join(filter(None, (error.context, error.problem)))
    table = read_table(Path(__file__).with_name("yaml_errors.yaml"))
    plain = next((words for said, words in table.items() if said in told), told)
    opened = error.context_mark
    since = (
        opened
        and error.problem_mark
        and opened.line < error.problem_mark.line
        and "not closed" in plain
    )
    return f"{plain} (since line {opened.line + 1})" if opened and since else plain


def _behind_another(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str] | None:
    """Returns the line and the reason if a key is rejected because of the line before it, with
    which YAML combines it.
    """
    mark = error.problem_mark
    if mark is None or "mapping values are not allowed" not in str(error.problem):
        return None
    lines = text.splitlines()
    first = _COLON.search(lines[mark.line])
    if first is None or first.start() < mark.column:
        return None  # the line contains a `: ` before the error
    line = mark.line + 1
    above = (at for at in range(mark.line, 0, -1) if re.match(r"\s*[^\s#]", lines[at - 1]))
    before = next(above, None)
    if before is None:
        return (line, "has a key of more than 1,024 characters") if mark.column > 1024 else None
    if _COLON.search(lines[before - 1]):
        return line, f"is indented deeper than line {before}, which already has a value"
    alike = (each for each in lines[before - 1] if each not in " :")
    strange = next((each for each in alike if unicodedata.normalize("NFKC", each) in " :"), "")
    but = f", but the character U+{ord(strange):04X}" if strange else ""
    return before, f"has no `: ` after its key{but}"


def _quoted(text: str, line: int) -> str:
    """Quotes a line of the text at the end of a message. Returns "" if the line is blank."""
    lines = text.splitlines()[line - 1 : line]
    return f": {show(lines[0].strip())}" if lines and lines[0].strip() else ""


class _Reader:
    """Converts YAML nodes to plain values, and collects their problems.

    `locate` maps a line number to its location.
    """

    def __init__(
        self, document: YamlDocument, prefix: Key, locate: Callable[[int], tuple[int, str]]
    ) -> None:
        self.document, self.prefix, self.locate, self.count = document, prefix, locate, 0

    def read(self, text: str) -> Any:
        try:
            self.loader = _Loader(text)
            node = self.loader.get_single_node()
            value = self._walk(node, self.prefix) if node is not None else None
            return None if value is BROKEN else value
        except yaml.MarkedYAMLError as error:
            # PyYAML detects a missing colon only at the next key
            mark = error.context_mark if "expected ':'" in str(error) else error.problem_mark
            line = mark.line + 1 if mark else 1
            line, what = _behind_another(error, text) or (line, _plainly(error))
            self._blame(self.prefix, line, f"not valid YAML: {what}{_quoted(text, line)}")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self._blame(
                self.prefix,
                line,
                f"not valid YAML: the character U+{ord(text[error.position]):04X} is not allowed "
                "here",
            )
        return None

    def _blame(self, key: Key, line: int, message: str) -> object:
        self.document.problems.append(Problem(*self.locate(line), dotted(key), message))
        return BROKEN

    def _walk(self, node: yaml.Node, key: Key) -> Any:
        line = node.start_mark.line + 1
        self.document.lines.setdefault(key, line)
        self.count += 1
        if self.count > MOST or len(key) > DEEPEST:
            what = (
                "is nested too deeply or in itself"
                if len(key) > DEEPEST
                else f"has more than {MOST:,} values with its aliases"
            )
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        if node.tag not in TAGS[type(node)]:
            return self._blame(
                key,
                line,
                f"has the tag {show(node.tag.replace(PREFIX, '!!'))}, which is not supported",
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            items = [self._walk(item, (*key, index)) for index, item in enumerate(node.value)]
            return BROKEN if BROKEN in items else items
        return self._scalar(node, key, line)

    def _scalar(self, node: yaml.Node, key: Key, line: int) -> Any:
        try:
            value = self.loader.construct_object(node)
        except ValueError as error:
            message = (
                str(error)
                if str(error).startswith(("is", "must"))
                else f"{show(node.value)} does not match its tag"
            )
            return self._blame(key, line, message)
        if isinstance(value, str) and "\n" in value:
            return self._blame(key, line, "has several lines; write its value on one line")
        if isinstance(value, str) and (character := unprintable(value)):
            return self._blame(key, line, f"contains {character}, which is not allowed")
        if isinstance(value, str) and value.isspace():
            return self._blame(key, line, "is blank")
        return value

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        value: dict[str, Any] = {}
        lines = dict[str, int]()
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else ""
            if not name or len(name) > LONGEST_KEY or unprintable(name):
                self._blame((*key, show(name)), line, "is not a key: a key is one short word")
            elif name in lines:
                self._blame(
                    (*key, name), line, f"duplicate key; it is already on line {lines[name]}"
                )
            else:
                lines[name] = self.document.lines[(*key, name)] = line
                item = self._walk(value_node, (*key, name))
                if item is not BROKEN:
                    value[name] = item
        return value
