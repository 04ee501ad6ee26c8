"""Estimates a run's parameter count, memory per rank, duration and cost, analytically and without
side effects.

A Bill covers machine hours from setup to teardown, including the time before and after training.
`make plan` prints it and checks it against budget.max_usd, and watch/budget.py uses it to track a
running job's cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, log

from ..config import Config
from ..config.goodput import Goodput, foresee
from ..config.limits import format_of, is_half, usable_bytes
from ..config.memory import Memory, memory_of
from ..config.sizes import count_parameters, flops_per_token
from ..config.speed import GROUPS, StepTime
from ..config.speed_inputs import predict
from ..hardware import cpu_speed, node_types
from ..hardware.accelerators import Accelerator
from ..hardware.node_types import Tariff

# environment variable that passes Bill.paid to a launcher that can't query the price
PAID = "TRAINFLEET_PAID"


@dataclass(frozen=True)
class BillStage:
    """A billed period before or after training.

    why     source of `minutes`; "assumed" if not measured
    nodes   whether the nodes are billed too, or only the other resources
    counted whether the run's events cover this period, so that its cost is tracked as it accrues
    """

    name: str
    minutes: float
    why: str = "assumed"
    nodes: bool = True
    counted: bool = False


@dataclass(frozen=True)
class Bill:
    """Hourly costs in US dollars: `node` per node with its volume, `rest` for all other resources.

    Attributes:
        before: Setup stages.
        after: Stages from the end of training to node teardown.
        lingers: Hours that nodes are still billed after a launch ends.
        paid: Upfront US dollars per node, charged even if unused.
        paid_for: What `paid` pays for.
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
        """Returns the total US dollars per hour for this many nodes."""
        return self.node * nodes + self.rest

    def of(self, stages: Iterable[BillStage], nodes: int) -> float:
        """Returns the cost of these stages, in US dollars."""
        return sum(stage.minutes / 60 * self.hour(nodes if stage.nodes else 0) for stage in stages)

    def setup(self, nodes: int) -> float:
        """Returns the cost of setup, including upfront payments, in US dollars."""
        return self.paid * nodes + self.of(self.before, nodes)

    def uncounted(self, nodes: int) -> float:
        """Returns the US dollars for upfront payments and for setup stages that the run's events
        do not cover.
        """
        return self.paid * nodes + self.of(
            (stage for stage in self.before if not stage.counted), nodes
        )

    def idle(self, nodes: int) -> float:
        """Returns the US dollars spent between the end of training and node teardown."""
        return self.of(self.after, nodes)

    def whole(self, nodes: int, hours: float) -> float:
        """Returns the total US dollars from setup to teardown for `hours` hours of training."""
        return self.setup(nodes) + hours * self.hour(nodes) + self.idle(nodes)


# Log of the error factor that 80 % of predictions stay within, measured against published speeds
# from held-out sources (tests/bench/fit_planner.py --ranges, LOG.md). WIDER adds to it in
# proportion to the parts of a step that matter most for small models, long sequences and pipelines.
# UNFITTED is added for devices without published results from a similar engine.
BASE, UNFITTED = (0.15, 0.10)
WIDER = {"update": 1.37, "launches": 1.37, "other": 1.37, "attention": 0.15, "idle": 0.54}
PROFILED = 0.10  # BASE for a model that has already run on this hardware (LOG.md)
# Relative error that 80 % of memory predictions stay within, over 167 published runs. Each trainer
# measures memory its own way, and predictions are closer to what torch reports.
LIKELY_MEMORY = 0.16


def spread_of(step: StepTime, fitted: bool) -> float:
    """Returns the prediction's spread: the log of the error factor that 80 % of runs stay in."""
    wider = float(sum(times * getattr(step, part) for part, times in WIDER.items()))
    return BASE + wider / step.total + (0.0 if fitted else UNFITTED)


@dataclass(frozen=True)
class Experience:
    """Summary of past runs on this hardware: their number, their kind, and their median ratio of
    measured to predicted speed.

    `parts` maps each phase of a step to its ratio of measured to predicted time. It is empty if the
    runs used the same layout, because `ratio` then corrects the whole step. Ratios are raised to
    the power `share`, which approaches 1 as runs accumulate, so that one outlier has little effect.
    """

    runs: int
    of: str
    ratio: float
    parts: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0

    def correct(self, step: StepTime) -> StepTime:
        """Returns the predicted step time, corrected by past runs."""
        ratios = self.parts or dict.fromkeys(GROUPS, 1 / self.ratio)
        return step.corrected({group: ratio**self.share for group, ratio in ratios.items()})

    @property
    def spread(self) -> float:
        """Returns a corrected prediction's spread, widened by the part of the correction that
        `share` leaves out.
        """
        known = BASE if self.of == "this hardware" else PROFILED
        return known + (1 - self.share) * abs(log(self.ratio))


@dataclass(frozen=True)
class Estimate:
    """A run's estimated parameters, required and usable bytes per rank, FLOPs per step, combined
    FLOP/s of all ranks, seconds and US dollars. None means unknown.

    `seconds` covers only the steps, corrected by `experience`. `usd` covers setup to teardown
    (`Bill`), and `nodes` is the number of billed nodes. `step` breaks the step time down by part.
    `model` is the uncorrected step time in seconds, and `spread` is the step time's uncertainty
    (`spread_of`). CPUs have no `goodput`, because no failure rates are published for them.
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
    model: float | None = None

    @property
    def elapsed(self) -> float | None:
        """Returns the seconds from first to last step, including failures and checkpoints."""
        return self.seconds / self.goodput.share if self.seconds and self.goodput else self.seconds

    def between(self, predicted: float) -> tuple[float, float]:
        """Returns the 80 % interval around a predicted time or speed."""
        return predicted / exp(self.spread), predicted * exp(self.spread)

    @property
    def around(self) -> float:
        """Returns the US dollars for the stages before and after training."""
        return self.bill.whole(self.nodes, 0.0) if self.bill else 0.0

    def predicted(self, tokens: int) -> dict[str, float | None]:
        """Returns the predictions to record in results.json, for comparison with measurements.

        `tokens` is the run's total token count.
        """
        speed = round(tokens / self.seconds, 1) if self.seconds else None
        # US dollars spent by the end of training
        usd = self.usd - self.bill.idle(self.nodes) if self.usd and self.bill else self.usd
        memory = float(self.memory.total)
        return {
            "tokens_per_second": speed,
            "memory_bytes": memory,
            "usd": usd,
            "step_seconds": self.model,
        }


def estimate(config: Config, bill: Bill | None, experience: Experience | None = None) -> Estimate:
    """Returns the estimate that `make plan` prints and checks against the budget.

    `bill` is the fleet's cost, or None if unknown.
    """
    device, format_ = config.fleet.rank_device, format_of(config)
    model = predict(config)
    step = experience.correct(model) if model and experience else model
    seconds = config.train.steps * step.total if step else None
    needs = Estimate(
        count_parameters(config.model),
        memory_of(config, is_half(config)),
        usable_bytes(device) if device else None,
        flops_per_token(config.model, config.train.sequence_length) * config.step_tokens,
        _peak(config, device, format_),
        format_,
        seconds,
        None,
        step,
        bill,
        experience,
        config.fleet.nodes,
        _spread(step, device, experience),
        foresee(config, step.total) if step and device else None,
        model.total if model else None,
    )
    if bill is None or (seconds is None and not bill.is_free):
        return needs
    return replace(needs, usd=bill.whole(needs.nodes, (needs.elapsed or 0.0) / 3600))


def list_price(config: Config) -> float | None:
    """Returns a node's price in US dollars per hour, or None if unknown."""
    known = tariff_of(config)
    return known.usd_per_hour if known else None


def tariff_of(config: Config) -> Tariff | None:
    """Returns the node price set in the config, or else the EC2 type's first tariff."""
    own, row = config.fleet.accelerator, config.fleet.node_type
    if own and own.usd_per_hour is not None:
        return Tariff("own", own.usd_per_hour, "fleet.accelerator.usd_per_hour")
    return next(iter(row.tariffs), None) if row else None


def _spread(
    step: StepTime | None, device: Accelerator | None, experience: Experience | None
) -> float:
    """Returns the prediction's spread, based on past runs if there are any."""
    if experience:
        return experience.spread
    return spread_of(step, bool(device and device.fitted)) if step else 0.0


def _peak(config: Config, device: Accelerator | None, format_: str) -> float | None:
    """Returns the combined FLOP/s of all ranks, or None for unknown hardware."""
    if device is not None:
        return device.peak(format_) * config.world_size
    if not config.fleet.on_local_cpus:
        return None
    return cpu_speed.of_this_machine().rate(format_) * node_types.local_cores()
