"""Saves a run while it trains, and resumes it. trainfleet.checkpoints decides which checkpoints
exist and are good.

    checkpoints   called by the training loop
    saving        a copy on the host, and a save in the background: write, commit, remove old ones
    resuming      the newest good checkpoint, checked and loaded; random number generators
    files         reads and writes safetensors in a store
    checkpoint_group  collective steps of all ranks, on a separate process group
    verify        reads one checkpoint completely: `python -m trainfleet.engine.checkpoint.verify`
"""

from __future__ import annotations

from .checkpoints import Checkpoints, Saved, TrainingProgress
from .resuming import load_model, newest

__all__ = ["Checkpoints", "Saved", "TrainingProgress", "load_model", "newest"]
