"""Keys as they are misspelt, and as other trainers call them, each with the key that was meant."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainfleet.config import Settings
from trainfleet.config.positions import dotted
from trainfleet.config.schema import load_schema, walk
from trainfleet.errors import ConfigError
from trainfleet.launch.settings import config_of

from .configs import written

Meant = tuple[tuple[str, ...], str, tuple[str, ...]]  # where it stands, what is written there, the key that was meant
# Words of other trainers' configs, as people who come from there would write them; the places are theirs too.
SYNONYMS = {
    "max_steps": "train.steps", "num_train_epochs": "train.steps", "train_iters": "train.steps", "total_steps": "train.steps", "max_iters": "train.steps",
    "batch_size": "train.global_batch", "global_batch_size": "train.global_batch", "train_batch_size": "train.global_batch", "lr": "train.learning_rate", "peak_lr": "train.learning_rate",
    "max_lr": "train.learning_rate", "min_lr": "train.learning_rate_floor", "gradient_accumulation_steps": "train.micro_batch", "per_device_train_batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch", "device_batch_size": "train.micro_batch", "warmup_ratio": "train.warmup_steps", "num_warmup_steps": "train.warmup_steps", "warmup_iters": "train.warmup_steps", "warmup": "train.warmup_steps",
    "nodes": "fleet.nodes", "num_nodes": "fleet.nodes", "nnodes": "fleet.nodes", "gpus": "fleet.ranks_per_node", "gpus_per_node": "fleet.ranks_per_node", "nproc_per_node": "fleet.ranks_per_node", "devices": "fleet.ranks_per_node",
    "instance": "fleet.instance_type", "instance_type": "fleet.instance_type", "machine_type": "fleet.instance_type", "hostfile": "fleet.hosts", "master_port": "fleet.port", "launcher": "fleet.backend", "spot_instances": "fleet.spot",
    "dataset": "data", "data_path": "data.sources", "train_files": "data.sources", "dataset_path": "data.sources", "text_column": "data.text_field", "tokenizer_path": "data.tokenizer", "tokenizer_name": "data.tokenizer", "val_split": "data.validation_fraction",
    "seq_len": "train.sequence_length", "seq_length": "train.sequence_length", "max_seq_length": "train.sequence_length", "block_size": "train.sequence_length", "context_length": "train.sequence_length",
    "n_layer": "model.layers", "num_layers": "model.layers", "num_hidden_layers": "model.layers", "n_layers": "model.layers", "n_head": "model.heads", "num_attention_heads": "model.heads", "num_heads": "model.heads", "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size", "hidden_size": "model.hidden_size", "hidden_dim": "model.hidden_size", "dim": "model.hidden_size", "n_kv_heads": "model.kv_heads", "num_key_value_heads": "model.kv_heads", "num_query_groups": "model.kv_heads",
    "ffn_hidden_size": "model.intermediate_size", "d_ff": "model.intermediate_size", "vocab_size": "model.vocabulary_size", "max_position_embeddings": "model.max_sequence_length", "n_positions": "model.max_sequence_length",
    "rms_norm_eps": "model.norm_epsilon", "layer_norm_eps": "model.norm_epsilon", "rotary_base": "model.rope_theta", "tie_word_embeddings": "model.tie_embeddings", "model_name_or_path": "model.preset", "model_name": "model.preset", "model_type": "model.family",
    "attention_dropout": "model.dropout", "save_steps": "checkpoint.every", "save_interval": "checkpoint.every", "checkpoint_interval": "checkpoint.every", "save_total_limit": "checkpoint.keep", "max_to_keep": "checkpoint.keep",
    "checkpoint_dir": "checkpoint.destination", "save_dir": "name", "output_dir": "name", "run_name": "name", "experiment_name": "name", "job_name": "name", "logging_steps": "train.log_every", "log_interval": "train.log_every", "eval_steps": "train.validate_every",
    "eval_interval": "train.validate_every", "eval_iters": "train.validation_sequences", "max_grad_norm": "train.gradient_clip", "grad_clip": "train.gradient_clip", "clip_grad": "train.gradient_clip", "gradient_clip_val": "train.gradient_clip",
    "adam_beta1": "train.beta1", "adam_beta2": "train.beta2", "adam_epsilon": "train.epsilon", "adam_eps": "train.epsilon", "wd": "train.weight_decay", "optim": "train.optimizer", "lr_scheduler_type": "train.schedule", "lr_scheduler": "train.schedule",
    "lr_decay_style": "train.schedule", "lr_decay_iters": "train.schedule_steps", "bf16": "train.precision", "fp16": "train.precision", "mixed_precision": "train.precision", "dtype": "train.precision", "random_seed": "train.seed", "gradient_checkpointing": "train.recompute",
    "activation_checkpointing": "train.recompute", "torch_compile": "train.compile", "resume_from_checkpoint": "train.init_from", "init_checkpoint": "train.init_from", "tensor_model_parallel_size": "train.layout.tensor", "tensor_parallel": "train.layout.tensor", "tp": "train.layout.tensor",
    "pipeline_model_parallel_size": "train.layout.pipeline", "pp": "train.layout.pipeline", "context_parallel_size": "train.layout.context", "cp": "train.layout.context", "fsdp": "train.layout.shard", "zero_stage": "train.layout.zero", "max_cost": "budget.max_usd", "trainer": "train", "optimizer_type": "train.optimizer", "cluster": "fleet", "max_budget": "budget.max_usd",
}  # fmt: skip


def keys() -> list[tuple[str, ...]]:
    return [key for key, _ in walk(load_schema())]


def slips(seed: int) -> Iterator[Meant]:
    """Each key with a letter too few, too many, wrong or swapped; with a part left out of its joints; and joined otherwise."""
    draw = random.Random(seed)
    taken = set(keys())
    for key in keys():
        name = key[-1]
        at = draw.randrange(1, len(name))
        swap = draw.randrange(len(name) - 1)
        forms = (name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], name[:at] + draw.choice("aeionrst") + name[at + 1 :],
                 name[:swap] + name[swap + 1] + name[swap] + name[swap + 2 :], name[:at] + draw.choice("aeionrst") + name[at:], name[1:])  # fmt: skip
        for form in forms:
            if (
                form not in (name, "")
                and (*key[:-1], form) not in taken
                and re.sub("[0-9]", "", form) != re.sub("[0-9]", "", name)
            ):
                yield key[:-1], form, key


def cases() -> Iterator[Meant]:
    """Each key in capitals, with hyphens, in camel case, as a title, and with a blank or none between its words."""
    for key in keys():
        name = key[-1]
        camel = re.sub("_(.)", lambda match: match[1].upper(), name)
        for form in {
            name.upper(),
            name.replace("_", "-"),
            camel,
            name.title(),
            name.title().replace("_", ""),
            name.replace("_", ""),
        } - {name}:
            yield key[:-1], form, key


def synonyms() -> Iterator[Meant]:
    """Other trainers' words at the top, and in the section where their meaning is."""
    for word, key in SYNONYMS.items():
        meant = tuple(key.split("."))
        yield (), word, meant
        if len(meant) > 1 and (*meant[:-1], word) != meant:
            yield meant[:-1], word, meant


def missed(meant: Iterator[Meant], folder: Path) -> tuple[int, list[str]]:
    """How many there were, and those where another key was guessed, or none."""
    count, wrong = 0, []
    for place, word, key in meant:
        count += 1
        text = written((*place, word), "1") if place else f"name: a\n{word}: 1\n"
        (folder / "config.yaml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            config_of(Settings(folder / "config.yaml"))
        guess = dotted(key) if key[:-1] != place else key[-1]
        told = [str(problem) for problem in caught.value.problems if "unknown key" in problem.message]
        if not any(line.endswith(f"did you mean {guess}?") for line in told):
            wrong.append(f"{dotted((*place, word))} → {dotted(key)}: {told}")
    return count, wrong
