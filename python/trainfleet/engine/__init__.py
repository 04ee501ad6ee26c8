"""The training engine. It runs on any device that a rank can open.

__main__       entry point of one rank: sets it up, trains, and returns its exit code
trainer        training loop
world          the process group: how ranks join and synchronize
parallel/      parallel layouts: splitting the model over ranks, and running steps on the parts
optimizer      building the configured optimizer, learning rate updates, gradient clipping
step_guard     skipping of steps with a loss spike or a non-finite loss or gradient
batches        prefetching of each rank's part of the global batch
vote           agreement of all ranks to stop or save at the same step
timing         time per stage, slowest rank, step profiler
record         metrics and results that rank 0 writes to the run folder
checkpoint/    background saves and resuming; trainfleet.checkpoints defines which checkpoints are
               valid
generate       text generation, token by token
"""
