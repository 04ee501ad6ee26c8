"""What CloudFormation makes of a template's text: parameters, conditions and functions, and which resource needs which."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .account import Refused

Template = Mapping[str, Any]


def needs(resource: Mapping[str, Any], names: set[str]) -> set[str]:
    """The resources that one refers to, in its properties or by DependsOn."""
    found = set(
        [resource["DependsOn"]]
        if isinstance(resource.get("DependsOn"), str)
        else resource.get("DependsOn", ())
    )

    def walk(value: Any) -> None:
        match value:
            case {"Ref": str(name)}:
                found.add(name)
            case {"Fn::GetAtt": [str(name), *_]}:
                found.add(name)
            case {"Fn::GetAtt": str(path)}:
                found.add(path.partition(".")[0])
            case {"Fn::Sub": str(text)}:
                found.update(re.findall(r"\$\{([A-Za-z0-9]+)", text))
            case {"Fn::Sub": [str(text), Mapping() as own]}:
                found.update(set(re.findall(r"\$\{([A-Za-z0-9]+)", text)) - set(own))
                walk(own)
            case Mapping():
                for part in value.values():
                    walk(part)
            case list():
                for part in value:
                    walk(part)

    walk(resource.get("Properties", {}))
    return found & names


class Resolver:
    """The values of a template for given parameters. `ref` and `attribute` answer for resources."""

    def __init__(
        self, template: Template, parameters: Mapping[str, str], pseudo: Mapping[str, Any], zones: list[str],
        ref: Callable[[str], str], attribute: Callable[[str, str], Any],
    ) -> None:  # fmt: skip
        self.template, self.parameters, self.pseudo, self.zones, self.ref, self.attribute = (
            template,
            parameters,
            pseudo,
            zones,
            ref,
            attribute,
        )

    def holds(self, condition: Any) -> bool:
        """Whether a condition, by name or as written, is true."""
        match condition:
            case str():
                return self.holds(self.template["Conditions"][condition])
            case {"Fn::Equals": [one, other]}:
                return bool(self.value(one) == self.value(other))
            case {"Fn::Not": [one]}:
                return not self.holds(one)
            case {"Fn::And": list(all_)}:
                return all(map(self.holds, all_))
            case {"Fn::Or": list(any_)}:
                return any(map(self.holds, any_))
            case {"Condition": str(name)}:
                return self.holds(name)
        raise Refused("ValidationError", f"Template format error: condition {condition}")

    def value(self, raw: Any) -> Any:
        match raw:
            case {"Ref": "AWS::NoValue"}:
                return None
            case {"Ref": str(name)}:
                return self.named(name)
            case {"Fn::GetAtt": [str(name), str(attribute)]}:
                return self.attribute(name, attribute)
            case {"Fn::GetAtt": str(path)}:
                return self.attribute(*path.split(".", 1))
            case {"Fn::Sub": str(text)}:
                return self.substitute(text, {})
            case {"Fn::Sub": [str(text), Mapping() as own]}:
                return self.substitute(text, {key: self.value(part) for key, part in own.items()})
            case {"Fn::Join": [str(glue), parts]}:
                return glue.join(map(str, self.value(parts)))
            case {"Fn::Select": [index, parts]}:
                return self.value(parts)[int(index)]
            case {"Fn::Split": [str(glue), text]}:
                return self.value(text).split(glue)
            case {"Fn::GetAZs": _}:
                return self.zones
            case {"Fn::Cidr": [_, count, _]}:
                return [f"10.0.{number * 16}.0/20" for number in range(int(count))]
            case {"Fn::Base64": text}:
                return self.value(text)
            case {"Fn::If": [str(name), yes, no]}:
                return self.value(yes if self.holds(name) else no)
            case {"Fn::FindInMap": [name, *keys]}:
                found = self.template["Mappings"][self.value(name)]
                for key in keys:
                    found = found[self.value(key)]
                return found
            case Mapping() if any(str(key).startswith("Fn::") for key in raw):
                raise Refused(
                    "ValidationError", f"Template error: unsupported function {next(iter(raw))}"
                )
            case Mapping():
                resolved = {key: self.value(part) for key, part in raw.items()}
                return {key: part for key, part in resolved.items() if part is not None}
            case list():
                return [part for part in map(self.value, raw) if part is not None]
        return raw

    def named(self, name: str) -> Any:
        if name in self.pseudo:
            return self.pseudo[name]
        if name in self.template.get("Parameters", {}):
            declared = self.template["Parameters"][name]["Type"]
            text = self.parameters[name]
            return (
                text.split(",")
                if declared.startswith("List<") or declared == "CommaDelimitedList"
                else text
            )
        return self.ref(name)

    def substitute(self, text: str, own: Mapping[str, Any]) -> str:
        def put(match: re.Match[str]) -> str:
            name = match[1]
            if name.startswith("!"):
                return "${" + name[1:] + "}"
            if name in own:
                return str(own[name])
            return str(self.attribute(*name.split(".", 1)) if "." in name else self.named(name))

        return re.sub(r"\$\{([^}]+)\}", put, text)
