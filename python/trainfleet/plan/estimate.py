"""Estimates the needs of a run by arithmetic: parameters, memory per rank, time and money.

A Bill is the cost from set-up to teardown: machines by the hour, including the hours before and
after training. A plan shows one, budget.max_usd is checked against it, and watch/budget.py uses it
to count the cost of a running job. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp

from ..config import Config
from ..config.goodput import Goodput, foresee
from ..config.memory import Memory, memory_of
from ..config.precision import format_of, is_half, usable_bytes
from ..config.sizes import count_parameters, flops_per_token
from ..config.speed import GROUPS, StepTime
from ..config.speed_inputs import predict
from ..hardware import cpu_speed, node_types
from ..hardware.accelerators import Accelerator

PAID = "TRAINFLEET_PAID"  # Bill.paid, for a launcher that can't ask for the price


@dataclass(frozen=True)
class BillStage:
    """A time before or after training for which machines are paid.

    why     the source of its minutes; "assumed" if they are not measured
    nodes   whether nodes are paid for too, or only the other resources
    counted whether the run's events cover it, so that its cost is counted as it passes
    """

    name: str
    minutes: float
    why: str = "assumed"
    nodes: bool = True
    counted: bool = False


@dataclass(frozen=True)
class Bill:
    """US dollars per hour of a node with its volume, and per hour of all other paid resources.

    before, after   the stages of set-up, and those until the nodes are gone
    lingers         hours for which nodes are paid after a launch has ended
    paid, paid_for  US dollars per node that are paid once, in advance, however long it is used,
                    and their purpose
    """

    node: float
    rest: float = 0.0
    before: tuple[BillStage, ...] = ()
    after: tuple[BillStage, ...] = ()
    lingers: float = 0.0
    paid: float = 0.0
    paid_for: str = ""

    @property
    def is_free(self) -> bool:
        return self.node == 0 and self.rest == 0 and self.paid == 0

    def hour(self, nodes: int) -> float:
        """Returns the US dollars per hour of everything, with this number of nodes."""
        return self.node * nodes + self.rest

    def of(self, stages: Iterable[BillStage], nodes: int) -> float:
        """Returns the US dollars for these stages."""
        return sum(stage.minutes / 60 * self.hour(nodes if stage.nodes else 0) for stage in stages)

    def setup(self, nodes: int) -> float:
        """Returns the US dollars for all set-up, and for advance payments."""
        return self.paid * nodes + self.of(self.before, nodes)

    def uncounted(self, nodes: int) -> float:
        """Returns the US dollars for advance payments, and for the part of set-up that no event of
        the run covers.
        """
        return self.paid * nodes + self.of(
            (stage for stage in self.before if not stage.counted), nodes
        )

    def idle(self, nodes: int) -> float:
        """Returns the US dollars from the end of training until the nodes are gone."""
        return self.of(self.after, nodes)

    def whole(self, nodes: int, hours: float) -> float:
        """Returns the US dollars from set-up to teardown, with `hours` hours of training."""
        return self.setup(nodes) + hours * self.hour(nodes) + self.idle(nodes)


# Logarithm of the factor within which four of five published speeds are of the prediction, for
# sources that nothing was fitted to (tests/bench/fit_planner.py --ranges, LOG.md). It grows with
# the share of a step that small models, long sequences and pipelines have more of. A device that no
# engine like ours has published on adds UNFITTED: predicted by another, GPUs were that far off.
BASE, UNFITTED = (0.15, 0.10)
WIDER = {"update": 1.37, "launches": 1.37, "other": 1.37, "attention": 0.15, "idle": 0.54}
PROFILED = 0.10  # the same for a model that has run here (LOG.md: six layouts after one profile)
# four of five of 167 runs reported memory within this, by each trainer's own count; ours is closer
# to torch's
LIKELY_MEMORY = 0.16


def spread_of(step: StepTime, fitted: bool) -> float:
    """Returns the logarithm of the factor within which four of five runs are of this prediction."""
    wider = float(sum(times * getattr(step, part) for part, times in WIDER.items()))
    return BASE + wider / step.total + (0.0 if fitted else UNFITTED)


@dataclass(frozen=True)
class Experience:
    """The number and kind of runs that ended on this hardware, and the median of their speed over
    the predicted one.

    `parts` has the measured over the predicted seconds of each group of a step's parts, if the runs
    had another layout.
    """

    runs: int
    of: str
    ratio: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def correct(self, step: StepTime) -> StepTime:
        """Returns the prediction, scaled to match those runs."""
        return step.corrected(self.parts or dict.fromkeys(GROUPS, 1 / self.ratio))


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run: parameters; a rank's bytes, needed and usable (None: unknown); FLOPs
    per step; FLOP/s of all ranks; seconds; US dollars.

    `usd` covers set-up to teardown (`Bill`). `nodes` is the number of paid nodes. `step` has the
    seconds of a step by part; None on devices without figures. `experience` corrected the seconds.
    `seconds` are those of steps alone. `spread` is `spread_of` the step. CPUs have no
    `goodput`, because no rate of their failures is published.
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
    spread: float = 0.0
    goodput: Goodput | None = None

    @property
    def elapsed(self) -> float | None:
        """Returns the seconds from the first step to the last, with failures and checkpoints."""
        return self.seconds / self.goodput.share if self.seconds and self.goodput else self.seconds

    def between(self, predicted: float) -> tuple[float, float]:
        """Returns the bounds of four of five runs of which this is predicted: a time, a speed."""
        return predicted / exp(self.spread), predicted * exp(self.spread)

    @property
    def around(self) -> float:
        """Returns the US dollars before and after training."""
        return self.bill.whole(self.nodes, 0.0) if self.bill else 0.0

    def predicted(self, tokens: int) -> dict[str, float | None]:
        """Returns the predictions that results.json keeps for comparison with measurements.
        `tokens` counts those of the complete run.
        """
        speed = round(tokens / self.seconds, 1) if self.seconds else None
        # the amount spent when training ends
        usd = self.usd - self.bill.idle(self.nodes) if self.usd and self.bill else self.usd
        return {"tokens_per_second": speed, "memory_bytes": float(self.memory.total), "usd": usd}


def estimate(config: Config, bill: Bill | None, experience: Experience | None = None) -> Estimate:
    """Returns the estimate that `make plan` prints and the budget is checked against. `bill` is the
    fleet's cost, None if unknown.
    """
    device, format_ = config.fleet.rank_device, format_of(config)
    flops = (
        flops_per_token(config.model, config.train.sequence_length)
        * config.train.global_batch_size
        * config.train.sequence_length
    )
    step = predict(config)
    step = experience.correct(step) if step and experience else step
    seconds = config.train.steps * step.total if step else None
    spread = spread_of(step, bool(device and device.fitted)) if step else 0.0
    if experience:
        spread = BASE if experience.of == "this hardware" else PROFILED
    needs = Estimate(
        count_parameters(config.model),
        memory_of(config, is_half(config)),
        usable_bytes(device) if device else None,
        flops,
        _peak(config, device, format_),
        format_,
        seconds,
        None,
        step,
        bill,
        experience,
        config.fleet.nodes,
        spread,
        foresee(config, step.total) if step and device else None,
    )
    if bill is None or (seconds is None and not bill.is_free):
        return needs
    return replace(needs, usd=bill.whole(needs.nodes, (needs.elapsed or 0.0) / 3600))


def list_price(config: Config) -> float | None:
    """Returns the US dollars per hour of a node: the config's price, or an EC2 type's list price;
    None if neither exists.
    """
    own, row = config.fleet.accelerator, config.fleet.node_type
    if own and own.usd_per_hour is not None:
        return own.usd_per_hour
    return row.usd_per_hour if row else None


def _peak(config: Config, device: Accelerator | None, format_: str) -> float | None:
    """Returns the FLOP/s of all ranks together; None for accelerators that the table lacks."""
    if device is not None:
        return device.peak(format_) * config.world_size
    if not config.fleet.on_local_cpus:
        return None
    return cpu_speed.of_this_machine().rate(format_) * node_types.local_cores()
