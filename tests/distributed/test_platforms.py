"""Each key of model and train on each platform, beside each kind of layout: it trains and validates, or the plan refuses it by name.

Platforms without their chip run on stand-ins: neuron_ranks.py, nxd_ranks.py. What they compute is compared elsewhere; here, that nothing
that a plan accepts ends a run: not at the first step, nor at a first validation hours after it began.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import ranks
from ranks import Bench

from trainfleet.trust.errors import ConfigError

HERE = Path(__file__).parent
PROGRAMS = {
    "cpu": ranks.__file__,
    "neuron": str(HERE / "neuron_ranks.py"),
    "neuron-xla": str(HERE / "nxd_ranks.py"),
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, {}),
    "sharded": (2, {"fsdp": 2, "zero_stage": 1}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
}
# Everything at once that a short run has: steps on several micro-batches, a validation that one rank has no whole batch of, a save.
SHORT = {
    "train.steps": 2, "train.micro_batch_size": 2, "train.validate_every": 1, "train.validation_sequences": 3, "checkpoint.every": 2,
    "train.precision": "fp32", "train.compile": "false", "train.spike_sigmas": 0,
}  # fmt: skip
CALLBACK, NETWORK = "after_callback.py", "my_model.py"
CAUSAL = {"model.kv_heads": 4, "model.dropout": 0.1}
# Other values of each key; where one needs more, all of it. The schema's other keys follow from these or take no part in a step.
VALUES: dict[str, tuple[object, ...]] = {
    "model.preset": ("tiny",),
    "model.family": (
        *("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "phi3"), {"model.family": "gpt2", **CAUSAL}, ranks.BERT,
        ranks.BERT | {"model.family": "roberta"},
    ),
    "model.layers": (3,), "model.hidden_size": (32,), "model.heads": (2,), "model.kv_heads": (4,), "model.head_dim": (16,),
    "model.module": (NETWORK,), "model.intermediate_size": (64,), "model.vocab_size": (400,), "model.max_position_embeddings": (80,),
    "model.rope_theta": (5e5,), "model.norm_eps": (1e-6,), "model.tie_word_embeddings": ("true", "false"), "model.rope_scaling": (8,),
    "model.dropout": ({"model.family": "gpt2", **CAUSAL, "model.dropout": 0.3},),
    "train.steps": (1,), "train.global_batch_size": (4,), "train.micro_batch_size": (1,),
    "train.sequence_length": (32,), "train.learning_rate": (1e-4,), "train.min_lr_ratio": (0,),
    "train.optimizer": ("lamb", "muon"), "train.schedule": ("linear", "polynomial", "wsd"), "train.schedule_steps": (9,),
    "train.schedule_power": (2,), "train.decay_steps": ({"train.schedule": "wsd", "train.decay_steps": 1},),
    "train.warmup_steps": (1,), "train.weight_decay": (0,), "train.beta1": (0.8,), "train.beta2": (0.9,), "train.epsilon": (1e-3,),
    "train.gradient_clip": (0, 0.01), "train.spike_sigmas": (6,), "train.max_consecutive_skips": (1,),
    "train.precision": ("auto", "bf16", "fp16", "fp8"), "train.param_dtype": ({"train.param_dtype": "bf16", "train.precision": "bf16"},),
    "train.seed": (7,), "train.log_every": (1,), "train.loggers": (), "train.callback": (CALLBACK,), "train.validate_every": (2,),
    "train.validation_sequences": (1, 5), "train.sample_prompts": (), "train.init_from": (), "train.activation_checkpointing": ("selective", "full"),
    "train.compile": ("true",), "train.activation_memory_budget": (
        {"train.compile": "true", "train.activation_checkpointing": "selective", "train.activation_memory_budget": 0.5},
    ), "train.document_mask": ("true",), "train.profile_steps": ("1-2",),
    "train.parallelism": (),
}  # fmt: skip
# Keys of no value here, and the test that has them.
ELSEWHERE = {
    "train.sample_prompts": "tests/distributed/test_fine_tuning.py",
    "train.loggers": "tests/oracles/test_services.py", "train.init_from": "tests/unit/test_beginning.py",
    "train.parallelism": "every case here",
}  # fmt: skip


def cases() -> Iterator[tuple[str, dict[str, object]]]:
    """Each value of each key: the key, and what it sets."""
    for key, values in VALUES.items():
        for value in values:
            yield key, dict(value) if isinstance(value, dict) else {key: value}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """As ranks.py has it, with documents that end within a sequence."""
    here, folder = Path.cwd(), tmp_path_factory.mktemp("platforms")
    (folder / "short").mkdir()
    for number, text in enumerate(islice(ranks.TEXT[0].read_text().split("\n\n"), 200)):
        (folder / "short" / f"{number}.py").write_text(text)
    (folder / CALLBACK).write_text("def after_step(step, trainer):\n    assert trainer.parts\n")
    page = (ranks.ROOT / "docs/how-to/own-model.md").read_text()
    (folder / NETWORK).write_text(
        page.partition(f"```python\n# {NETWORK}\n")[2].partition("```")[0]
    )
    yield Bench(folder, ranks.CONFIG.replace("[text]", "[short]"))
    os.chdir(here)


def test_the_table_has_every_key_of_the_schema() -> None:
    schema: dict[str, Any] = json.loads((ranks.ROOT / "schema/config.schema.json").read_text())[
        "properties"
    ]
    keys = {f"{room}.{key}" for room in ("model", "train") for key in schema[room]["properties"]}
    assert keys == set(VALUES)
    assert {key for key, values in VALUES.items() if not values} == set(ELSEWHERE)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("platform", PROGRAMS)
def test_every_key_trains_or_is_refused_by_name(bench: Bench, platform: str, layout: str) -> None:
    """Values that the plan accepts go into one run together wherever it accepts that too: so there are few."""
    size, degrees = LAYOUTS[layout]
    common = (
        SHORT
        | {"fleet.platform": platform}
        | {f"train.parallelism.{key}": value for key, value in degrees.items()}
    )
    bundles: list[dict[str, object]] = []
    for key, values in cases():
        try:
            prepare(bench, f"{platform}-{layout}", size, common | values)
        except ConfigError as error:
            named = {problem.key for problem in error.problems}
            assert named & {key, *values, *(f"train.parallelism.{each}" for each in degrees)}, str(
                error
            )
            continue
        for bundle in bundles:
            if not bundle.keys() & values.keys() and together(
                bench, f"{platform}-{layout}", size, common | bundle | values
            ):
                bundle |= values
                break
        else:
            bundles.append(values)
    assert sum(map(len, bundles)) > len(VALUES) / 2
    runs = [
        prepare(bench, f"{platform}-{layout}-{number}", size, common | bundle)
        for number, bundle in enumerate(bundles)
    ]
    bench.train_all([(run, size) for run in runs], PROGRAMS[platform])
    for run, bundle in zip(runs, bundles, strict=True):
        assert any("valid_loss" in line for line in ranks.metrics(run)), bundle


def prepare(bench: Bench, name: str, size: int, values: dict[str, object]) -> Path:
    return bench.prepare(name, size, **values)


def together(bench: Bench, name: str, size: int, values: dict[str, object]) -> bool:
    try:
        prepare(bench, name, size, values)
    except ConfigError:
        return False
    return True
