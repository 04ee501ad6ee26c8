"""Trains on any device that a rank has.

__main__       one rank of the job, from its environment to its exit code
trainer        the loop
world          the ranks: how they meet and agree
parallel/      every layout: each rank's part of the model, and how a step goes through the parts
optimizer      the config's one of optimizers, its learning rate at each step, clipping
step_guard     which steps to skip: loss or gradients not finite, or a spike
batches        a rank's part of each global batch, prefetched
vote           the vote by which all ranks stop or save at the same step
timing         the use of the seconds, tokens per second, MFU
record         the files that rank 0 writes to the run folder
checkpoint/    saving in the background, and resuming; trainfleet.checkpoints decides which exist
               and are good
generate       a continuation of a prompt, token by token
"""
