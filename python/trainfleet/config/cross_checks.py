"""Validation rules that span several keys, which the schema can't express.

Each message names the keys, their values and the closest values that work. The rules apply to all
backends. Each backend adds its own in its `refuse` method (backends/base.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

from ..hardware import node_types
from ..trust.spelling import suggest
from . import addresses, derive, limits, owned_machines, schedule
from .families import FAMILIES, Preset
from .host_list import parse_hosts
from .types import Config, Layout, Refusals

# Variables that control the dynamic loader, shell, Python, trainfleet or torchrun.
NOT_SECRET = re.compile(
    "(LD|DYLD|PYTHON|TRAINFLEET|MASTER|TORCHELASTIC)_?.*|PATH|HOME|USER|LOGNAME|SHELL|IFS|ENV|BASH_ENV|TMPDIR|TERM|LANG|LC_ALL|RANK|WORLD_SIZE"
)
SHORTEST_MASKED = 8  # minimum sequence length for masked models
Rule = Callable[[Config], Refusals]  # yields (key, message)


# Keys that depend on the model's shape. If model.preset or model.family is invalid, they are not
# checked, because the shape is only a default.
SHAPED = (
    "model",
    "train.sequence_length",
    "train.parallelism",
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.activation_memory_budget",
    "train.document_mask",
    "checkpoint.export_hf",
)
DIALS = {"model.preset": SHAPED, "model.family": SHAPED}


def check(config: Config, broken: set[str], tokens: int) -> Refusals:
    """Yields every rule violation in the config.

    Skips violations of the keys in `broken`, because an error was already reported for them.
    """
    broken = broken | {key for dial in broken & DIALS.keys() for key in DIALS[dial]}
    if config.model.vocab_size < tokens and not broken & {
        "model.vocab_size",
        "data.vocab_size",
    }:
        yield (
            "model.vocab_size",
            f"{config.model.vocab_size} is smaller than the tokenizer's {tokens} (data.tokenizer)",
        )
    for rule in RULES:
        for key, message in rule(config):
            if not any(f"{key}.".startswith(f"{group}.") for group in broken):
                yield key, message


def check_shape(config: Config) -> Refusals:
    """Yields violations that make a resolved config's model or layout impossible on any machine."""
    for rule in (_hosts, _heads, *DIVISION, _family, _sequence, _profile):
        yield from rule(config)


def _instance_type(config: Config) -> Refusals:
    name = config.fleet.instance_type
    if name is not None and name not in node_types.INSTANCE_TYPES:
        types = list(node_types.INSTANCE_TYPES)
        known = [each for each in types if each.startswith(name)] or types
        why = node_types.left_out(name) or owned_machines.instead(name)
        instead = f": {why}" if why else suggest(name, known) or f"; known: {', '.join(known)}"
        yield "fleet.instance_type", f"{name!r} is not in the table of instance types{instead}"
    row = node_types.instance(name)
    if row and row.efa == 0 and row.accelerator and config.fleet.nodes > 1:
        yield (
            "fleet.instance_type",
            f"{name} has no EFA and can't train on {config.fleet.nodes} nodes; set NODES=1, or "
            "a larger instance type",
        )


def _machine(config: Config) -> Refusals:
    """Rejects keys that contradict the node type."""
    fleet, row = config.fleet, config.fleet.node_type
    if row is None:
        return
    if fleet.platform == "cpu":
        return  # the ranks run on CPUs even if the nodes have accelerators
    kind = row.accelerator.kind if row.accelerator else "no"
    if fleet.platform.partition("-")[0] != kind:
        yield (
            "fleet.platform",
            f"{fleet.platform}: {row.name} has {kind} devices; use {node_types.platform_of(row)}",
        )
    elif row.accelerator and row.accelerator.platform == "cuda-volta" and fleet.platform == "cuda":
        yield (
            "fleet.platform",
            f"cuda: its torch does not support {row.accelerator.name}; use cuda-volta",
        )
    elif fleet.ranks_per_node > row.accelerators:
        most = f"{row.name} has {row.accelerators} devices, and two ranks can't share one"
        yield "fleet.ranks_per_node", f"{fleet.ranks_per_node}: {most}; use {row.accelerators}"


def _hosts(config: Config) -> Refusals:
    fleet = config.fleet
    try:
        hosts = parse_hosts(fleet.hosts)
    except ValueError as error:
        yield "fleet.hosts", str(error)
        return
    where = [f"{host.address.lower()}:{host.port}" for host in hosts]
    for kind, values in (("name", [host.name.lower() for host in hosts]), ("address", where)):
        if twice := sorted(value for value, count in Counter(values).items() if count > 1)[:8]:
            yield "fleet.hosts", f"two hosts have the {kind} {', '.join(twice)}"
    if fleet.min_nodes is not None and fleet.min_nodes > fleet.nodes:
        yield "fleet.min_nodes", f"{fleet.min_nodes} is more than fleet.nodes {fleet.nodes}"


def _secrets(config: Config) -> Refusals:
    """Rejects secrets named after variables that control programs on a node.

    This machine's values could break those programs.
    """
    if taken := [name for name in config.fleet.secrets if NOT_SECRET.fullmatch(name)]:
        yield (
            "fleet.secrets",
            f"{', '.join(taken[:8])}: each node sets its own value; list only secrets, such as "
            "HF_TOKEN",
        )


def _layout(config: Config) -> Refusals:
    layout, world = config.train.parallelism, config.world_size
    together = layout.tensor * layout.pipeline * layout.context
    if world % together:
        parts = (
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} "
            f"= {together}"
        )
        yield (
            "train.parallelism",
            f"{parts} does not divide the world size {world} ({config.fleet.nodes} nodes x "
            f"{config.fleet.ranks_per_node} ranks); valid products: {_listed(divisors(world))}",
        )
    elif config.data_parallel % layout.fsdp:
        ways = config.data_parallel
        yield (
            "train.parallelism.fsdp",
            f"{layout.fsdp} does not divide the {ways} data-parallel ranks; valid values: "
            f"{_listed(divisors(ways))}",
        )


def _tensor(config: Config) -> Refusals:
    model, train, tensor = config.model, config.train, config.train.parallelism.tensor
    heads = math.gcd(model.heads, model.kv_heads)
    if tensor > 1 and FAMILIES[model.family].normed == "all":
        yield (
            "train.parallelism.tensor",
            f"{tensor}: {model.family} normalizes all heads together; use 1",
        )
    elif heads % tensor and not limits.copies_heads(config):
        both = f"model.heads {model.heads} and model.kv_heads {model.kv_heads}"
        more = [f"{degree} ({copies})" for degree, copies in limits.copies(config).items()]
        copied = f"; with copied key-value heads (copies each): {', '.join(more)}" if more else ""
        yield (
            "train.parallelism.tensor",
            f"{tensor} does not divide {both}; valid values: {_listed(divisors(heads))}{copied}",
        )
    elif model.intermediate_size % tensor:
        fit = divisors(math.gcd(heads, model.intermediate_size))
        yield (
            "train.parallelism.tensor",
            f"{tensor} does not divide model.intermediate_size {model.intermediate_size}; valid "
            f"values: {_listed(fit)}",
        )
    elif train.sequence_length % (tensor * train.parallelism.context):
        yield (
            "train.parallelism.tensor",
            f"{tensor} x context {train.parallelism.context} does not divide train.sequence_length "
            f"{train.sequence_length}; each rank has a part of the sequence",
        )


def _pipeline(config: Config) -> Refusals:
    model, train, layout = config.model, config.train, config.train.parallelism
    stages = layout.pipeline * layout.virtual_stages
    if layout.pipeline == 1:
        if layout.virtual_stages > 1:
            yield (
                "train.parallelism.virtual_stages",
                f"{layout.virtual_stages} needs train.parallelism.pipeline 2 or more; use 1",
            )
        return
    if stages > model.layers:
        interleave = (
            "" if layout.virtual_stages == 1 else f" x virtual_stages {layout.virtual_stages}"
        )
        key = (
            "train.parallelism.pipeline"
            if layout.pipeline > model.layers
            else "train.parallelism.virtual_stages"
        )
        yield (
            key,
            f"{layout.pipeline}{interleave} makes {stages} stages of {model.layers} "
            f"layers; use at most {model.layers}",
        )
    part = train.global_batch_size // max(1, config.data_parallel)
    passes = part // train.micro_batch_size
    if not part % train.micro_batch_size and not fills(passes, layout):
        fit = [size for size in divisors(part) if fills(part // size, layout)]
        whole = config.data_parallel * layout.pipeline
        few = passes < layout.pipeline
        needed = (
            f"fewer than the {layout.pipeline} stages"
            if few
            else "not divisible by the interleaved rounds"
        )
        yield (
            "train.micro_batch_size",
            f"{train.micro_batch_size} makes {passes} micro-batches per step, {needed};"
            + (
                f" valid sizes: {_listed(fit)}"
                if fit
                else f" set train.global_batch_size to a multiple of {whole}"
            ),
        )


def fills(passes: int, layout: Layout) -> bool:
    """Returns whether the pipeline schedule accepts this number of micro-batches.

    It needs at least one per stage. 1F1B accepts any larger number (BLOOM ran 128 micro-batches on
    12 stages). torch's interleaved schedule requires a multiple of its number of rounds.
    """
    if layout.pipeline == 1:
        return True
    return passes >= layout.pipeline and (
        layout.virtual_stages == 1 or passes % (passes // layout.pipeline) == 0
    )


def _context(config: Config) -> Refusals:
    length, context = config.train.sequence_length, config.train.parallelism.context
    if context > 1 and length % (2 * context):
        fit = [
            1,
            *(degree for degree in range(2, min(length, 64) + 1) if length % (2 * degree) == 0),
        ]
        yield (
            "train.parallelism.context",
            f"2 x {context} pieces do not divide train.sequence_length {length}; valid "
            f"values: {_listed(fit)}",
        )


def _heads(config: Config) -> Refusals:
    model, rotary = config.model, FAMILIES[config.model.family].rotary
    if (
        model.head_dim is not None
        and not rotary
        and model.head_dim * model.heads != model.hidden_size
    ):
        yield (
            "model.head_dim",
            f"{model.head_dim}: {model.family} needs model.hidden_size / model.heads; use null",
        )
    elif model.head_dim is None and model.hidden_size % model.heads:
        yield "model.heads", f"{model.heads} does not divide model.hidden_size {model.hidden_size}"
    elif rotary and model.head_features % 2:
        yield (
            "model.heads" if model.head_dim is None else "model.head_dim",
            f"makes heads of {model.head_features} features; the rotary embedding needs an even "
            "number",
        )
    if model.heads % model.kv_heads:
        yield "model.kv_heads", f"{model.kv_heads} does not divide model.heads {model.heads}"


def _family(config: Config) -> Refusals:
    model, family, length = (
        config.model,
        FAMILIES[config.model.family],
        config.train.sequence_length,
    )
    if not family.rotary and model.kv_heads != model.heads:
        yield (
            "model.kv_heads",
            f"{model.kv_heads}: {model.family} needs as many as model.heads; use {model.heads}",
        )
    if not family.scalable and model.rope_scaling != 1:
        yield "model.rope_scaling", f"{model.family} can't scale its positions; use 1"
    if not family.rotary and model.rope_theta != Preset.rope_theta:
        yield (
            "model.rope_theta",
            f"{model.rope_theta:g}: {model.family} has learned positions; remove this key",
        )
    if family.rotary and model.dropout:
        yield "model.dropout", f"{model.dropout}: {model.family} has no dropout; use 0"
    if not family.causal and length < SHORTEST_MASKED:
        yield (
            "train.sequence_length",
            f"{length} tokens are too few for masking; use at least {SHORTEST_MASKED}",
        )


def _documents(config: Config) -> Refusals:
    family = config.model.family
    # derive.check_tokenizing checks conversations
    allowed = FAMILIES[family].causal or config.data.conversations
    if config.train.document_mask and not allowed:
        yield (
            "train.document_mask",
            f"true: {family} models attend across documents; use false",
        )


def _samples(config: Config) -> Refusals:
    layout = config.train.parallelism
    divided = config.data_parallel < config.world_size or layout.fsdp > 1
    if config.train.sample_prompts and (divided or not FAMILIES[config.model.family].causal):
        yield (
            "train.sample_prompts",
            "needs a decoder, and a layout that does not split it (train.parallelism); use []",
        )


def _global_batch(config: Config) -> Refusals:
    batch, ways = config.train.global_batch_size, config.data_parallel
    if ways and batch % ways:
        yield (
            "train.global_batch_size",
            f"{batch} is not a multiple of the {ways} data-parallel ranks; nearest valid "
            f"values: {_nearest(batch, ways)}",
        )


def _micro_batch(config: Config) -> Refusals:
    train, ways = config.train, config.data_parallel
    if (
        ways
        and not train.global_batch_size % ways
        and train.global_batch_size % (train.micro_batch_size * ways)
    ):
        part = train.global_batch_size // ways
        near = sorted(
            sorted(divisors(part), key=lambda size: abs(size - train.micro_batch_size))[:3]
        )
        yield (
            "train.micro_batch_size",
            f"{train.micro_batch_size} does not divide a rank's {part} sequences; "
            "nearest valid values: "
            f"{', '.join(map(str, near))}",
        )


def _own(config: Config) -> Refusals:
    """Rejects settings that user-defined model modules don't support."""
    if config.model.module and config.checkpoint.export_hf:
        yield (
            "checkpoint.export_hf",
            f"true: transformers has no architecture for model.module {config.model.module}; "
            "use false",
        )


def _sequence(config: Config) -> Refusals:
    length, model = config.train.sequence_length, config.model
    if length > model.max_position_embeddings:
        yield (
            "train.sequence_length",
            f"{length} is more than model.max_position_embeddings {model.max_position_embeddings}",
        )


def _profile(config: Config) -> Refusals:
    first, last = map(int, (config.train.profile_steps or "1-1").split("-"))
    if first > last or first > config.train.steps:
        yield (
            "train.profile_steps",
            f"{config.train.profile_steps} is empty or begins after train.steps "
            f"{config.train.steps}; use 4-6",
        )


def divisors(number: int) -> list[int]:
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({size for one in low for size in (one, number // one)})


def _listed(sizes: list[int]) -> str:
    """Formats sizes as `1, 2, 4`. A long list is truncated."""
    return ", ".join(map(str, sizes[:8])) + (" ..." if len(sizes) > 8 else "")


def _nearest(batch: int, ways: int) -> str:
    below = batch // ways * ways
    return ", ".join(str(size) for size in (below, below + ways) if size)


DIVISION: tuple[Rule, ...] = (_layout, _tensor, _pipeline, _context, _global_batch, _micro_batch)
# rules that a layout chosen by `auto` must satisfy
OF_A_LAYOUT: tuple[Rule, ...] = (
    *DIVISION,
    _samples,
    limits.check_budget,
    limits.check_formats,
    limits.check_layout,
)


RULES: tuple[Rule, ...] = (
    _instance_type,
    owned_machines.check,
    _machine,
    _hosts,
    _secrets,
    addresses.check_shared_folder,
    addresses.check,
    _heads,
    *DIVISION,
    _family,
    _own,
    _documents,
    _samples,
    _sequence,
    schedule.check,
    limits.check_budget,
    limits.check_formats,
    _profile,
    addresses.check_destination,
    limits.check_node,
    limits.check_layout,
    limits.check_training,
    derive.check_tokenizing,
)
