"""Checkpoints as both planes see them: which exist, whether they are whole, which stay. No torch;
the bytes are the engine's.

marker      what makes a checkpoint of a folder of files: written last, with the checksum of each
store       where they lie: a folder of a local or shared file system (`bucket` is the other one),
            and how one appears at once
index       which tensors it holds, and where each of their pieces lies
listing     what is there: good, broken; what verifying, going on and retention make of it
changes     what of the config may differ when a run goes on, what may not, and why
"""

from __future__ import annotations
