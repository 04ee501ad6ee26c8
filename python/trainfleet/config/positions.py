"""YAML read with the line of every key, by the 1.2 rules that people expect: `on` is a word, `3e-4` is a number."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import Problem

Key = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """YAML 1.2 core scalars. PyYAML's own are 1.1, where `3e-4` is text, `1_000` and `1:30` are numbers and `on` is true."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # PyYAML takes 010 for octal


def _real(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | int:
    number = float(str(loader.construct_scalar(node)).replace(".inf", "inf").replace(".nan", "nan"))
    return int(number) if number.is_integer() else number  # 1e3 steps are 1,000 steps; where a key is a real, it is one again


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _real)


@dataclass
class Document:
    """Plain values, where each key stands (file name and line, or the variable that set it), and what was wrong with the text."""

    value: Any
    source: str
    lines: dict[Key, int] = field(default_factory=dict)
    overridden: dict[Key, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, key: Key) -> tuple[int, str]:
        """Line (0 for a variable) and place of a key; of its nearest parent when the key itself is not there."""
        for end in range(len(key), -1, -1):
            if key[:end] in self.overridden:
                return 0, self.overridden[key[:end]]
            if key[:end] in self.lines:
                return self.lines[key[:end]], f"{self.source}:{self.lines[key[:end]]}"
        return 1, self.source


def read(text: str, source: str) -> Document:
    """The document in `text`; syntax errors, duplicate keys and keys that are no text are in its problems."""
    document = Document(None, source)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        document.value = _walk(loader, node, (), document) if node is not None else None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        said = " ".join(filter(None, (error.context, error.problem)))
        document.problems.append(Problem(line, f"{source}:{line}", "", f"not valid YAML: {said}"))
    except (yaml.YAMLError, ValueError) as error:
        document.problems.append(Problem(1, source, "", f"not valid YAML: {error}"))
    return document


def scalar(text: str) -> Any:
    """A value as written in `SET='key=value'`: any YAML, so that 4, 3e-4, null and [a, b] have their types."""
    return _Loader(text).get_single_data()


def _walk(loader: _Loader, node: yaml.Node, key: Key, document: Document) -> Any:
    document.lines.setdefault(key, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _walk_mapping(loader, node, key, document)
    if isinstance(node, yaml.SequenceNode):
        return [_walk(loader, item, (*key, index), document) for index, item in enumerate(node.value)]
    return loader.construct_object(node)


def _walk_mapping(loader: _Loader, node: yaml.MappingNode, key: Key, document: Document) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name_node, value_node in node.value:
        name = str(loader.construct_object(name_node, deep=True))
        line = name_node.start_mark.line + 1
        if name in value:
            first = document.lines[(*key, name)]
            message = f"duplicate key; it stands on line {first} already"
            document.problems.append(Problem(line, f"{document.source}:{line}", ".".join(map(str, (*key, name))), message))
            continue
        document.lines[(*key, name)] = line
        value[name] = _walk(loader, value_node, (*key, name), document)
    return value
