"""Derives the keys that a config leaves unset, with the reasons that `make plan` shows.

layouts.py derives layouts. This module also dumps a config as YAML, either resolved or as the user
requested it. Only the requested form can be derived again. And it selects the machines for
tokenizing: data.tokenize_instance_type, or the fleet's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

import yaml

from ..hardware import cpu_speed, node_types
from ..hardware.accelerators import Accelerator
from . import addresses, huggingface_config, owned_machines
from .families import FAMILIES, PLAIN, PRESETS, USUAL, Preset
from .limits import XLA
from .types import Config, Refusals, Rows, Values, flat
from .vocabulary import TRAINED

COMPILE_PAYS_MINUTES = 3
CPU_SHARE = 0.5  # fraction of a CPU step spent in matmuls


@dataclass(frozen=True)
class Derived:
    """Derived value of a key, and the reason for it."""

    key: str
    value: Any
    why: str


class Derivation(list[Derived]):
    """Derived values in order of derivation, with the requested values and the final config."""

    def __init__(self, derived: list[Derived], asked: Values, config: Config) -> None:
        super().__init__(derived)
        self.asked, self.config = asked, config


BUDGET = "with train.activation_memory_budget, the compiler selects the recomputation"
OfKind = Callable[[node_types.NodeType | None, int], node_types.Node]


def derive(
    values: Values, tokens: int, node: OfKind = node_types.node, here: bool = False
) -> list[Derived]:
    """Fills the unset keys of `values` in place, and returns the derived values.

    Args:
        values: Validated config values.
        tokens: The tokenizer's vocabulary size.
        node: Builds a node from its type and the node count.
        here: Whether this machine simulates all nodes.
    """
    found: list[Derived] = []

    def fill(group: str, rows: Rows) -> None:
        """Stores each value at once, because later values may depend on it."""
        for name, value, why in rows:
            values[group][name] = value
            found.append(Derived(f"{group}.{name}", value, why))

    fill("model", _of_model(values["model"], tokens))
    fleet = values["fleet"]
    found += [Derived(*row) for row in owned_machines.settle(fleet, here)]
    kind = owned_machines.node_type_of(fleet)
    machine = _given_by_gres(node(kind, fleet["nodes"]), kind, fleet)
    fill("fleet", _of_fleet(values, machine))
    # The config keeps `auto`, because ranks on different CPUs may choose different dtypes.
    if values["train"]["precision"] == "auto":
        device = kind.accelerator if kind else node_types.local_accelerator() if here else None
        found += [Derived("train.precision", *row) for row in _formats(machine, device)]
    fill("train", _of_training(values))
    return found


def _of_fleet(values: Values, machine: node_types.Node) -> Rows:
    fleet = values["fleet"]
    if fleet["ranks_per_node"] is None:
        batch = values["train"]["global_batch_size"]
        yield "ranks_per_node", *ranks_of(machine, fleet["nodes"], batch)
    if fleet["platform"] is None:
        yield "platform", machine.platform, machine.reason
    if fleet["aws"]["capacity"] == "spot" and not fleet["spot"]:
        yield "spot", True, "fleet.aws.capacity spot"


def _formats(machine: node_types.Node, device: Accelerator | None) -> Iterator[tuple[str, str]]:
    """Yields the dtype that `train.precision: auto` selects and why, unless it is obvious."""
    if machine.cores:
        speed = cpu_speed.of_this_machine()
        yield "bf16" if speed.half else "fp32", speed.formats()
    if device is not None and device.bf16 is None:
        why = (
            f"{device.name} has no bf16 instructions; its matrix products reach "
            f"{device.peak('fp16') / 1e12:.0f} TFLOP/s in fp16, {device.fp32 / 1e12:.1f} in fp32"
        )
        yield device.half, why


def _of_training(values: Values) -> Rows:
    train = values["train"]
    if values["data"]["conversations"] and not train["document_mask"]:
        yield "document_mask", True, "data.conversations"
    if train["compile"] is None:
        yield "compile", *compilation(values)
    if train["spike_sigmas"] is None:
        train["spike_sigmas"] = 6.0
        if values["fleet"]["platform"] == XLA:
            yield "spike_sigmas", 0.0, "NxD's optimizer can't skip a step"
    if train["activation_checkpointing"] is None and train["activation_memory_budget"] is not None:
        yield "activation_checkpointing", "selective", BUDGET
    if train["schedule_steps"] is None:
        yield "schedule_steps", train["steps"], "train.steps"
    if train["decay_steps"] is None:
        train["decay_steps"] = max(1, train["schedule_steps"] // 5)
        if train["schedule"] == "wsd":  # only the wsd schedule uses this value
            yield "decay_steps", train["decay_steps"], "a fifth of train.schedule_steps"
    if train["warmup_steps"] is None:
        steps = min(2000, max(1, train["steps"] // 20))
        yield "warmup_steps", steps, "5 % of train.steps, at most 2000"


def _given_by_gres(
    machine: node_types.Node, kind: node_types.NodeType | None, fleet: Values
) -> node_types.Node:
    """Limits a node to the GPUs in Slurm's gres.

    A job may request only some of a node's GPUs, and gres may be the only key that mentions GPUs.
    """
    gres, gpus = fleet["slurm"]["gres"], owned_machines.gpus_of(fleet["slurm"]["gres"])
    if (
        gpus is None
        or fleet["platform"] == "cpu"
        or (kind is not None and gpus.count >= machine.ranks)
    ):
        return machine
    return replace(
        machine,
        ranks=gpus.count,
        reason=f"fleet.slurm.gres {gres}",
        platform="cuda" if kind is None else machine.platform,
    )


def ranks_of(machine: node_types.Node, nodes: int, batch: int) -> tuple[int, str]:
    """Returns the number of ranks per node, with the reason.

    A node simulated on this machine gets one rank, or one per core if a benchmark was faster that
    way.
    """
    if machine.cores <= 1:
        return machine.ranks, machine.reason
    speed = cpu_speed.of_this_machine()
    apart = speed.is_apart and batch % (nodes * machine.cores) == 0
    return machine.cores if apart else machine.ranks, speed.processes()


def compilation(values: Values) -> tuple[bool, str]:
    """Returns whether to compile the model, with the reason.

    On a CPU, compilation takes about 30 s once, and speeds up fp32 by an eighth and bf16 by a
    quarter (tests/bench/LOG.md).
    """
    fleet, train, model = values["fleet"], values["train"], values["model"]
    if train["activation_memory_budget"] is not None:
        return True, BUDGET
    if fleet["platform"] == XLA:
        return False, "PyTorch/XLA always compiles every step"
    row = owned_machines.node_type_of(fleet)
    if (row and row.accelerator) or node_types.local_accelerators():
        return True, "the device is an accelerator"
    layers, width = model["layers"] or 0, model["hidden_size"] or 0
    matrices = 12 * layers * width**2 + model["vocab_size"] * width
    flops = 6.0 * matrices * train["steps"] * train["global_batch_size"] * train["sequence_length"]
    speed, cores = cpu_speed.of_this_machine(), node_types.local_cores()
    half = train["precision"] == "bf16" or (train["precision"] == "auto" and speed.half)
    minutes = flops / (speed.rate("bf16" if half else "fp32") * CPU_SHARE * cores) / 60
    pays = minutes > COMPILE_PAYS_MINUTES
    return (
        pays,
        f"its matmuls take about {minutes:.0f} min on CPUs; compiling pays off from "
        f"{COMPILE_PAYS_MINUTES} min",
    )


def shape_of(preset: str | None) -> Preset | None:
    """Returns the shape of `model.preset`, which is a preset's name or a Hugging Face model.

    Raises:
        ValueError: config.json is missing, or its model is not supported.
    """
    return (
        huggingface_config.read(addresses.folder_of(preset))
        if preset and preset not in PRESETS
        else PRESETS.get(preset or "")
    )


def other_family(model: Values) -> str:
    """Returns why `model.family` contradicts `model.preset`, or "". Both must already be valid."""
    preset, family = shape_of(model["preset"]), model["family"]
    if preset is None or family in (None, preset.family) or model["preset"] in PLAIN:
        return ""
    known = ", ".join(
        name for name, shape in PRESETS.items() if name in PLAIN or shape.family == family
    )
    return (
        f"{family}: model.preset {model['preset']} has the family {preset.family}; remove this key "
        f"or set another preset: {known}"
    )


def _of_model(model: Values, tokens: int) -> Rows:
    if preset := shape_of(model["preset"]):
        yield from _open(model, vars(preset), f"model.preset {model['preset']}")
    yield from _open(model, {"kv_heads": model["heads"]}, "model.heads")
    usual = {field.name: field.default for field in fields(Preset) if field.default is not MISSING}
    yield from _open(model, usual, "as in Llama 2")
    family = FAMILIES[model["family"] or USUAL]
    published = {"norm_eps": family.norm_eps, "dropout": family.dropout}
    yield from _open(model, published, f"as in {family.name}")
    size = -(-tokens // 64) * 64  # matmuls are faster if sizes are multiples of 64
    why = f"the tokenizer's {tokens}, rounded up to a multiple of 64"
    yield from _open(model, {"vocab_size": size}, why)


def _open(model: Values, offered: Values, why: str) -> Rows:
    """Yields the offered values of keys that are still unset."""
    for name, value in offered.items():
        if model[name] is None and value is not None:
            yield name, value, why


def dump_resolved(config: Config) -> str:
    """Returns the complete config as YAML, including derived values."""
    return _yaml(asdict(config))


def dump_asked(config: Config, derivation: Derivation) -> str:
    """Returns the requested config as YAML, without derived values.

    Includes overrides from SET, make variables and the verb, such as a verb that shortens the run.
    """
    values = copy.deepcopy(derivation.asked)
    before = dict(flat(asdict(derivation.config)))
    for name, value in flat(asdict(config)):
        if value != before.get(name):
            *groups, key = name.split(".")
            target = values
            for group in groups:
                target[group] = target = target.get(group) or {}
            target[key] = value
    return _yaml(values)


def _yaml(values: Values) -> str:
    plain = json.loads(json.dumps(values))  # YAML's safe dumper rejects tuples
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def tokenizing(config: Config) -> Config:
    """Returns the config of a tokenize job.

    If data.tokenize_instance_type is set, the job runs on one on-demand instance of that type, and
    settings meant for the training machines (memory, licenses, image, reservation) are reset.
    Otherwise, the config is unchanged.
    """
    if config.data.tokenize_instance_type is None:
        return config
    aws = replace(config.fleet.aws, capacity="on-demand", reservation=None, ami=None)
    batch = replace(config.fleet.batch, shared_memory_gib=None, consumable_resources=())
    fleet = replace(
        config.fleet,
        instance_type=config.data.tokenize_instance_type,
        nodes=1,
        spot=False,
        aws=aws,
        batch=batch,
    )
    return replace(config, fleet=fleet)


def check_tokenizing(config: Config) -> Refusals:
    """Rejects an unsupported data.tokenize_instance_type, and conversations that the tokenizer or
    model does not support.
    """
    if config.data.conversations and config.data.tokenizer == TRAINED:
        yield (
            "data.conversations",
            f"true: data.tokenizer {TRAINED} has no chat template; use a chat model's folder",
        )
    if config.data.conversations and not FAMILIES[config.model.family].causal:
        yield "data.conversations", f"true: {config.model.family} models can't answer; use false"
    name, rows = config.data.tokenize_instance_type, node_types.INSTANCE_TYPES.values()
    # x86, which the images require, without accelerators or EFA
    works = [row.name for row in rows if row.kind == "cpu" and not row.efa]
    if name is not None and name not in works:
        row = node_types.instance(name)
        why = (
            "tokenizing does not use its accelerators or EFA"
            if row
            else "it is not in the table of instance types"
        )
        yield (
            "data.tokenize_instance_type",
            f"{name!r}: {why}; use one of {', '.join(works)}, or null for the fleet's machines",
        )
