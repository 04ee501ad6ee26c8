"""A model or tokenizer in another program's format is called by its name, with what to do, wherever it is named."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from test_beginning import desk as desk
from test_beginning import hugging_face, told

from trainfleet.config import huggingface_config
from trainfleet.config.conversion import FORMATS
from trainfleet.config.vocabulary import Vocabulary
from trainfleet.config.weight_files import WEIGHTS
from trainfleet.trust.errors import DataError, InputError

FOLDERS = {
    "adapter_config.json": "merge_and_unload", "model-q4_0.gguf": "GGUF", "lit_model.pth": "litgpt convert_from_litgpt",
    "consolidated.00.pth": "Mistral's original format", "consolidated.safetensors": "Mistral's original format", "__0_0.distcp": "dcp_to_torch",
    "mp_rank_00": "Megatron", "tf_model.h5": "from_tf=True", "flax_model.msgpack": "from_flax=True", "model.onnx": "ONNX",
    "model_index.json": "diffusers", "pytorch_model-00001-of-00002.bin": "save_pretrained",
}  # fmt: skip


@pytest.mark.parametrize(("name", "what"), FOLDERS.items(), ids=FOLDERS)
def test_a_foreign_folder_is_named_with_what_to_do(desk: Path, name: str, what: str) -> None:
    folder = hugging_face(desk / "model")
    (folder / WEIGHTS).rename(desk / "kept")
    (folder / name).touch()
    assert what in told(folder), "with a config.json beside it"
    (folder / "config.json").unlink()
    assert what in told(folder)
    with pytest.raises(InputError, match=what):  # as model.preset
        huggingface_config.read(folder)
    assert what in told(folder / name)


def test_what_lies_beside_a_model_does_not_hide_it(desk: Path) -> None:
    folder = hugging_face(desk / "model")
    for name in FOLDERS:
        (folder / name).touch()
    assert not told(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantized_weights_are_named(desk: Path, method: str) -> None:
    folder = hugging_face(desk / "model")
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}})
    )
    assert "quantized (" in told(folder) and method in told(folder)


@pytest.mark.parametrize(
    ("name", "what"),
    [("tekken.json", "Tekken"), ("tokenizer.model", "tiktoken"), ("qwen.tiktoken", "tiktoken")],
)
def test_a_foreign_tokenizer_is_named_with_what_to_do(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / name).write_text("IQ== 0\nIg== 1\n" if name != "tekken.json" else '{"vocab": []}')
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError) as caught:
            Vocabulary.read(path)
        assert what in str(caught.value) and "use the tokenizer.json" in str(caught.value)


def test_every_format_has_a_test() -> None:
    names = [*FOLDERS, "tekken.json", "qwen.tiktoken"]
    assert all(
        any(fnmatchcase(name, mark) for name in names for mark in row["files"]) for row in FORMATS
    )
