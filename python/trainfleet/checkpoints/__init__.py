"""Checkpoint formats and storage without torch, for both the control plane and the engine.

marker:     last file of a save, with all checksums, which makes a folder a checkpoint; also the
            rules for config changes on resume
store:      storage in a folder or in S3, in which checkpoints appear atomically; lists valid and
            broken ones for verification, resuming and retention
index:      tensors of a checkpoint, and where their pieces are stored
init_from:  checks of the model in train.init_from before a run starts
"""

from __future__ import annotations
