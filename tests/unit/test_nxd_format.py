"""NxD Core's own checkpoints, written and read without it; tests/nxd/check.py holds them against NxD's real source."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_foreign_checkpoints import OLD, mutate
from torch import Tensor

from trainfleet import models
from trainfleet.config import load_resolved, platforms
from trainfleet.config.types import Model
from trainfleet.models import huggingface_weights
from trainfleet.trust.errors import RunError, TrainfleetError
from trainfleet_nxd import folder as nxd_folder
from trainfleet_nxd import weights as nxd
from trainfleet_nxd.weights import Degrees

BASE: Model = replace(load_resolved(OLD / "config.yaml").model, layers=3, hidden_size=64, heads=8, intermediate_size=96,
                      vocab_size=384, tie_word_embeddings=False, preset=None, head_dim=None)  # fmt: skip
SHAPES = {
    "llama": replace(BASE, family="llama", kv_heads=8),
    "grouped": replace(BASE, family="llama", kv_heads=2),
    "tied": replace(BASE, family="mistral", kv_heads=2, tie_word_embeddings=True),
    "bert": replace(BASE, family="bert", kv_heads=8, tie_word_embeddings=True),
}
CASES = [(name, Degrees(tensor, stages)) for name in SHAPES for tensor in (1, 2, 4, 8) for stages in (1, 2, 3)
         if name != "bert" or stages == 1]  # fmt: skip


def make(shape: Model) -> models.Network:
    torch.manual_seed(1)
    model = models.build(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def save(model: models.Network, degrees: Degrees, folder: Path) -> Path:
    nxd.save(huggingface_weights.outgoing(model, model.shape.family), model.shape, degrees, folder)
    return folder / nxd.TAG


def load(tag: Path, shape: Model) -> dict[str, Tensor]:
    return nxd.load(
        tag, shape, huggingface_weights.sizes_of(models.build(shape).named_parameters())
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(("name", "degrees"), CASES, ids=str)
def test_there_and_back_in_every_layout_the_bytes_are_the_same(
    name: str, degrees: Degrees, tmp_path: Path
) -> None:
    ours = make(SHAPES[name])
    tag = save(ours, degrees, tmp_path / "first")
    assert len(nxd_folder.files_of(tag)) == degrees.tensor * degrees.pipeline
    back = models.build(SHAPES[name])
    back.load_state_dict(load(tag, SHAPES[name]), strict=False)
    save(back, degrees, tmp_path / "second")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    for each, folder in ((ours, tmp_path / "ours"), (back, tmp_path / "back")):
        folder.mkdir()
        huggingface_weights.save(each, SHAPES[name].family, folder)
    assert contents(tmp_path / "ours") == contents(tmp_path / "back")


def test_query_heads_go_with_the_key_value_heads_as_nxd_says_for_trn1() -> None:
    """The example of scripts/checkpoint_converter.py: 64 heads, 16 key-value heads, each on 4 ranks."""
    places = nxd.order(16, 4)
    assert places[:16] == list(range(0, 64, 4)) and places[16:19] == [1, 5, 9] and places[-1] == 63
    shape = replace(BASE, family="llama", heads=64, kv_heads=16, hidden_size=64)
    q, k = torch.arange(64.0)[:, None], torch.arange(16.0)[:, None]
    prefix = "model.layers.0.self_attn."
    part = nxd.divide({f"{prefix}q_proj.weight": q, f"{prefix}k_proj.weight": k, f"{prefix}v_proj.weight": -k,
                       f"{prefix}o_proj.weight": q.T}, shape, Degrees(64, 1))  # fmt: skip
    for rank in (0, 1, 16, 17, 63):
        found, head = part(rank, 0), float(rank % 16)
        assert found[f"{prefix}qkv_proj.weight_qkv"].flatten().tolist() == [
            places[rank],
            head,
            -head,
        ]
        assert found[f"{prefix}o_proj.weight"].flatten().tolist() == [places[rank]]


def test_slices_have_the_names_of_aws_s_own_modules() -> None:
    def names(shape: Model, degrees: Degrees, rank: int, stage: int) -> set[str]:
        found = nxd.divide(huggingface_weights.outgoing(make(shape), shape.family), shape, degrees)(
            rank, stage
        )
        return {re.sub(r"layers?\.\d+", "layers.N", name) for name in found}

    block = {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
             "self_attn.o_proj.weight"}  # fmt: skip
    assert names(SHAPES["llama"], Degrees(2, 2), 1, 0) == {"model.embed_tokens.weight"} | {
        f"model.layers.N.{each}" for each in block | {"self_attn.qkv_proj.weight"}}  # fmt: skip
    assert names(SHAPES["tied"], Degrees(4, 2), 1, 1) == {"model.norm.weight", "lm_head.weight"} | {
        f"model.layers.N.{each}" for each in block | {"self_attn.qkv_proj.weight_qkv"}}  # fmt: skip
    grouped = names(SHAPES["grouped"], Degrees(2, 1), 0, 0)
    assert {f"model.layers.N.self_attn.{each}_proj.weight" for each in "qkv"} < grouped
    assert {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} < names(
        SHAPES["bert"], Degrees(2, 1), 1, 0
    )
    last = [
        nxd.stage_of(f"model.layers.{layer}.x", replace(BASE, layers=5), 3) for layer in range(5)
    ]
    assert last == [0, 1, 1, 2, 2]  # NxD gives the last stages one more


def separate(content: dict[str, Tensor], path: Path) -> None:
    """As save_checkpoint writes with use_xser: references, and each tensor in a file of its own."""
    apart = path.with_name(f"{path.name}.tensors")
    apart.mkdir()
    references = {}
    for number, (name, tensor) in enumerate(content.items()):
        torch.save(tensor, apart / f"tensor_{number}.pt")
        references[name] = TensorReference(number)
    torch.save(references, path)


class TensorReference:
    """torch_xla's, which need not be installed."""

    __module__ = "torch_xla.utils.serialization"

    def __init__(self, number: int) -> None:
        self.tid = number


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has pickle find the class where its name says."""
    found = types.ModuleType(TensorReference.__module__)
    vars(found)["TensorReference"] = TensorReference
    for name, module in (("torch_xla", types.ModuleType("torch_xla")), ("torch_xla.utils", types.ModuleType("utils")),
                         (found.__name__, found)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)


def rewrite(tag: Path, write: Callable[[dict[str, Tensor], Path], object]) -> None:
    for path in nxd_folder.files_of(tag).values():
        write(torch.load(path), path)


@pytest.mark.usefixtures("xla")
def test_tensors_in_files_of_their_own_are_found(tmp_path: Path) -> None:
    tag = save(ours := make(SHAPES["grouped"]), Degrees(4, 2), tmp_path)
    rewrite(tag, separate)
    found = load(tag, ours.shape)
    assert all(torch.equal(found[name], value) for name, value in ours.named_parameters())
    (tag / "model/dp_rank_00_tp_rank_01_pp_rank_01.pt.tensors/tensor_0.pt").unlink()
    with pytest.raises(RunError, match=r"tensor_0\.pt"):
        load(tag, ours.shape)


def test_the_forms_that_aws_s_flags_choose_are_all_read(tmp_path: Path) -> None:
    """Query, key and value each alone (qkv_linear, not fused), and an OrderedDict with its versions, as state_dict gives it."""

    def split(content: dict[str, Tensor], path: Path) -> None:
        found: OrderedDict[str, Tensor] = OrderedDict()
        for name, value in content.items():
            if name.endswith("weight_qkv"):
                for letter, part in zip(
                    "qkv",
                    value.split([8 * SHAPES["grouped"].head_features // 4, 8, 8]),
                    strict=True,
                ):
                    found[name.replace("weight_qkv", f"weight_{letter}")] = part
            else:
                found[name] = value
        vars(found)["_metadata"] = OrderedDict(version=1)
        torch.save(found, path)

    tag = save(ours := make(SHAPES["grouped"]), Degrees(4, 1), tmp_path)
    rewrite(tag, split)
    found = load(tag, ours.shape)
    assert all(torch.equal(found[name], value) for name, value in ours.named_parameters())


def test_the_newest_whole_checkpoint_is_meant_and_none_that_was_cut_off(tmp_path: Path) -> None:
    model = make(SHAPES["llama"])
    for number, name in enumerate(("step_1", "step_2", "step_3")):
        save(model, Degrees(1, 1), tmp_path / "made").rename(tmp_path / name)
        (tmp_path / "made").rmdir()
        os.utime(tmp_path / name / "done", (number, number))
    (tmp_path / "step_3/done").unlink()
    assert nxd_folder.tag_of(str(tmp_path)) == tmp_path / "step_2"
    assert nxd_folder.tag_of(str(tmp_path / "step_1")) == tmp_path / "step_1"
    assert nxd_folder.tag_of(str(OLD)) is None and nxd_folder.tag_of("s3://bucket/x") is None
    with pytest.raises(RunError, match="not saved completely"):
        nxd_folder.tag_of(str(tmp_path / "step_3"))
    (tmp_path / "step_3/checkpoint").unlink()  # AWS's converter writes neither marker
    assert nxd_folder.tag_of(str(tmp_path / "step_3")) == tmp_path / "step_3"


def refusal(tag: Path, shape: Model) -> str:
    with pytest.raises(TrainfleetError) as caught:
        load(tag, shape)
    return str(caught.value)


def test_what_is_missing_or_of_another_model_is_told(tmp_path: Path) -> None:
    tag = save(make(SHAPES["grouped"]), Degrees(2, 2), tmp_path)
    assert "a weight with the wrong shape" in refusal(
        tag, replace(SHAPES["grouped"], intermediate_size=128)
    )
    assert "lacks weights" in refusal(tag, replace(SHAPES["grouped"], layers=4))
    assert "the model does not have" in refusal(tag, replace(SHAPES["grouped"], layers=2))
    assert "have no gpt2" in refusal(tag, replace(SHAPES["grouped"], family="gpt2"))
    (tag / "model" / nxd_folder.name_of(1, 0)).unlink()
    assert nxd_folder.name_of(1, 0) in refusal(tag, SHAPES["grouped"])


def test_copies_in_another_order_are_refused_and_not_mixed_up(tmp_path: Path) -> None:
    """Trn2's order has the copies of a head side by side."""
    tag = save(make(SHAPES["grouped"]), Degrees(4, 1), tmp_path)
    files = nxd_folder.files_of(tag)
    files[1, 0].rename(tmp_path / "one")
    files[2, 0].rename(files[1, 0])
    (tmp_path / "one").rename(files[2, 0])
    assert "not in Trn1's order" in refusal(tag, SHAPES["grouped"])


class Harm:
    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / 'harmed'}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def test_what_a_file_says_is_never_run(tmp_path: Path) -> None:
    tag = save(make(SHAPES["llama"]), Degrees(1, 1), tmp_path)
    path = nxd_folder.files_of(tag)[0, 0]
    for value in (
        {"model.norm.weight": Harm(tmp_path)},
        Harm(tmp_path),
        [Harm(tmp_path)],
        {"x": 7},
        {7: torch.ones(1)},
    ):
        torch.save(value, path)
        assert str(path) in refusal(tag, SHAPES["llama"])
    path.write_bytes(pickle.dumps(Harm(tmp_path)))
    assert str(path) in refusal(tag, SHAPES["llama"])
    assert not (tmp_path / "harmed").exists()


def test_changed_files_end_in_an_error_or_in_numbers(tmp_path: Path) -> None:
    shape = replace(SHAPES["llama"], layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)
    tag = save(make(shape), Degrees(1, 1), tmp_path)
    draw, path = random.Random(5), nxd_folder.files_of(tag)[0, 0]
    whole, refused = path.read_bytes(), 0
    for _ in range(int(os.environ.get("FUZZ", "300"))):
        path.write_bytes(mutate(whole, draw))
        try:
            load(tag, shape)
        except TrainfleetError as error:
            assert error.where and error.next
            refused += 1
    assert refused > 50


def test_a_view_that_repeats_its_numbers_takes_no_memory(tmp_path: Path) -> None:
    tag = save(make(SHAPES["llama"]), Degrees(1, 1), tmp_path)
    path = nxd_folder.files_of(tag)[0, 0]
    content = torch.load(path)
    content["model.norm.weight"] = torch.ones(1).expand(2**40)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())
    assert "more numbers than the file stores" in refusal(tag, SHAPES["llama"])


@pytest.mark.parametrize(("form", "said"), [("huggingface", None), ("nxd", (None, None)), ("nxd-tp8", (8, None)),
                                            ("nxd-tp8-pp2", (8, 2)), ("nxd-pp2", (None, 2))])  # fmt: skip
def test_a_format_says_its_degrees(form: str, said: object) -> None:
    assert platforms.degrees(form) == said


@pytest.mark.parametrize(
    "form", ["nxd8", "nxd-tp0", "nxd-tp-pp2", "nxd-pp2-tp8", "NXD", "nxd\n", "nxd-tp٣", ""]
)
def test_another_format_is_none(form: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        platforms.degrees(form)


@pytest.mark.parametrize(("shape", "degrees", "why"), [
    (SHAPES["grouped"], Degrees(3, 1), "kv_heads is 2"), (SHAPES["grouped"], Degrees(16, 1), "heads is 8"),
    (SHAPES["llama"], Degrees(1, 4), "3 layers are too few for 4 pipeline stages"), (SHAPES["bert"], Degrees(2, 2), "no pipeline stages"),
    (replace(BASE, family="gpt2"), Degrees(1, 1), "have no gpt2"),
    (replace(SHAPES["llama"], vocab_size=383), Degrees(2, 1), "vocab_size is 383"),
])  # fmt: skip
def test_what_nxd_s_modules_can_t_divide_is_refused(
    shape: Model, degrees: Degrees, why: str
) -> None:
    assert why in nxd.refusal(shape, degrees)
