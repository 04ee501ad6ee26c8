"""Training, on whatever device a rank has.

__main__       one rank of the job, from its environment to its exit code
trainer        the loop
world          the ranks: how they meet and agree
parallel/      every layout: what each rank has of the model, and how a step goes through the parts
optimizer      AdamW, its learning rate at each step, clipping
step_guard     which steps to skip: loss or gradients not finite, or a spike
batches        a rank's part of each global batch, fetched ahead
vote           the vote by which all ranks stop or save at the same step
spot_notice    EC2's notice that a spot instance is about to be reclaimed
timing         where the seconds went, tokens per second, MFU
record         what rank 0 writes to the run folder
checkpoint/    saving in the background, and resuming; trainfleet.checkpoints decides what exists
               and is good
generate       a continuation of a prompt, token by token
"""
