"""Training, on whatever device a rank has.

__main__       one rank of the job, from its environment to its exit code
trainer        the loop
world          the ranks: how they meet and agree
parallel/      every layout: what each rank has of the model, and how a step goes through the parts
optimizer      AdamW, its learning rate at each step, clipping
guard          which steps are left out, as they would do harm
batches        a rank's part of each global batch, fetched ahead
stopping       how what one rank wishes (to stop, to save) becomes what all ranks do
notices        EC2's word that a spot instance is about to be taken away
meter          where the seconds went, tokens per second, MFU
record         what rank 0 leaves in the run folder
checkpoint/    saving beside training, and resuming; what exists is trainfleet.checkpoints' to say
generate       a continuation of a prompt, token by token
"""
