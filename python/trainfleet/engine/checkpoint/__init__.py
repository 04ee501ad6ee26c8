"""Saves checkpoints during training and resumes from them.

trainfleet.checkpoints defines which checkpoints are valid.

    checkpoints   save and resume interface for the training loop
    saving        host snapshots; background writes, commits and cleanup of old checkpoints
    resuming      verifying and loading the newest valid checkpoint; random number generators
    files         safetensors files in a store
    checkpoint_group  collectives on a separate process group
    verify        full read of one checkpoint: `python -m trainfleet.engine.checkpoint.verify`
"""

from __future__ import annotations

from .checkpoints import Checkpoints, Saved, TrainingProgress
from .resuming import load_model, newest

__all__ = ["Checkpoints", "Saved", "TrainingProgress", "load_model", "newest"]
