"""Chooses the layout, micro-batch size and recomputation mode with the fastest predicted step that
fits in memory.

Keys that the user set are not changed. Also refits a run to fewer nodes without changing the global
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations

from ..hardware import node_types
from ..hardware.accelerators import Accelerator
from . import cross_checks
from .derive import Derived
from .layout_search import (
    KEYS,
    MODES,
    NEAR,
    PLAIN,
    SMALLEST,
    Choice,
    choose,
    least,
    needs,
    ranked,
    sizes,
    training,
)
from .limits import is_half, usable_bytes
from .optimizers import OPTIMIZERS
from .speed import step_of
from .speed_inputs import as_device, work_of
from .types import Config, Values

CPU_TOKENS = 4096  # enough for efficient matmuls on a CPU core (tests/bench/LOG.md)


def provide(train: Values) -> set[str]:
    """Sets the unset layout keys of `train` to their smallest values in place, and returns these
    keys for `settle`.
    """
    asked = {f"parallelism.{name}" for name, value in train["parallelism"].items() if value is None}
    asked |= {name for name in SMALLEST if train[name] is None}
    given = {name: value for name, value in train["parallelism"].items() if value is not None}
    train["parallelism"] = asdict(PLAIN) | given
    train |= {name: value for name, value in SMALLEST.items() if name in asked}
    return asked


def settle(config: Config, asked: set[str]) -> tuple[Config, list[Derived]]:
    """Chooses values for the keys in `asked`, such as `parallelism.fsdp` or `micro_batch_size`.

    Returns the config, and the choices to show with their reasons.
    """
    device = config.fleet.rank_device
    if device is None or not asked:
        settled = _for_cpus(config, asked)
        reasons = _unknown(settled, asked)
    elif choices := ranked(config, asked, device):
        settled = choose(choices).config
        reasons = {key: _reason(key, settled, choices, device) for key in KEYS if key in asked}
    else:
        settled, reasons = least(config, asked, device) or config, {}
    reasons = {key: why for key, why in reasons.items() if _is_shown(key, settled, config)}
    return settled, [
        Derived(f"train.{key}", _value(settled, key), why) for key, why in reasons.items()
    ]


def lack(config: Config, asked: set[str]) -> str | None:
    """Returns why no layout fits in memory, with a suggested fix, or None if one fits or the device
    is unknown.

    The fix is to change the keys that rule out a fitting layout, or to use more nodes.
    """
    device = config.fleet.rank_device
    if (
        device is None
        or not any(key.startswith("parallelism.") for key in asked)
        or needs(config) <= usable_bytes(device)
    ):
        return None
    if any(message for rule in cross_checks.DIVISION for message in rule(config)):
        return None  # the violated rule is the cause, and reports its own error
    if way := _in_the_way(config, asked, device):
        return f"{_lacking(config, device)}; {way}"
    for times in (2, 4, 8, 16, 32, 64):
        more = replace(config, fleet=replace(config.fleet, nodes=times * config.fleet.nodes))
        if _fits(least(more, asked, device), device):
            return (
                f"{_lacking(config, device)}; set NODES={more.fleet.nodes}"
                f"{_halved(config, asked, device)}"
            )
    return (
        f"{_lacking(config, device)}, and many more nodes would not help; use a shorter "
        "train.sequence_length or a smaller model"
    )


def best(config: Config, count: int) -> list[Choice]:
    """Returns the config's layout and the `count - 1` fastest other layouts, fastest first.

    Returns an empty list for an unknown device or a single rank.
    """
    device = config.fleet.rank_device
    if device is None or config.world_size == 1:
        return []
    budget = config.train.activation_memory_budget
    asked = {key for key in KEYS if key != "activation_checkpointing" or budget is None}
    own = Choice(config, needs(config), step_of(work_of(config), as_device(config, device)))
    seen: dict[object, Choice] = {}
    # keep only the fastest micro-batch size, recomputation mode and interleaving of other layouts
    for choice in (own, *ranked(config, asked, device)):
        seen.setdefault(replace(choice.config.train.parallelism, virtual_stages=1), choice)
    return sorted(list(seen.values())[:count], key=lambda choice: choice.seconds)


def _for_cpus(config: Config, asked: set[str]) -> Config:
    """Returns the config with the largest micro-batch within CPU_TOKENS, or else the smallest."""
    if "micro_batch_size" not in asked:
        return config
    found = sizes(config)
    size = max(
        (size for size in found if size * config.train.sequence_length <= CPU_TOKENS),
        default=found[0],
    )
    return training(config, micro_batch_size=size)


def _fits(config: Config | None, device: Accelerator) -> bool:
    return config is not None and needs(config) <= usable_bytes(device)


def _in_the_way(config: Config, asked: set[str], device: Accelerator) -> str:
    """Names the smallest set of user-set keys that rules out every fitting layout, or returns "".

    Also suggests their values in the fastest layout that fits.
    """
    given = [key for key in KEYS if key not in asked]
    for keys in (*combinations(given, 1), *combinations(given, 2), given):
        if choices := ranked(config, asked | set(keys), device):
            found = choose(choices).config
            moved = [key for key in keys if _value(found, key) != _value(config, key)]
            fixed, free = (
                " ".join(f"train.{key}={_value(each, key)}" for key in moved)
                for each in (config, found)
            )
            return f"{fixed} {'is' if len(moved) == 1 else 'are'} in the way; set {free}"
    return ""


def _halved(config: Config, asked: set[str], device: Accelerator) -> str:
    """Suggests train.param_dtype=bf16 if the model then fits, or returns ""."""
    if (
        "bf16" not in OPTIMIZERS[config.train.optimizer].formats
        or config.train.param_dtype == "bf16"
        or not is_half(config)
    ):
        return ""
    small = least(
        training(config, param_dtype="bf16", precision="bf16"),
        asked,
        device,
    )
    return ", or train.param_dtype=bf16 train.precision=bf16" if _fits(small, device) else ""


def _lacking(config: Config, device: Accelerator) -> str:
    ranks = f"{config.world_size} ranks of {usable_bytes(device) / 2**30:.1f} GiB ({device.name})"
    return (
        f"auto: no layout of {ranks} fits the model; the smallest needs "
        f"{needs(config) / 2**30:.1f} GiB per rank"
    )


def _is_shown(key: str, settled: Config, given: Config) -> bool:
    """Returns whether a plan shows a key.

    fsdp, micro-batch size and recomputation are always shown, but other degrees only if they differ
    from plain data parallelism.
    """
    if key == "parallelism.zero_stage":
        return settled.train.parallelism.fsdp > 1
    return "." not in key or key == "parallelism.fsdp" or _value(settled, key) != _value(given, key)


def _value(config: Config, key: str) -> object:
    return (
        getattr(config.train.parallelism, key.removeprefix("parallelism."))
        if "." in key
        else getattr(config.train, key)
    )


def _unknown(config: Config, asked: set[str]) -> dict[str, str]:
    """Returns the reasons to show for CPUs and unknown devices, by key."""
    known = "the fastest in measurements on CPUs"
    unknown = (
        "this device is not in the table, so memory can't be checked; set "
        "train.parallelism yourself"
    )
    part = max(1, config.train.global_batch_size // max(1, config.data_parallel))
    why = {
        "parallelism.fsdp": "every rank has the whole model: "
        f"{unknown if node_types.local_accelerators() else known}",
        "micro_batch_size": f"largest that divides {part} (train.global_batch_size over "
        f"{config.data_parallel} data-parallel ranks) within {CPU_TOKENS} tokens",
    }
    return {key: reason for key, reason in why.items() if key in asked}


def _reason(key: str, settled: Config, choices: list[Choice], device: Accelerator) -> str:
    """Returns the reason for a key's value.

    Compares the choice with the fastest one that has another value, or states that no other value
    fits.
    """
    chosen = next(choice for choice in choices if choice.config is settled)
    there = (
        f"{chosen.bytes / 2**30:.1f} of {usable_bytes(device) / 2**30:.1f} GiB usable "
        f"({device.name})"
    )
    if key == "micro_batch_size":
        others = [choice for choice in choices if _differs(choice, settled)]
        return f"{there}; {_against(chosen, others, 'any other value')}"
    less = [choice for choice in choices if _order(key, choice.config) < _order(key, settled)]
    if less:
        return f"{there}; " * (key == "parallelism.fsdp") + _against(
            chosen, less, "the best layout with less"
        )
    if _value(settled, key) != _plain(key):
        return f"no layout with less divides the batch and fits; this one needs {there}"
    more = [choice for choice in choices if _order(key, choice.config) > _order(key, settled)]
    return f"{there}; {_against(chosen, more, 'the best layout with more')}"


def _against(chosen: Choice, others: list[Choice], what: str) -> str:
    if not others:
        return "no other value divides the batch and fits"
    slower = min(choice.seconds for choice in others) / chosen.seconds - 1
    if slower < 0:
        return f"{what} is predicted to be as fast, within {NEAR:.0%}"
    return f"{what} is predicted to be {f'{slower:.0%} slower' if slower >= 0.01 else 'as fast'}"


def _differs(choice: Choice, settled: Config) -> bool:
    """Returns whether a choice differs from the settled one only in the micro-batch."""
    train, other = settled.train, choice.config.train
    return (
        other.micro_batch_size != train.micro_batch_size
        and replace(other, micro_batch_size=train.micro_batch_size) == train
    )


def _plain(key: str) -> object:
    return {"activation_checkpointing": "none", "parallelism.zero_stage": 1}.get(key) or getattr(
        PLAIN, key.removeprefix("parallelism.")
    )


def _order(key: str, config: Config) -> float:
    value = _value(config, key)
    if isinstance(value, str):
        return MODES.index(value)
    assert isinstance(value, int | float)
    return value


def smaller(config: Config) -> Iterator[Config]:
    """Yields the config refitted to one node fewer, two nodes fewer, and so on, down to
    fleet.min_nodes. Skips node counts that violate a rule.
    """
    least = config.fleet.min_nodes or config.fleet.nodes
    for nodes in range(config.fleet.nodes - 1, least - 1, -1):
        candidate = refit(config, nodes)
        if not any(cross_checks.check(candidate, set(), 0)):
            yield candidate


def refit(config: Config, nodes: int) -> Config:
    """Returns the config refitted to `nodes` nodes.

    Ranks accumulate gradients over more micro-batches, but micro-batches never grow, because only
    the current size is known to fit. The state stays sharded across as many ranks, or across the
    largest smaller number that divides the remaining data-parallel ranks.
    """
    fewer = replace(
        config,
        fleet=replace(
            config.fleet, nodes=nodes, min_nodes=min(config.fleet.min_nodes or nodes, nodes)
        ),
    )
    layout, ways = config.train.parallelism, fewer.data_parallel
    shard = max(
        (degree for degree in range(1, min(layout.fsdp, ways) + 1) if ways % degree == 0),
        default=1,
    )
    fewer = training(fewer, parallelism=replace(layout, fsdp=shard))
    part = fewer.train.global_batch_size // fewer.data_parallel if fewer.data_parallel else 0
    fits = [size for size in range(1, config.train.micro_batch_size + 1) if part % size == 0]
    return training(fewer, micro_batch_size=fits[-1]) if fits else fewer
