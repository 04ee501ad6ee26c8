"""The folder of a fleet's state between commands: trusted host keys, and hosts in quarantine."""

from __future__ import annotations

from pathlib import Path

STATE = Path(".fleet")
