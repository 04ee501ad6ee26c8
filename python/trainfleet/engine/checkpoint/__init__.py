"""Checkpoints: which of them exist (`commit`, no torch), what is in them (`state`), and saving and resuming a run with both."""

from __future__ import annotations

from .commit import Commit, Identity, committed, identity_of, newest
from .state import Checkpoints, Progress, load_model

__all__ = ["Checkpoints", "Commit", "Identity", "Progress", "committed", "identity_of", "load_model", "newest"]
