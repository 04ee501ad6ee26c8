"""Reduces the configuration of pip and uv to the package sources and how to reach them.

run COMMAND...   runs pip or uv with only these settings
check            lists unused settings in one line; exits with 2 if the configuration is invalid
show             prints the settings as JSON, including passwords: for programs, not for logs

The locks pin each file by its SHA-256, so a constraint, a target or another personal setting could
only break an installation. Sources: https://pip.pypa.io/en/stable/topics/configuration/,
https://docs.astral.sh/uv/reference/environment/ and /settings/
"""

from __future__ import annotations

import configparser
import http.client
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# pip's options for package sources, and uv's equivalent environment variables
SOURCES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "HTTPS_PROXY",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "index-strategy": "UV_INDEX_STRATEGY",  # uv only
}
OTHER_NAMES = {  # aliases: pip's, uv's older variables, and the keys of uv.toml
    "pypi-url": "index-url",
    "default-timeout": "timeout",
    "allow-insecure-host": "trusted-host",
    "insecure-host": "trusted-host",
    "default-index": "index-url",
    "index": "extra-index-url",
    "http-timeout": "timeout",
    "request-timeout": "timeout",
    "http-retries": "retries",
}
LISTS = ("extra-index-url", "find-links", "trusted-host")
# options for caches and output, which do not affect the installed packages
KEPT = (
    "cache-dir",
    "no-cache",
    "no-cache-dir",
    "disable-pip-version-check",
    "link-mode",
    "config-file",
    "no-config",
)
UV_ONLY = ("index-strategy",)
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


class Refused(Exception):
    """Configuration error: what, where, and the next command."""

    def __init__(self, what: str, where: str, then: str, why: str = "") -> None:
        super().__init__(what)
        self.parts = {"what": what, "where": where, "why": why, "next": then}

    def __str__(self) -> str:
        head, *rest = ((name, text) for name, text in self.parts.items() if text)
        return "\n".join([f"error: {head[1]}", *(f"  {name}: {text}" for name, text in rest)])


class Settings:
    """Options with their values and sources, and the unused options."""

    def __init__(self) -> None:
        self.values = dict[str, str]()
        self.places = dict[str, str]()
        self.unused = dict[str, str]()

    def take(self, name: str, value: str, place: str) -> None:
        name = OTHER_NAMES.get(name, name)
        if name in SOURCES and value.strip():
            self.values[name] = " ".join(value.split()) if name in LISTS else value.strip()
            self.places[name] = place
        elif name not in KEPT and name not in SOURCES:
            self.unused[name] = place

    def complete(self, other: Settings) -> None:
        """Adds the other program's settings for options that are not set here."""
        self.values = other.values | self.values
        self.places = other.places | self.places
        self.unused |= other.unused


def settings_of(program: str, environment: Mapping[str, str]) -> Settings:
    """Returns the settings of pip or uv, completed from the other program's."""
    first, second = _pip(environment), _uv(environment)
    if program == "uv":
        first, second = second, first
    first.complete(second)
    if "cert" not in first.values:
        place = next(
            (name for name in CERTIFICATES if Path(environment.get(name, "")).is_file()), ""
        )
        first.take("cert", environment.get(place, ""), place)
    for name in ("cert", "client-cert"):
        file = first.values.get(name, "")
        if file and not Path(file).exists():
            raise Refused(
                f"{name} names {file}, which does not exist",
                first.places[name],
                f"correct {name} there, or remove it",
            )
    return first


def _pip(environment: Mapping[str, str]) -> Settings:
    found = Settings()
    files = list(_pip_files(environment))
    parsed = [(file, _parse_ini(file)) for file in files if file.is_file()]
    for section in ("global", "install"):  # [install] overrides [global]
        for file, parser in parsed:
            for name, value in parser.items(section) if parser.has_section(section) else ():
                found.take(name.replace("_", "-").removeprefix("--"), value, str(file))
    _take_variables(found, "PIP_", environment)
    return found


def _pip_files(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yields pip's configuration files; later ones override earlier ones."""
    chosen = environment.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return
    home = Path(environment.get("HOME") or "~").expanduser()
    for folder in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep):
        yield Path(folder, "pip/pip.conf")
    yield Path("/etc/pip.conf")
    if not (chosen and Path(chosen).exists()):
        yield home / ".pip/pip.conf"
        yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config", "pip/pip.conf")
    yield Path(sys.prefix, "pip.conf")
    if chosen:
        yield Path(chosen)


def _parse_ini(file: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    try:
        parser.read(str(file), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None) or next(
            (number for number, _ in getattr(error, "errors", ())), None
        )
        why = (
            str(error)
            .splitlines()[0]
            .removeprefix("Source contains ")
            .replace(f"'{file}'", "it")
            .removesuffix(": it")
        )
        raise Refused(
            "pip's configuration can't be read",
            f"{file}:{line}" if line else str(file),
            "correct that line; python3 -m pip config debug shows which files pip reads",
            why,
        ) from None
    return parser


def _uv(environment: Mapping[str, str]) -> Settings:
    found = Settings()
    for file in _uv_files(environment):
        table = _parse_toml(file)
        for part in (table, table.get("pip", {})):
            for name, value in part.items() if isinstance(part, dict) else ():
                _take_toml(found, name, value, str(file))
    _take_variables(found, "UV_", environment)
    return found


def _uv_files(environment: Mapping[str, str]) -> Iterator[Path]:
    if environment.get("UV_NO_CONFIG"):
        return
    if chosen := environment.get("UV_CONFIG_FILE"):
        files = [Path(chosen)]
    else:
        folders = [*(environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep), "/etc"]
        home = Path(environment.get("HOME") or "~").expanduser()
        system = next(
            (file for folder in folders if (file := Path(folder, "uv/uv.toml")).is_file()),
            Path("/etc/uv/uv.toml"),
        )
        files = [
            system,
            Path(environment.get("XDG_CONFIG_HOME") or home / ".config", "uv/uv.toml"),
            Path("uv.toml"),
        ]
    yield from filter(Path.is_file, files)


def _parse_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{file}:{line[1]}" if line else str(file)
        raise Refused(
            "uv's configuration can't be read", place, "correct that line", str(error)
        ) from None


def _take_toml(found: Settings, name: str, value: Any, place: str) -> None:
    if name == "index" and isinstance(
        value, list
    ):  # a list of tables, one of which may be the default
        urls = [
            (bool(entry.get("default")), str(entry.get("url", "")))
            for entry in value
            if isinstance(entry, dict)
        ]
        found.take("index-url", next((url for default, url in urls if default), ""), place)
        found.take("extra-index-url", " ".join(url for default, url in urls if not default), place)
    elif isinstance(value, list):
        found.take(name, " ".join(map(str, value)), place)
    elif name not in ("pip", "sources", "workspace"):
        found.take(
            name,
            "" if value is False else str(value).lower() if value is True else str(value),
            place,
        )


def _take_variables(found: Settings, prefix: str, environment: Mapping[str, str]) -> None:
    for name, value in sorted(environment.items()):
        if (
            name.startswith(prefix)
            and value
            and not re.fullmatch(r"UV_INDEX_\w+_(USERNAME|PASSWORD)", name)
        ):
            option = name.removeprefix(prefix).lower().replace("_", "-")
            value = value.replace(",", " ") if name == "UV_FIND_LINKS" else value
            found.take(option, value, name)


def environment_of(
    program: str, settings: Settings, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment for pip or uv, with these settings instead of their configuration
    files.
    """
    prefix = "UV_" if program == "uv" else "PIP_"
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(prefix)
        or _option(name) in KEPT
        or re.fullmatch(r"UV_INDEX_\w+_(USERNAME|PASSWORD)", name)
    }
    if program != "uv":
        made = {
            f"PIP_{name.upper().replace('-', '_')}": value
            for name, value in settings.values.items()
            if name not in UV_ONLY
        }
        return kept | made | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1"}
    kept.pop("UV_CONFIG_FILE", None)
    made = {SOURCES[name]: value for name, value in settings.values.items()}
    made["UV_FIND_LINKS"] = made.get("UV_FIND_LINKS", "").replace(" ", ",")
    if "HTTPS_PROXY" in made:
        made["HTTP_PROXY"] = made["HTTPS_PROXY"]
    return kept | {name: value for name, value in made.items() if value} | {"UV_NO_CONFIG": "1"}


def _option(variable: str) -> str:
    return variable.partition("_")[2].lower().replace("_", "-")


def run(command: list[str]) -> int:
    """Runs the command. If an index refused it, prints the required credentials."""
    program = "uv" if Path(command[0]).name == "uv" else "pip"
    settings = settings_of(program, os.environ)
    code = subprocess.run(
        command, env=environment_of(program, settings, os.environ), check=False
    ).returncode
    for name in ("index-url", "extra-index-url") if code else ():
        if any(map(wants_password, settings.values.get(name, "").split())):
            then = f"write it into {name} there, https://USER:PASSWORD@HOST/..., or into ~/.netrc"
            print(
                Refused("the package index asks for a password", settings.places[name], then),
                file=sys.stderr,
            )
    return code


def wants_password(address: str) -> bool:
    """Returns whether an index requires a password. pip reports only that it found no versions."""
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return False


def main(words: list[str]) -> int:
    try:
        if words[:1] == ["run"] and words[1:]:
            return run(words[1:])
        settings = settings_of("pip", os.environ)
    except Refused as refused:
        if words == ["show"]:
            print(json.dumps({"refused": refused.parts}))
            return 0
        print(refused, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if words == ["show"]:
        print(
            json.dumps(
                {"values": settings.values, "places": settings.places, "unused": settings.unused}
            )
        )
    elif words == ["check"] and settings.unused:
        names = ", ".join(f"{name} ({place})" for name, place in sorted(settings.unused.items()))
        print(f"not used, as the locks pin each file: {names}")
    elif words != ["check"]:
        print("usage: pip_sources.py check | show | run COMMAND...", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
