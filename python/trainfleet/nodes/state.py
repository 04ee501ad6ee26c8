"""What is remembered of a fleet between two commands: host keys that were vouched for, and the hosts that are in quarantine."""

from __future__ import annotations

from pathlib import Path

STATE = Path(".fleet")
