"""Prints an image's packages as SPDX 2.3 JSON: the distribution's, and Python's with their source
(https://spdx.github.io/spdx-spec/v2.3/).

Imports only the standard library. The output contains no dates, so the same packages produce the
same text.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib import metadata


def main() -> None:
    packages = sorted((*system(), *python()), key=lambda package: package["SPDXID"])
    told = json.dumps(packages, sort_keys=True)
    name = re.sub(
        r"[^A-Za-z0-9.-]",
        "-",
        "-".join(platform.freedesktop_os_release().get(key, "") for key in ("ID", "VERSION_ID")),
    )
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"trainfleet on {name}",
        "documentNamespace": f"https://spdx.org/spdxdocs/trainfleet-{hashlib.sha256(told.encode()).hexdigest()[:32]}",
        "creationInfo": {"created": "1970-01-01T00:00:00Z", "creators": ["Tool: trainfleet"]},
        "packages": packages,
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": package["SPDXID"],
            }
            for package in packages
        ],
    }
    print(json.dumps(document, indent=1))


def system() -> Iterator[dict[str, object]]:
    """Yields the packages of dpkg or rpm."""
    for words in (
        ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"],
        ["rpm", "-qa", "--qf", "%{NAME} %{VERSION}-%{RELEASE} %{ARCH}\n"],
    ):
        try:
            said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        except (FileNotFoundError, subprocess.CalledProcessError):
            continue
        kind, distribution = (
            ("deb" if words[0].startswith("dpkg") else "rpm"),
            platform.freedesktop_os_release().get("ID", "linux"),
        )
        for name, version, architecture in (line.split() for line in said.splitlines()):
            yield package(
                f"{kind}-{name}-{architecture}",
                name,
                version,
                f"pkg:{kind}/{distribution}/{name}@{version}?arch={architecture}",
            )


def python() -> Iterator[dict[str, object]]:
    for found in metadata.distributions():
        yield package(
            f"python-{found.name}",
            found.name,
            found.version,
            f"pkg:pypi/{found.name.lower()}@{found.version}",
        )


def package(identity: str, name: str, version: str, url: str) -> dict[str, object]:
    reference = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": url,
    }
    return {
        "SPDXID": f"SPDXRef-{re.sub(r'[^A-Za-z0-9.-]', '-', identity)}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "externalRefs": [reference],
    }


if __name__ == "__main__":
    main()
