"""A family and a callback of one's own: the example of docs/how-to/own-model.md as it stands there, and everything that is refused."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainfleet import models
from trainfleet.backends import terms_of
from trainfleet.config import Settings, load
from trainfleet.config.types import Model
from trainfleet.engine.trainer import callback_of
from trainfleet.trust.errors import ConfigError, RunError

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "own-model.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
SHAPE = Model("test", "llama", 2, 32, 4, 2, 48, 64, 24, 10_000.0, 1e-5, False, module="my_model.py")


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_example_of_the_page_is_a_network_that_learns() -> None:
    model = models.build(SHAPE)
    model.initialize(1)
    assert not any("gate_proj" in name for name, _ in model.named_parameters())
    assert sys.modules[type(model).__module__].Model is type(
        model
    )  # where torch.compile looks for a function's globals
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("    plan = replace", "    other = replace"), "column names 'layers.*.mlp.gate_proj', which is not a module of the model"),
        (("            layer.mlp = Squared(shape)", "            layer.mlp = Squared(shape)\n        self.extra = nn.Linear(2, 2)"),
         "extra.weight is not in blocks, first or last"),
        (("        for layer in self.layers:", "        del self.layers[1]\n        for layer in self.layers:"), "has 1 modules, but model.layers is 2"),
        (("class Model(Llama)", "class Other(Llama)"), "must define a class Model"),
        (("from torch import", "from torch import nothing,"), "ImportError"),
    ],
)  # fmt: skip
def test_a_plan_that_is_wrong_is_refused_with_what_is_wrong(
    change: tuple[str, str], said: str, desk: Path
) -> None:
    assert change[0] in EXAMPLES["my_model.py"]
    (desk / "my_model.py").write_text(EXAMPLES["my_model.py"].replace(*change))
    with pytest.raises(RunError) as caught:
        models.build(SHAPE)
    assert said in caught.value.why


@pytest.mark.parametrize(
    "path",
    [
        "/tmp/my_model.py",
        "../my_model.py",
        "runs/x/my_model.py",
        "data/my_model.py",
        "a/../my_model.py",
        "model.py",
    ],
)
def test_no_path_leads_to_a_file_that_may_be_somebody_elses(path: str, desk: Path) -> None:
    (desk / "config.yaml").write_text("name: x\n")
    with pytest.raises(ConfigError, match=r"model.module"):
        load(Settings(desk / "config.yaml", f"model.module={path}"), terms_of)


def test_files_that_are_not_there_and_exports_are_refused_with_the_config(desk: Path) -> None:
    (desk / "config.yaml").write_text(
        "name: x\nmodel: {module: no_model.py}\ntrain: {callback: no_callback.py}\ncheckpoint: {export_hf: true}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(Settings(desk / "config.yaml"), terms_of)
    said = str(caught.value)
    assert (
        "'no_model.py' does not exist" in said
        and "'no_callback.py' does not exist" in said
        and "checkpoint.export_hf" in said
    )


def test_a_callback_is_called_with_the_step_and_one_without_the_function_is_refused(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "config.yaml").write_text(
        "name: x\nmodel: {module: my_model.py}\ntrain: {callback: my_callback.py}\n"
    )
    config = load(Settings(desk / "config.yaml"), terms_of)[0]
    trainer = type(
        "Trainer",
        (),
        {
            "world": type("World", (), {"first": True}),
            "progress": type("Progress", (), {"tokens": 7}),
        },
    )
    call = callback_of(config.train)
    call(99, trainer)  # type: ignore[arg-type]
    call(100, trainer)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "step 100: 7 tokens\n"
    (desk / "my_callback.py").write_text("")
    with pytest.raises(RunError, match="has no callback"):
        callback_of(config.train)
    callback_of(replace(config.train, callback=None))(1, trainer)  # type: ignore[arg-type]
