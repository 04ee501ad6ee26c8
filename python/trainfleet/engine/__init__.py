"""Training engine for every supported device.

__main__       entry point of each rank: sets up, trains, and returns an exit code
trainer        training loop
world          process group, and reductions of small values over all ranks
parallel/      parallel layouts: splits the model across ranks and runs training steps
optimizer      builds the optimizer, sets the learning rate, and clips gradients
step_guard     skips steps with a spiking or non-finite loss or gradient norm
batches        reads and prefetches each rank's share of the global batch
vote           makes all ranks stop or save at the same step
timing         step timing, straggler detection, step profiler
record         metrics and results that rank 0 writes to the run folder
checkpoint/    saves checkpoints in the background and resumes from them (trainfleet.checkpoints
               defines which checkpoints are valid)
generate       generates text token by token
"""

from ..health import faults

faults.begin()
