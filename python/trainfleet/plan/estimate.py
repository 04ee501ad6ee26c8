"""What a run will need, from arithmetic alone: parameters, memory per rank, time and money."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..config import Config
from ..config.memory import Memory, memory_of
from ..config.precision import format_of, is_half, usable_bytes
from ..config.sizes import count_parameters, flops_per_token
from ..config.speed import GROUPS, StepTime
from ..config.speed_inputs import predict
from ..hardware import cpu_speed, node_types
from ..hardware.accelerators import Accelerator
from .bill import Bill

# four of five published rows, also of sources never fitted to, lie within this of what is foretold
# (tests/bench/LOG.md)
LIKELY = 0.20
# the same of the memory that 167 runs told, by each engine's own accounts; this one's is nearer to
# torch's
LIKELY_MEMORY = 0.16


@dataclass(frozen=True)
class Experience:
    """How many runs of which kind ended on this hardware, and their speed over what was predicted
    of them, the median.

    `parts`: the seconds of each group of a step's parts over what was predicted, where the runs had
    another layout.
    """

    runs: int
    of: str
    ratio: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def correct(self, step: StepTime) -> StepTime:
        """The prediction, scaled so that it matches those runs."""
        return step.corrected(self.parts or dict.fromkeys(GROUPS, 1 / self.ratio))


@dataclass(frozen=True)
class Estimate:
    """Parameters; a rank's bytes, and those it has (None: not known); FLOPs per step; FLOP/s of all
    ranks; seconds; US dollars.

    `usd`: from set-up to teardown (bill.py). `nodes`: how many are paid for. `step`: the seconds of
    a step by part; None on devices that nobody has figures of. `experience`: what corrected the
    seconds.
    """

    parameters: int
    memory: Memory
    usable: float | None
    step_flops: float
    peak: float | None
    format: str
    seconds: float | None
    usd: float | None
    step: StepTime | None = None
    bill: Bill | None = None
    experience: Experience | None = None
    nodes: int = 1

    @property
    def around(self) -> float:
        """US dollars before training and after it."""
        return self.bill.whole(self.nodes, 0.0) if self.bill else 0.0

    def predicted(self, tokens: int) -> dict[str, float | None]:
        """What results.json keeps, to be compared with what is measured; `tokens`: of the whole
        run.
        """
        speed = round(tokens / self.seconds, 1) if self.seconds else None
        # as much as is spent at its end
        usd = self.usd - self.bill.idle(self.nodes) if self.usd and self.bill else self.usd
        return {"tokens_per_second": speed, "memory_bytes": float(self.memory.total), "usd": usd}


def estimate(config: Config, bill: Bill | None, experience: Experience | None = None) -> Estimate:
    """The estimate that `make plan` prints and the budget is checked against; `bill`: what the
    fleet costs, None if unknown.
    """
    device, format_ = config.fleet.rank_device, format_of(config)
    flops = (
        flops_per_token(config.model, config.train.sequence_length)
        * config.train.global_batch
        * config.train.sequence_length
    )
    step = predict(config)
    step = experience.correct(step) if step and experience else step
    seconds = config.train.steps * step.total if step else None
    nodes, usd = config.fleet.nodes, None
    if bill and (bill.is_free or seconds is not None):
        usd = bill.whole(nodes, (seconds or 0.0) / 3600)
    return Estimate(
        count_parameters(config.model),
        memory_of(config, is_half(config)),
        usable_bytes(device) if device else None,
        flops,
        _peak(config, device, format_),
        format_,
        seconds,
        usd,
        step,
        bill,
        experience,
        nodes,
    )


def list_price(config: Config) -> float | None:
    """US dollars for an hour of a node: as the config says, of an EC2 type the list price; None
    where nobody knows it.
    """
    own, row = config.fleet.accelerator, config.fleet.node_type
    if own and own.usd_per_hour is not None:
        return own.usd_per_hour
    return row.usd_per_hour if row else None


def _peak(config: Config, device: Accelerator | None, format_: str) -> float | None:
    """FLOP/s of all ranks together; None for accelerators that the table does not have."""
    if device is not None:
        return device.peak(format_) * config.world_size
    if not config.fleet.on_local_cpus:
        return None
    return cpu_speed.of_this_machine().rate(format_) * node_types.local_cores()
