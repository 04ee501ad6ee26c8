"""JSON output of the CLI verbs (JSON=1), and its schema: `python -m
trainfleet.report.json_output`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ..config.key import HEAD, Key, Schema, schema_of
from ..process.install_paths import ROOT
from ..run.run_folder import Run
from ..trust.errors import TrainfleetError
from .history import History, read
from .summary import next_commands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config import Config, Derived
    from ..plan.estimate import Estimate

VERSION = 1  # incremented when a field is renamed, removed or given a new meaning
MEASURED = ("tokens", "valid_loss", "tokens_per_second", "mfu", "goodput", "memory_bytes")
FILE = ROOT / "schema" / "output.schema.json"
STATES = (
    *("not started", "running", "finished", "failed", "stopped"),
    *("interrupted", "unreadable"),
)


@dataclass(frozen=True)
class RunState:
    """A run's state, read from its folder."""

    name: str
    """Name of the run."""
    folder: str
    """Run folder on this machine."""
    status: Annotated[str, Key(enum=STATES)]
    """State of the run. `interrupted` means that its launcher died."""
    fault: str | None
    """Reason why the run folder can't be read."""
    step: int = 0
    """Last logged step."""
    steps: int = 0
    """Configured number of steps."""
    tokens: float | None = None
    """Tokens trained on."""
    first_loss: float | None = None
    """First training loss, in nats per token."""
    loss: float | None = None
    """Latest training loss, or null if it is not finite."""
    valid_loss: float | None = None
    """Latest validation loss."""
    tokens_per_second: float | None = None
    """Total throughput of all ranks."""
    mfu: float | None = None
    """Model FLOPs utilization, from 0 to 1."""
    goodput: float | None = None
    """Useful training time as a fraction of total time, from 0 to 1."""
    memory_bytes: float | None = None
    """Peak memory per rank, in bytes."""
    usd: float | None = None
    """Cost so far, in US dollars."""
    restarts: int = 0
    """Number of restarts after failures."""
    seconds: Annotated[dict[str, float] | None, Key(type=("object",))] = None
    """Run time in seconds, broken down by use, such as train, checkpoint and startup."""
    seconds_left: float | None = None
    """Estimated seconds until the last step, if the run is active."""
    updated: float | None = None
    """Unix time of the last update."""
    last_checkpoint: str | None = None
    """Address of the latest checkpoint."""
    waits_for: str | None = None
    """The scheduler's reason why the job is queued."""
    verdict: str | None = None
    """Cause of the failure, with the rank or host."""
    next: tuple[str, ...] = ()
    """Commands to run next."""


@dataclass(frozen=True)
class StatusOutput:
    run: RunState
    """The run."""


@dataclass(frozen=True)
class RunsOutput:
    runs: tuple[RunState, ...]
    """Runs in this folder, by name."""


@dataclass(frozen=True)
class CompareOutput:
    runs: tuple[RunState, ...]
    """The compared runs."""
    differences: Annotated[dict[str, list[Any]], Key(type=("object",))]
    """Config keys in which the runs differ, each with one value per run."""
    plot: str
    """Path of the plot that shows all loss curves."""


@dataclass(frozen=True)
class CheckpointState:
    """A checkpoint, as described by its marker and file sizes."""

    step: int
    """Step after which the checkpoint was saved."""
    address: str
    """Folder or S3 address."""
    fault: str | None
    """Reason why the checkpoint is broken, or null."""
    time: float | None = None
    """Unix time at which the checkpoint was saved."""
    bytes: int | None = None
    """Total size of all files, in bytes."""
    loss: float | None = None
    """Training loss at the checkpoint's step."""
    layout: Annotated[dict[str, int] | None, Key(type=("object",))] = None
    """Parallelism degrees with which the checkpoint was saved."""


@dataclass(frozen=True)
class CheckpointsOutput:
    checkpoints: tuple[CheckpointState, ...]
    """Checkpoints, oldest first, followed by broken ones that were set aside."""


@dataclass(frozen=True)
class VerifyOutput:
    checkpoint: CheckpointState
    """The checkpoint. `fault` is null if every byte and every number is intact."""


@dataclass(frozen=True)
class EvalOutput:
    """Mean scores over all predicted tokens of the validation split."""

    name: str
    """Name of the run."""
    sequences: int
    """Number of validation sequences."""
    loss: float
    """Loss, in nats per predicted token."""
    perplexity: float
    """Exponential of the loss."""
    accuracy: float
    """Fraction of correct predictions, from 0 to 1."""
    baseline: float
    """Accuracy of always predicting the most common token."""
    pair_accuracy: float | None
    """Accuracy of predicting the order of two segments, or null for a model without this task."""
    bits_per_byte: float | None
    """Loss in bits per UTF-8 byte of text, or null for a masked model."""


@dataclass(frozen=True)
class InspectOutput:
    dataset: str
    """Name of the dataset."""
    identity: str
    """Hash of the shards and the tokenizer."""
    tokens: int
    """Tokens in the training split."""
    validation_tokens: int
    """Tokens in the validation split."""
    documents: int
    """Documents in both splits."""
    validation_documents: int
    """Documents in the validation split."""
    text_bytes: int
    """Size of the text, in bytes."""
    vocabulary_size: int
    """Vocabulary size of the tokenizer."""
    dtype: str
    """Integer type of the stored tokens."""
    shards: int
    """Number of shards."""
    files_verified: int
    """Number of files whose checksums were verified; 0 without VERIFY=1."""
    sample: int
    """Index of the sample in the training order."""
    position: int
    """Position of the sample within its source."""
    source: str
    """Source of the sample, or `all sources`."""
    ids: tuple[int, ...]
    """Token ids of the sample."""
    text: str
    """Text of the sample."""


@dataclass(frozen=True)
class HostHealth:
    name: str
    """Name of the host."""
    faults: tuple[str, ...]
    """Problems found on the host. Empty if it passed all checks."""


@dataclass(frozen=True)
class DoctorOutput:
    healthy: bool
    """Whether all checks passed."""
    hosts: tuple[HostHealth, ...]
    """Examined hosts. Empty unless the backend reaches hosts over SSH."""
    lines: tuple[str, ...]
    """What the verb prints without JSON=1."""


@dataclass(frozen=True)
class RecipeLine:
    name: str
    """Name to pass as RECIPE."""
    about: str
    """What the recipe trains, and on which machines."""


@dataclass(frozen=True)
class RecipesOutput:
    recipes: tuple[RecipeLine, ...]
    """Complete configs that come with trainfleet."""


@dataclass(frozen=True)
class ResourceState:
    """An AWS resource with trainfleet's tags."""

    kind: str
    """Kind of resource."""
    id: str
    """AWS identifier, or "" for a kind that the credentials are not allowed to list."""
    config: str
    """Name in the config that created the resource."""
    about: str
    """Description, or the reason why resources of this kind could not be listed."""
    since: float | None
    """Unix time of creation."""
    usd_per_hour: float | None
    """Price per hour in US dollars, or null if it is unknown."""
    holds_data: bool
    """Whether the resource is removed only with PURGE=1."""


@dataclass(frozen=True)
class LsOutput:
    region: str | None
    """AWS region, or null if the backend creates no resources."""
    resources: tuple[ResourceState, ...]
    """All resources in the region, from every config."""


@dataclass(frozen=True)
class DerivedKey:
    """A config key whose value trainfleet chose."""

    key: str
    """Dotted config key."""
    value: str
    """The chosen value."""
    why: str
    """Reason for the value."""


@dataclass(frozen=True)
class PlanOutput:
    name: str
    """Name of the run."""
    backend: str
    """Backend that runs the jobs."""
    nodes: int
    """Number of nodes."""
    world_size: int
    """Number of ranks."""
    parameters: int
    """Number of model parameters."""
    memory_bytes: int
    """Predicted peak memory of the most loaded rank, in bytes."""
    usable_bytes: float | None
    """Memory available to a rank, in bytes."""
    tokens_per_second: float | None
    """Predicted total throughput of all ranks."""
    seconds: float | None
    """Predicted time from the first step to the last, with failures and checkpoints."""
    seconds_range: tuple[float, ...]
    """Predicted range of run times, which should cover four of five such runs."""
    goodput: float | None
    """Predicted useful training time as a fraction of total time, from 0 to 1."""
    usd: float | None
    """Predicted cost from setup to teardown, in US dollars."""
    derived: tuple[DerivedKey, ...]
    """Values that trainfleet chose."""
    config: Annotated[dict[str, Any], Key(type=("object",))]
    """The complete config."""


OUTPUTS: dict[str, type[Any]] = {
    "plan": PlanOutput,
    "status": StatusOutput,
    "runs": RunsOutput,
    "compare": CompareOutput,
    "checkpoints": CheckpointsOutput,
    "verify": VerifyOutput,
    "eval": EvalOutput,
    "inspect": InspectOutput,
    "doctor": DoctorOutput,
    "recipes": RecipesOutput,
    "ls": LsOutput,
}


def emit(output: Any) -> None:
    """Prints the output as one JSON object."""
    print(json.dumps({"version": VERSION} | asdict(output), indent=2, allow_nan=False))


def plan_of(config: Config, derived: Sequence[Derived], needs: Estimate) -> PlanOutput:
    """Returns the output for a config's estimate."""
    train, elapsed = config.train, needs.elapsed
    tokens = train.steps * config.step_tokens
    return PlanOutput(
        config.name,
        config.fleet.backend,
        config.fleet.nodes,
        config.world_size,
        needs.parameters,
        needs.memory.total,
        needs.usable,
        tokens / needs.seconds if needs.seconds else None,
        elapsed,
        needs.between(elapsed) if elapsed else (),
        needs.goodput.share if needs.goodput else None,
        needs.usd,
        tuple(DerivedKey(row.key, str(row.value), row.why) for row in derived),
        asdict(config),
    )


def state_of(run: Run, heard: str = "") -> RunState:
    """Returns the state of a run. `heard` is the scheduler's current message about a waiting
    job.
    """
    try:
        return _state(read(run), heard)
    except (TrainfleetError, OSError) as error:
        fault = error.what if isinstance(error, TrainfleetError) else str(error)
        return RunState(run.name, str(run.folder), "unreadable", fault)


def _state(history: History, heard: str) -> RunState:
    run, results = history.run, history.results
    first, last = history.losses
    return RunState(
        run.name,
        str(run.folder),
        history.status,
        None,
        step=history.step,
        steps=history.steps_total,
        first_loss=first,
        loss=None if history.is_lost else last,
        usd=results.get("usd"),
        restarts=results.get("restarts", 0),
        last_checkpoint=results.get("last_checkpoint"),
        verdict=history.verdict[0] if history.verdict else None,
        next=tuple(command for command, _ in next_commands(history)),
        **_measured(history, heard),
    )


def _measured(history: History, heard: str) -> dict[str, Any]:
    running = history.status == "running"
    files = [path for path in (history.run.results, history.run.metrics) if path.exists()]
    return {name: history.measured(name) for name in MEASURED} | {
        "seconds": {name: round(value, 3) for name, value in history.stages.items()},
        "seconds_left": history.seconds_left if running else None,
        "waits_for": (running and (heard or history.waits_for)) or None,
        "updated": max((path.stat().st_mtime for path in files), default=None),
    }


def schema() -> Schema:
    """Returns the JSON Schema of the output, with one definition per verb."""
    verbs = {verb: _open(schema_of(kind, described=True)) for verb, kind in OUTPUTS.items()}
    for part in verbs.values():
        part["properties"] |= {"version": {"const": VERSION}}
        part["required"].append("version")
    return {
        "$schema": HEAD["$schema"],
        "title": "trainfleet output",
        "description": "What each verb prints with JSON=1. Later releases may add fields.",
        "$defs": verbs,
    }


def _open(part: Schema) -> Schema:
    """Marks all fields as required, because all are printed. Allows additional fields, because a
    later release may add some.
    """
    part.pop("default", None)
    part.pop("additionalProperties", None)
    for inner in [*part.get("properties", {}).values(), *filter(None, [part.get("items")])]:
        _open(inner)
    if "properties" in part:
        part["required"] = [*part["properties"]]
    return part


if __name__ == "__main__":
    FILE.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
