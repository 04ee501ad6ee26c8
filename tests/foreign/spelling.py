"""Keys as they are misspelt, and as other trainers call them, each with the key that was meant."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainfleet.config import Settings
from trainfleet.config.schema import load_schema, walk
from trainfleet.config.yaml_lines import dotted
from trainfleet.launch.command import config_of
from trainfleet.trust.errors import ConfigError

from .configs import written

Meant = tuple[
    tuple[str, ...], str, tuple[str, ...]
]  # where it stands, what is written there, the key that was meant
# Words of other trainers' configs, as people who come from there would write them; the places are theirs too.
SYNONYMS = {
    "max_steps": "train.steps", "num_train_epochs": "train.steps", "train_iters": "train.steps", "total_steps": "train.steps", "max_iters": "train.steps",
    "batch_size": "train.global_batch_size", "global_batch_size": "train.global_batch_size", "train_batch_size": "train.global_batch_size", "lr": "train.learning_rate", "peak_lr": "train.learning_rate",
    "max_lr": "train.learning_rate", "min_lr": "train.min_lr_ratio", "gradient_accumulation_steps": "train.micro_batch_size", "per_device_train_batch_size": "train.micro_batch_size",
    "micro_batch_size": "train.micro_batch_size", "device_batch_size": "train.micro_batch_size", "warmup_ratio": "train.warmup_steps", "num_warmup_steps": "train.warmup_steps", "warmup_iters": "train.warmup_steps", "warmup": "train.warmup_steps",
    "nodes": "fleet.nodes", "num_nodes": "fleet.nodes", "nnodes": "fleet.nodes", "gpus": "fleet.ranks_per_node", "gpus_per_node": "fleet.ranks_per_node", "nproc_per_node": "fleet.ranks_per_node", "devices": "fleet.ranks_per_node",
    "instance": "fleet.instance_type", "instance_type": "fleet.instance_type", "machine_type": "fleet.instance_type", "hostfile": "fleet.hosts", "master_port": "fleet.rendezvous_port", "launcher": "fleet.backend", "spot_instances": "fleet.spot",
    "dataset": "data", "data_path": "data.sources", "train_files": "data.sources", "dataset_path": "data.sources", "text_column": "data.text_field", "tokenizer_path": "data.tokenizer", "tokenizer_name": "data.tokenizer", "val_split": "data.validation_fraction",
    "seq_len": "train.sequence_length", "seq_length": "train.sequence_length", "max_seq_length": "train.sequence_length", "block_size": "train.sequence_length", "context_length": "train.sequence_length",
    "n_layer": "model.layers", "num_layers": "model.layers", "num_hidden_layers": "model.layers", "n_layers": "model.layers", "n_head": "model.heads", "num_attention_heads": "model.heads", "num_heads": "model.heads", "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size", "hidden_size": "model.hidden_size", "hidden_dim": "model.hidden_size", "dim": "model.hidden_size", "n_kv_heads": "model.kv_heads", "num_key_value_heads": "model.kv_heads", "num_query_groups": "model.kv_heads",
    "ffn_hidden_size": "model.intermediate_size", "d_ff": "model.intermediate_size", "vocab_size": "model.vocab_size", "max_position_embeddings": "model.max_position_embeddings", "n_positions": "model.max_position_embeddings",
    "rms_norm_eps": "model.norm_eps", "layer_norm_eps": "model.norm_eps", "rotary_base": "model.rope_theta", "tie_word_embeddings": "model.tie_word_embeddings", "model_name_or_path": "model.preset", "model_name": "model.preset", "model_type": "model.family",
    "attention_dropout": "model.dropout", "save_steps": "checkpoint.every", "save_interval": "checkpoint.every", "checkpoint_interval": "checkpoint.every", "save_total_limit": "checkpoint.keep", "max_to_keep": "checkpoint.keep",
    "checkpoint_dir": "checkpoint.path", "save_dir": "name", "output_dir": "name", "run_name": "name", "experiment_name": "name", "job_name": "name", "logging_steps": "train.log_every", "log_interval": "train.log_every", "eval_steps": "train.validate_every",
    "eval_interval": "train.validate_every", "eval_iters": "train.validation_sequences", "max_grad_norm": "train.gradient_clip", "grad_clip": "train.gradient_clip", "clip_grad": "train.gradient_clip", "gradient_clip_val": "train.gradient_clip",
    "adam_beta1": "train.beta1", "adam_beta2": "train.beta2", "adam_epsilon": "train.epsilon", "adam_eps": "train.epsilon", "wd": "train.weight_decay", "optim": "train.optimizer", "lr_scheduler_type": "train.schedule", "lr_scheduler": "train.schedule",
    "lr_decay_style": "train.schedule", "lr_decay_iters": "train.schedule_steps", "bf16": "train.precision", "fp16": "train.precision", "mixed_precision": "train.precision", "dtype": "train.precision", "random_seed": "train.seed", "gradient_checkpointing": "train.activation_checkpointing",
    "activation_checkpointing": "train.activation_checkpointing", "torch_compile": "train.compile", "resume_from_checkpoint": "train.init_from", "init_checkpoint": "train.init_from", "tensor_model_parallel_size": "train.parallelism.tensor", "tensor_parallel": "train.parallelism.tensor", "tp": "train.parallelism.tensor",
    "pipeline_model_parallel_size": "train.parallelism.pipeline", "pp": "train.parallelism.pipeline", "context_parallel_size": "train.parallelism.context", "cp": "train.parallelism.context", "fsdp": "train.parallelism.fsdp", "zero_stage": "train.parallelism.zero_stage", "max_cost": "budget.max_usd", "trainer": "train", "optimizer_type": "train.optimizer", "cluster": "fleet", "max_budget": "budget.max_usd",
}  # fmt: skip

# More of them, written down before the program was asked: every key that would do → their words for it.
OTHERS = {
    "train.steps": "max_train_steps num_steps n_steps iterations num_iterations max_iterations training_steps num_epochs epochs max_epochs max_duration max_update total_training_steps train_steps",
    "train.micro_batch_size": "train_micro_batch_size_per_gpu micro_batch_size_per_gpu per_gpu_batch_size microbatch_size device_train_microbatch_size local_batch_size mbs accumulate_grad_batches grad_accum gradient_accumulation grad_accumulation_steps update_freq",
    "train.global_batch_size": "global_train_batch_size gbs total_batch_size bsz bs effective_batch_size",
    "train.learning_rate": "learning-rate base_lr eta init_lr",
    "train.min_lr_ratio": "min_learning_rate lr_min eta_min final_lr",
    "train.warmup_steps": "lr_warmup_steps lr_warmup_iters warmup_updates warmup_tokens num_warmup t_warmup",
    "train.schedule_steps train.decay_steps": "decay_iters",
    "train.schedule_steps": "lr_decay_steps",
    "train.schedule train.decay_steps": "lr_decay",
    "train.schedule": "lr_schedule lr_scheduler_name",
    "train.schedule fleet.backend": "scheduler scheduler_type",
    "train.sequence_length": "sequence_len max_seq_len maxlen max_length context_size ctx_len seqlen tokens_per_sample",
    "train.sequence_length model.max_position_embeddings": "context_window n_ctx encoder_seq_length",
    "model.layers": "depth n_blocks num_blocks nlayers num_transformer_layers encoder_layers",
    "model.heads": "n_heads nhead attention_heads",
    "model.kv_heads": "num_kv_heads kv_heads_count n_kv_head num_key_value_groups",
    "model.hidden_size": "embed_dim embedding_dim emb_dim width hidden model_dim",
    "model.intermediate_size": "n_inner mlp_dim ff_dim ffn_dim mlp_hidden_size",
    "model.vocab_size": "n_vocab padded_vocab_size",
    "model.vocab_size data.vocab_size": "vocabulary",
    "model.rope_theta": "rope_base rotary_emb_base rope_freq_base",
    "model.norm_eps": "norm_eps layernorm_epsilon layer_norm_epsilon",
    "model.tie_word_embeddings": "tied_embeddings weight_tying share_embeddings untie_embeddings_and_output_weights",
    "model.dropout": "resid_pdrop hidden_dropout hidden_dropout_prob dropout_rate",
    "model.preset": "model_path base_model pretrained_model_name_or_path flavor model_size",
    "model model.family": "architecture arch",
    "checkpoint.every": "save_every save_freq save_frequency ckpt_interval checkpoint_every save_strategy every_n_train_steps checkpoint_freq",
    "checkpoint.keep": "keep_last keep_last_n max_checkpoints save_top_k",
    "checkpoint.path": "ckpt_dir save_folder",
    "checkpoint.path train.init_from model.preset": "checkpoint_path",
    "name": "out_dir project exp_name run_id experiment",
    "train.log_every": "log_every log_freq log_steps print_freq logging_interval log_every_n_steps",
    "train.validate_every": "eval_every eval_freq val_interval val_check_interval validation_interval",
    "train.validation_sequences": "eval_batches limit_val_batches",
    "train.gradient_clip": "clip_grad_norm gradient_clipping max_norm clip clip_norm",
    "train.weight_decay": "weight-decay decay",
    "train.beta1": "adam_b1",
    "train.beta2": "adamw_beta2 b2",
    "train.epsilon": "eps",
    "train.optimizer": "optimizer_name opt",
    "train.seed": "seed_value manual_seed rng_seed",
    "train.precision": "use_bf16 amp torch_dtype compute_dtype",
    "train.param_dtype": "param_dtype",
    "train.compile": "compile_model use_compile",
    "train.activation_checkpointing": "ac_mode activation_checkpoint use_gradient_checkpointing recompute_granularity remat",
    "train.init_from": "load_checkpoint load load_path pretrained_checkpoint resume_from finetune_from",
    "train.parallelism.tensor": "tensor_parallel_size tp_size tensor_parallel_degree model_parallel_size",
    "train.parallelism.pipeline": "pipeline_parallel_size pp_size pipeline_parallel_degree",
    "train.parallelism.context": "cp_size context_parallel_degree sequence_parallel_size",
    "train.parallelism.fsdp": "data_parallel_shard_degree fsdp_size",
    "train.parallelism train.parallelism.zero_stage": "sharding_strategy",
    "train.parallelism.virtual_stages": "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage",
    "fleet.nodes": "num_machines n_nodes node_count instance_count",
    "fleet fleet.nodes": "machines",
    "fleet.ranks_per_node": "num_gpus ngpu n_gpus gpus_per_machine num_processes tasks_per_node accelerators",
    "fleet.instance_type": "vm_type node_type",
    "fleet.spot": "use_spot preemptible",
    "fleet.hosts": "hosts_file host_list servers",
    "fleet.rendezvous_port": "main_process_port rdzv_port",
    "fleet.backend": "cloud provider",
    "fleet.secrets": "env_secrets",
    "fleet.ssh.key": "ssh_key identity_file",
    "fleet.ssh.user": "ssh_user",
    "fleet.ssh.jump": "bastion proxy_jump",
    "fleet.shared_folder": "shared_dir shared_storage",
    "data data.sources": "datasets corpus",
    "data.sources": "train_data data_dir data_files train_file",
    "data.text_field": "text_key content_field",
    "data.tokenizer": "tokenizer_name_or_path tokenizer_type tokenizer_file",
    "data.validation_fraction": "valid_fraction eval_split test_size",
    "data.shuffle_window_mib": "shuffle_buffer buffer_size",
    "budget.max_usd": "cost_limit max_price budget_usd",
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


def others() -> Iterator[Meant]:
    """Words of other trainers at the top, each with the keys that would do."""
    for meant, words in OTHERS.items():
        for word in words.split():
            yield (), word, tuple(meant.split())


def missed_others(folder: Path) -> tuple[int, list[str]]:
    """As `missed`, of OTHERS."""
    found = [(word, meant, told_of((), word, folder)) for _, word, meant in others()]
    return len(found), [
        f"{word}: {told}"
        for word, meant, told in found
        if not any(f"did you mean {key}?" in told for key in meant)
    ]


def told_of(place: tuple[str, ...], word: str, folder: Path) -> str:
    """What is said of an unknown key."""
    (folder / "config.yaml").write_text(
        written((*place, word), "1") if place else f"name: a\n{word}: 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        config_of(Settings(folder / "config.yaml"))
    return next(
        str(problem) for problem in caught.value.problems if "unknown key" in problem.message
    )


def missed(meant: Iterator[Meant], folder: Path) -> tuple[int, list[str]]:
    """How many there were, and those where another key was guessed, or none."""
    count, wrong = 0, []
    for place, word, key in meant:
        count += 1
        guess = dotted(key) if key[:-1] != place else key[-1]
        if f"did you mean {guess}?" not in (told := told_of(place, word, folder)):
            wrong.append(f"{dotted((*place, word))} → {dotted(key)}: {told}")
    return count, wrong
