"""Recognizes unsupported model and tokenizer formats, and suggests a remedy for each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

MOST = 4096  # maximum number of file names to read in a folder
SAVE = "save it with transformers' save_pretrained, which writes safetensors"
OTHER = "use the same model in Hugging Face's format, with config.json and safetensors"
LIST = "use the tokenizer.json of the same model"
# A line of a tiktoken file: a base64 token and its rank.
TIKTOKEN = rb"[A-Za-z0-9+/]{1,400}={0,2} [0-9]{1,8}\r?\n"


# File name patterns, format, remedy. A format matches if any pattern matches, and the first match
# is reported.
FORMATS = (
    (
        ("adapter_config.json",),
        "a PEFT LoRA adapter without its base model",
        "merge it with peft: "
        "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OUT)",
    ),
    (("model_index.json",), "a diffusers pipeline", "use the folder of a language model"),
    (("*.gguf",), "in llama.cpp's GGUF format", OTHER),
    (
        ("lit_model.pth",),
        "in litgpt's format",
        f"run litgpt convert_from_litgpt FOLDER OUT; then {SAVE}",
    ),
    (
        ("consolidated*.pth", "consolidated*.safetensors"),
        "in Meta's or Mistral's original format",
        OTHER,
    ),
    (
        (".metadata", "*.distcp"),
        "a checkpoint of torch.distributed.checkpoint",
        "run python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER OUT; "
        f"then {SAVE}",
    ),
    (
        ("mp_rank_*", "latest_checkpointed_iteration.txt"),
        "in Megatron-LM's or DeepSpeed's format",
        f"convert it with that program; then {SAVE}",
    ),
    (
        ("*.h5", "*.keras", "saved_model.pb", "*.msgpack"),
        "in TensorFlow's, Keras's or Flax's format",
        "load it in transformers 4 with from_pretrained(FOLDER, from_tf=True), or from_flax=True, "
        "then save_pretrained(OUT)",
    ),
    (("*.onnx",), "an ONNX model, which can't be trained", OTHER),
    (("*.bin", "*.pt", "*.pth"), "a PyTorch pickle, which may contain code", SAVE),
    (("tekken.json",), "a Mistral Tekken tokenizer", LIST),
    (("*.tiktoken",), "a tiktoken file", LIST),
)


def told(path: Path) -> str:
    """Returns the unsupported format of a file or folder, judged by file names, and a remedy.

    Returns "" if the format is unknown.
    """
    names = [at.name for at in islice(path.iterdir(), MOST)] if path.is_dir() else [path.name]
    fits = (
        row for row in FORMATS if any(fnmatchcase(name, mark) for name in names for mark in row[0])
    )
    return next((f"is {name}; {remedy}" for _, name, remedy in fits), "")
