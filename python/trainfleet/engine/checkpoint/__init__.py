"""Saves a run while it trains, and resumes it. What exists, and whether it is good,
trainfleet.checkpoints decides.

checkpoints   what the training loop calls
saving        a save in the background: begin, write, commit, remove old ones
snapshot      a rank's part of the state, copied to the host
resuming      the newest good checkpoint, checked and loaded
rng_state     the state of the random number generators
files         reads and writes safetensors in a store
checkpoint_group  what all ranks do together, on a process group of their own
verify        reads one checkpoint through: `python -m trainfleet.engine.checkpoint.verify`
"""

from __future__ import annotations

from .checkpoints import Checkpoints, Saved, TrainingProgress
from .resuming import load_model, newest

__all__ = ["Checkpoints", "Saved", "TrainingProgress", "load_model", "newest"]
