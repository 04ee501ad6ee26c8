"""Saves a run during training, and resumes it. trainfleet.checkpoints defines which checkpoints are
valid.

    checkpoints   interface for the training loop
    saving        snapshot on the host; background write, commit and removal of old checkpoints
    resuming      verification and loading of the newest valid checkpoint; random number generators
    files         safetensors files in a store
    checkpoint_group  collectives of all ranks, on a separate process group
    verify        complete read of one checkpoint: `python -m trainfleet.engine.checkpoint.verify`
"""

from __future__ import annotations

from .checkpoints import Checkpoints, Saved, TrainingProgress
from .resuming import load_model, newest

__all__ = ["Checkpoints", "Saved", "TrainingProgress", "load_model", "newest"]
