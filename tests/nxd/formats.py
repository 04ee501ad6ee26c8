"""NxD's own checkpoints, ours against its real source: `python formats.py FOLDER SHAPE` as one of the tensor ranks, as check.py starts it.

What we wrote into FOLDER/ours is loaded by NxD's load_checkpoint into AWS's own modules (examples/training of NXD_SOURCE's checkout), which
must say the same of some text as transformers does of FOLDER/hf, and is saved again by NxD's save_checkpoint, in one file a rank and with
a file a tensor. AWS's converter makes the slices of FOLDER/hf, and the whole of our slices. check.py holds all of it against ours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import rank as start

TOKENS = 32


def llama(folder: Path, config: Any, size: int) -> Any:
    """AWS's Llama by the flags of its own training scripts."""
    sys.path.insert(0, str(Path(os.environ["NXD_SOURCE"]).parent / "examples/training/llama"))
    import torch
    from modeling_llama_nxd import LlamaForCausalLM

    copies = max(1, size // config.num_key_value_heads)
    for name, value in {"qkv_linear": size > config.num_key_value_heads, "fuse_qkv": True, "kv_shared_group_size": copies,
                        "sequence_parallel_enabled": False, "selective_checkpoint_enabled": False, "use_flash_attention": False,
                        "transpose_nki_inputs": False, "torch_dtype": torch.float32, "pretraining_tp": 1}.items():  # fmt: skip
        setattr(config, name, value)
    return LlamaForCausalLM(config)


def bert(folder: Path, config: Any, size: int) -> Any:
    """transformers' BERT with the layers of NxD's that AWS's training script puts into it."""
    from neuronx_distributed.parallel_layers import layers
    from transformers import BertForPreTraining

    model, width = BertForPreTraining(config), config.hidden_size
    for layer in model.bert.encoder.layer:
        inner = layer.attention.self
        inner.num_attention_heads //= size
        inner.all_head_size //= size
        for name in ("query", "key", "value"):
            setattr(inner, name, layers.ColumnParallelLinear(width, width, gather_output=False))
        layer.attention.output.dense = layers.RowParallelLinear(
            width, width, input_is_parallel=True
        )
    return model


def loss_of(model: Any, config: Any, device: Any) -> float:
    import torch

    tokens = (torch.arange(2 * TOKENS).reshape(2, TOKENS) * 7 % config.vocab_size).to(device)
    if config.model_type == "bert":
        model.eval()
        return float(
            model(tokens, labels=tokens, next_sentence_label=torch.tensor([0, 1]).to(device)).loss
        )
    return float(model(tokens, labels=tokens).loss)


def through_nxd(folder: Path) -> dict[str, float]:
    """The loss of our checkpoint in NxD's modules, and in transformers'."""
    import neuronx_distributed as nxd
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm
    from transformers import AutoConfig, BertForPreTraining, LlamaForCausalLM

    size, config = dist.get_world_size(), AutoConfig.from_pretrained(folder / "hf")
    config._attn_implementation, config.use_cache = "eager", False
    options = nxd.neuronx_distributed_config(tensor_parallel_size=size)
    build = bert if config.model_type == "bert" else llama
    model = nxd.initialize_parallel_model(options, lambda: build(folder, config, size))
    nxd.load_checkpoint(str(folder / "ours"), model=model)
    ours = loss_of(model, config, xm.xla_device())
    for name, apart in (("plain", False), ("apart", True)):
        nxd.save_checkpoint(
            str(folder / name),
            "step_1",
            model=model,
            user_content={"global_step": 1},
            use_xser=apart,
        )
    whole = BertForPreTraining if config.model_type == "bert" else LlamaForCausalLM
    return {
        "NxD": ours,
        "transformers": loss_of(whole.from_pretrained(folder / "hf"), config, "cpu"),
    }


def through_the_converter(folder: Path, tensor: int, stages: int) -> None:
    """AWS's own conversion of FOLDER/hf to slices, and of our slices to a whole."""
    import torch
    from neuronx_distributed.pipeline.partition import create_partitions
    from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase
    from safetensors.torch import load_file

    converter, config = (
        CheckpointConverterBase(),
        json.loads((folder / "hf/config.json").read_text()),
    )
    heads, copied = config["num_key_value_heads"], tensor > config["num_key_value_heads"]
    words = ["--output_dir", str(folder / "converted"), "--input_dir", str(folder / "ours/pretrained_weight/model"), "--hw_backend", "trn1",
             "--config", str(folder / "hf/config.json"), "--tp_size", str(tensor), "--pp_size", str(stages), "--n_layers",
             str(config["num_hidden_layers"]), "--kv_size_multiplier", str(max(1, tensor // heads))]  # fmt: skip
    args: argparse.Namespace = converter.get_arg_parser().parse_args(words)
    args.qkv_linear = args.fuse_qkv = copied
    args.coalesce_qkv = config["num_attention_heads"] == heads
    torch.save(dict(converter.merge_tp_checkpoints(args)), folder / "merged.pt")
    whole = load_file(folder / "hf/model.safetensors")
    if args.coalesce_qkv:
        converter.coalesce_qkv(whole, config, tensor)
    cuts = create_partitions(
        stages, [f"model.layers.{layer}" for layer in range(config["num_hidden_layers"])]
    )
    for rank in range(tensor):
        for stage in range(stages):
            part = converter.convert_full_state_to_tp(
                dict(whole), args, rank, stage, 0, cuts, config
            )
            converter.save_partial_no_xser(args, part, rank, stage, 0)


if __name__ == "__main__":
    start.install()
    import torch

    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        through_the_converter(Path(sys.argv[1]), *map(int, sys.argv[2:]))
        os._exit(0)
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401

    dist.init_process_group("xla")
    told = through_nxd(Path(sys.argv[1]))
    if os.environ["RANK"] == "0":
        print(json.dumps(told), flush=True)
    os._exit(0)
