"""Prints a plan: the derived values with their reasons, the estimates and the requests. Can also
write the plan to a folder.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import Config, Derived
from ..config.goodput import Goodput, best_minutes
from ..config.memory import passes_of
from ..config.sizes import flops_in_words
from ..config.speed import GROUPS, StepTime
from ..config.speed_inputs import warnings
from ..config.tables import read_table
from ..hardware import node_types
from ..plan.estimate import LIKELY_MEMORY, Estimate, Experience, tariff_of
from ..plan.fabric_environment import fabric_settings
from ..plan.job import Artifact, Request, neuron_settings
from ..plan.plan import Plan, degrees, files_of
from ..run.run_folder import no_place, write_atomic
from ..trust.errors import ConfigError
from ..trust.validation import fit_row
from .history import duration

# Instance type of AWS's published training speeds. published.yaml contains the latest row per model
# from github.com/aws-neuron/aws-neuron-sdk,
# about-neuron/benchmarks/trn1/training_data_{decoder,encoder}.csv (page of 2026-02-19 and its
# history). AWS has never published a training speed for Trn2 or Trn3.
MEASURED = "trn1.32xlarge"


@dataclass(frozen=True)
class PublishedSpeed:
    """Training throughput of a model on `nodes` nodes of type MEASURED, in sequences per second.
    `sdk` is the Neuron SDK version used for the measurement.
    """

    preset: str
    nodes: int
    length: int
    sequences: float
    layout: str
    sdk: str


TABLE = Path(__file__).with_name("published.yaml")
ROWS = tuple(
    fit_row(PublishedSpeed, row, TABLE, row.get("preset", "")) for row in read_table(TABLE)
)


def beside(config: Config) -> str:
    """Returns AWS's published throughput per node for this model and node type, or a note that AWS
    has published none. Returns "" if the nodes have no Trainium.
    """
    row = config.fleet.node_type
    if row is None or row.accelerator is None or row.accelerator.kind != "neuron":
        return ""
    family = row.family
    if row.accelerator != node_types.INSTANCE_TYPES[MEASURED].accelerator:
        return f"AWS has not published a training speed for {family}"
    same = [
        one
        for one in ROWS
        if one.preset == config.model.preset and one.length == config.train.sequence_length
    ]
    if not same:
        return (
            f"AWS has not published a speed for this model on {family} with "
            f"{config.train.sequence_length:,} tokens per sequence"
        )
    near = min(same, key=lambda one: abs(one.nodes - config.fleet.nodes))
    speed = near.sequences * near.length / near.nodes
    nodes = f"{near.nodes} nodes" if near.nodes > 1 else "one node"
    return (
        f"AWS: {speed:,.0f} tokens/s per node, on {nodes} of {MEASURED} ({near.layout}; Neuron "
        f"{near.sdk})"
    )


INDENT = "    "
WORTH = 0.005  # minimum gain in training share that is worth suggesting another checkpoint interval
UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "min"), (1.0, "s"))
PARTS = {  # display names of the parts of a step
    "products": "matrix products",
    "traffic": "memory traffic",
    "launches": "kernel launches",
    "shards": "gathering shards",
    "tensor": "tensor-parallel exchange",
    "stages": "pipeline exchange",
    "context": "context exchange",
    "idle": "pipeline idle",
    "gradients": "gradient exchange",
    "update": "optimizer",
    "other": "the rest",
    "exchange": "exchange of activations and weights",
    "calls": "kernel launches",
}
FILES = (
    r"config\.yaml|(stack|cluster|network)\.yaml|policy(-\d)?\.json|([a-z]+-)?requests|plan\.json|[a-z]+-node-\d+\.sh"
    # names of files that a plan writes to OUT
    r"|setup-[A-Za-z0-9._-]+\.sh|node\.sh|[a-z]+-job\.sbatch"
)


def describe(config: Config, derived: list[Derived], needs: Estimate) -> Iterator[str]:
    """Yields aligned lines with everything that is known without contacting a machine."""
    fleet = config.fleet
    kind = f" ({fleet.node_type.name})" if fleet.node_type else ""
    plural = "s" * (fleet.nodes > 1), "s" * (fleet.ranks_per_node > 1)
    world = f"{fleet.nodes} node{plural[0]} x {fleet.ranks_per_node} rank{plural[1]}{kind}"
    yield f"{config.name}: {config.train.steps:,} steps on the {fleet.backend} backend, {world}"
    yield from ("", "derived")
    keys, values = (
        max(map(len, column), default=0)
        for column in ([row.key for row in derived], [str(row.value) for row in derived])
    )
    yield from (hung(f"  {row.key:{keys}}  {row.value!s:>{values}}  ", row.why) for row in derived)
    yield from ("", "estimate")
    yield from (hung(f"  {name:10} ", text) for name, text in _estimates(config, needs))
    fabric = (
        fabric_settings(fleet.node_type, "<card>", alone=fleet.nodes == 1) if fleet.is_told else ()
    )
    settings = (*fabric, *neuron_settings(config))
    if settings:
        yield from ("", "environment")
        width = max(len(setting.name) for setting in settings)
        for setting in settings:
            yield from _row(
                f"  {setting.name:{width}}  {setting.value or 'unset':8}  ", setting.why
            )


def _row(head: str, text: str) -> Iterator[str]:
    """Yields `head` and `text` as formatted by `hung`. If `head` takes up most of the width, `text`
    starts on the next line.
    """
    if len(head) < columns() * 0.7:
        yield hung(head, text)
    else:
        yield from (head.rstrip(), hung(" " * 8, text))


def describe_changes(changes: Iterable[Artifact]) -> Iterator[str]:
    """Yields the steps of `make setup`, grouped by host."""
    for artifact in changes:
        if not artifact.name.startswith("setup-"):
            yield from (
                "",
                f"{artifact.name}: {len(artifact.text.encode()):,} bytes; OUT=folder saves it",
            )
            continue
        steps = [
            line for line in artifact.text.splitlines() if not line.startswith(("#!", "set -e"))
        ]
        yield from (
            "",
            f"{artifact.name}{'' if steps else ': nothing to do'}",
            *(f"  {line}" for line in steps),
        )


def describe_requests(
    requests: Sequence[Request], notes: tuple[str, ...], whole: bool = True
) -> Iterator[str]:
    """Yields the exact artifacts in execution order, or only their number if `whole` is false."""
    yield from ["", "data", *(f"  {note}" for note in notes)] if notes else []
    if requests and not whole:
        steps = ", ".join(f"{request.job.kind} ({len(request.artifacts)})" for request in requests)
        yield from ("", f"job files: {steps}; VERBOSE=1 shows them, OUT=folder saves them")
        return
    for request in requests:
        yield from ("", f"{request.job.kind} ({request.job.name})")
        for artifact in request.artifacts:
            yield from (
                f"  {artifact.name}",
                *(f"{INDENT}{line}" for line in artifact.text.splitlines()),
            )


def hung(head: str, text: str) -> str:
    """Returns `head` followed by `text`. Text beyond the terminal's width wraps to the next line,
    aligned with the text above.
    """
    return textwrap.fill(
        text,
        columns(),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )


def columns() -> int:
    """Returns the line width: the terminal's width, or 100 in a pipe. It is limited to 120 for
    readability.
    """
    return max(60, min(120, shutil.get_terminal_size((100, 24)).columns))


def _estimates(config: Config, needs: Estimate) -> Iterator[tuple[str, str]]:
    train = config.train
    yield "parameters", f"{needs.parameters / 1e6:,.2f} M"
    yield from zip(("node", ""), _node(config), strict=False)
    yield "layout", degrees(config)
    passes = f"{config.data_parallel} x {passes_of(config)} micro-batches"
    yield "batch", f"{train.global_batch_size} sequences = {passes} of {train.micro_batch_size}"
    yield from _memory(config, needs)
    yield (
        "work",
        f"{needs.step_flops:.2e} FLOPs per step, {config.step_tokens:,} tokens per step",
    )
    if needs.peak and needs.seconds is not None:
        yield from _speed(config, needs, config.step_tokens * train.steps / needs.seconds)
        yield from _time(config, needs)
    else:
        yield "time", "unknown on this hardware"
    yield "cost", _cost(config, needs)


def _memory(config: Config, needs: Estimate) -> Iterator[tuple[str, str]]:
    of = f" of {needs.usable / 2**30:,.1f} usable" if needs.usable else ""
    named = {"loss": "loss or gradient sums"}
    held = ", ".join(
        f"{named.get(name, name)} {size / 2**30:,.2f}"
        for name, size in vars(needs.memory).items()
        if size
    )
    yield "memory", f"{needs.memory.total / 2**30:,.2f} GiB{of} per rank{_likely(config)}: {held}"
    if needs.usable and needs.memory.total > needs.usable:
        yield (
            "",
            "warning: this is unlikely to fit; set train.parallelism: auto for a layout that fits",
        )


def _speed(config: Config, needs: Estimate, speed: float) -> Iterator[tuple[str, str]]:
    peak = needs.peak or 0.0
    mfu = needs.step_flops * speed / (config.step_tokens * peak)
    yield (
        "speed",
        f"about {rough(speed)} tokens/s, {rough(speed / config.world_size)} per rank, an MFU "
        f"of {mfu:.0%}, {_basis(config, needs)}",
    )
    yield from (("", f"warning: {why}") for why in warnings(config))
    if figure := beside(config):
        yield "", f"{rough(speed / config.fleet.nodes)} per node; {figure}"
    if needs.step:
        yield "step", f"{needs.step.total:.3g} s: {', '.join(shares(needs.step))}"
    yield (
        "MFU",
        f"= tokens/s x FLOPs per token / ({config.world_size} x "
        f"{peak / config.world_size / 1e12:,.4g} TFLOP/s per rank, {needs.format})",
    )
    yield "", flops_in_words(config.model)


def _time(config: Config, needs: Estimate) -> Iterator[tuple[str, str]]:
    elapsed = needs.elapsed or 0.0
    likely = span(*needs.between(elapsed))
    yield "time", f"about {duration(elapsed)}; {likely} for four of five such runs"
    if needs.goodput:
        yield "", _useful(needs.goodput, elapsed)
    if config.fleet.is_told:
        yield "", _before(needs)


def _cost(config: Config, needs: Estimate) -> str:
    if needs.usd:
        around = (
            f", including ${rough(needs.around)} for setup and idle time" if needs.around else ""
        )
        return f"about ${rough(needs.usd)}{around}{_at(config, needs)}"
    if needs.usd == 0:
        return _free(config)
    if needs.bill:
        return f"${needs.bill.hour(config.fleet.nodes):,.2f} per hour"
    if not config.fleet.is_told:
        return "unknown: the config does not describe the nodes"
    return "unknown: neither EC2's on-demand list nor its capacity block rates have a price"


def _useful(found: Goodput, elapsed: float) -> str:
    """Describes the share of time spent on training and the causes of the rest. Suggests a better
    checkpoint interval if there is one.
    """
    failures = elapsed / found.between_failures
    text = (
        f"{found.share:.1%} of it is training; about {failures:,.2g} failures "
        f"({found.source}), each of which costs "
        f"{duration(found.restart)} and half of the {duration(found.interval)} between "
        f"checkpoints; a checkpoint blocks the ranks for {found.stall:.2g} s"
    )
    best = best_minutes(found.between_failures, found.stall)
    gained = found.at(min(elapsed, best * 60.0)) - found.share
    if gained < WORTH or best * 60 > elapsed:
        return text
    return f"{text}; checkpoint.every: {best} min would raise the share by {gained:.1%}"


def _before(needs: Estimate) -> str:
    """Returns the setup time before the first step, if known, and a note that waiting is not
    included.
    """
    minutes = sum(stage.minutes for stage in needs.bill.before) if needs.bill else 0.0
    setup = f"setup takes about {minutes:.0f} min before; " if minutes else ""
    return f"{setup}waiting in a queue or for machines is not included"


def _at(config: Config, needs: Estimate) -> str:
    """Returns the price per hour with its source, if the bill is for nodes only."""
    known = tariff_of(config)
    if known is None or needs.bill is None or needs.bill.node != known.usd_per_hour:
        return ""
    return f", at ${known.usd_per_hour:,.2f} per node-hour ({known.source})"


def _free(config: Config) -> str:
    """Returns the reason why a run is free of charge."""
    kind = config.fleet.node_type
    own = "$0: your own machines have no price; set fleet.accelerator.usd_per_hour to add one"
    return own if kind and kind.owned else "$0 (this machine)"


def _node(config: Config) -> Iterator[str]:
    """Yields the assumed hardware of a node that is not an EC2 instance type, with the source of
    each assumption.
    """
    kind = config.fleet.node_type
    if kind is None or not kind.owned or kind.accelerator is None:
        return
    row, format_ = kind.accelerator, kind.accelerator.half
    peaks = (
        f"{row.peak(format_) / 1e12:,.4g} TFLOP/s in {format_}, {row.memory_gib:g} GiB at "
        f"{row.bandwidth / 1e12:.3g} TB/s"
    )
    yield f"{kind.name}: {peaks} ({row.source}); {row.links or 'PCIe between devices'}"
    if config.fleet.nodes > 1:
        assumed = "" if not kind.assumed else ", the usual rate" if kind.fabric else ", assumed"
        yield (
            f"{kind.fabric or 'an unknown network'} between nodes: {kind.network_gbps:,g} "
            f"Gbit/s each{assumed}"
        )


def _likely(config: Config) -> str:
    """Returns the likely error of the predicted memory per rank."""
    device = config.fleet.rank_device
    if device is None:
        return " in tensors"  # compared with torch's allocator, not with the process's memory
    if device.kind == "neuron":
        return ", assumed (AWS publishes no measurements for Trainium)"
    return f", within {LIKELY_MEMORY:.0%} for four of five published runs"


def _basis(config: Config, needs: Estimate) -> str:
    """Returns what the predicted throughput is based on, and its likely error."""
    if found := needs.experience:
        runs = f"{found.runs} finished run{'s' if found.runs > 1 else ''} of {found.of}"
        return (
            f"measured here: corrected by {runs}, which reached {found.ratio:.2f} times "
            f"the predicted speed (weight {found.share:.0%}){_phases(found, needs.step)}"
        )
    device = config.fleet.rank_device
    if device is None and needs.bill is None:
        return "a rough prediction, as if all nodes shared this machine's cores"
    if device is None:
        return (
            "a rough prediction, because no representative run on this machine has been measured "
            "yet (run make profile)"
        )
    if not device.fitted:
        return (
            "predicted from related devices, because no run of a similar trainer on this device "
            "has been published"
        )
    return "predicted from published runs"


def _phases(found: Experience, step: StepTime | None) -> str:
    """Returns the ratio of measured to predicted time for each phase of a step, and the phases that
    were not measured. Returns "" if the runs correct only the whole step.
    """
    if step is None or not found.parts:
        return ""
    times = {PARTS.get(name, name): ratio for name, ratio in found.parts.items()}
    absent = [name for name in GROUPS if name not in found.parts and step.group(name) > 0]
    told = ", ".join(f"{name} {ratio:.2g}" for name, ratio in times.items())
    rest = f"; not measured: {', '.join(PARTS.get(name, name) for name in absent)}" * bool(absent)
    return f"; measured over predicted time: {told}{rest}"


def span(low: float, high: float) -> str:
    """Formats a range of seconds in a single unit with two digits, such as 12-16 days."""
    size, unit = next((each for each in UNITS if high >= 2 * each[0]), UNITS[-1])
    least, most = (f"{float(f'{value / size:.2g}'):,.10g}" for value in (low, high))
    return f"{least}-{most} {unit}"


def shares(step: StepTime) -> list[str]:
    """Returns the parts of a step that account for at least 2 % of it, largest first."""
    parts = sorted(
        ((seconds / step.total, name) for name, seconds in asdict(step).items()), reverse=True
    )
    return [f"{PARTS.get(name, name)} {share:.0%}" for share, name in parts if share >= 0.02]


def rough(value: float) -> str:
    """Formats an estimate with three digits, such as 492,000, 7,690 or 1.25."""
    return f"{float(f'{value:.3g}'):,.10g}"


def write(plan: Plan, changes: Iterable[Artifact], folder: Path) -> list[str]:
    """Writes the resolved config, the plan as JSON, and all artifacts to `folder`, which must pass
    `require_own`. Returns the file names.
    """
    files = files_of(plan, changes)
    # files left by an earlier plan
    for old in (*folder.glob("*requests/[0-9][0-9]-*.json"), *folder.glob("*.*")):
        old.unlink()
    for name, text in files.items():
        write_atomic(folder / name, text)
    return list(files)


def require_own(folder: Path) -> None:
    """Raises ConfigError if a folder contains files that were not written by a plan, because a plan
    might overwrite or remove them.
    """
    why = no_place(folder)
    if folder.exists() and not folder.is_dir():
        why = "it is not a folder"
    elif folder.is_dir() and (
        other := sorted(
            path.name for path in folder.iterdir() if not re.fullmatch(FILES, path.name)
        )
    ):
        why = f"it contains {other[0]}, which is not part of a plan"
    elif any(folder.glob("*")) and not (folder / "plan.json").exists():
        why = "its files were not written by make plan"
    if why:
        message = f"{folder} must be new, empty or the folder of an earlier plan: {why}"
        raise ConfigError.of("OUT", message, next="make plan OUT=plan")
