"""Code that a crafted file would run in the process that reads it: what it tries, and whether the wall lets it."""

from __future__ import annotations

ATTEMPT = """
import os, socket
from pathlib import Path
def attempt(name, does):
    try:
        does(); print("DONE", name, flush=True)
    except OSError:
        print("REFUSED", name, flush=True)
"""
