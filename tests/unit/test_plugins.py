"""A backend outside this package, found by its entry points: planned on, refused, placed on a node, and written by make new-backend."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from test_support import table

from trainfleet.backends import BACKENDS, OURS, backend_of, skeleton
from trainfleet.cli import main
from trainfleet.config import Settings, load
from trainfleet.hosts.tar import code_files, content_hash, pack
from trainfleet.launch.job_image import recipe_for
from trainfleet.node import entrypoint, placements
from trainfleet.node.placement import Placement
from trainfleet.process import install_paths
from trainfleet.trust.errors import BackendError, ConfigError

Typed = Callable[..., tuple[int, str]]


def install(package: Path) -> None:
    """Leaves beside a package's modules what an installer would: its metadata, with its entry points."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = package / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        f"[{group}]\n{name} = {where}\n"
        for group, row in project["entry-points"].items()
        for name, where in row.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def forget() -> None:
    install_paths.names_offered.cache_clear()
    backend_of.cache_clear()
    for name in [name for name in sys.modules if name.startswith("trainfleet_dummy")]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with the backend `dummy`, as make new-backend writes it."""
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", "NAME=dummy"]) == 0
    install(Path("trainfleet-dummy"))
    monkeypatch.syspath_prepend(str(tmp_path / "trainfleet-dummy" / "src"))
    forget()
    yield tmp_path / "trainfleet-dummy"
    forget()


@pytest.fixture
def typed(package: Path, capsys: pytest.CaptureFixture[str]) -> Typed:
    """A verb on a config whose fleet has these keys: the exit code, and all that was said."""

    def make(verb: str, *words: str, **fleet: Any) -> tuple[int, str]:
        document = {
            "name": "there",
            "fleet": {"backend": "dummy", "shared_folder": "/shared", "nodes": 2} | fleet,
        }
        Path("config.yaml").write_text(yaml.safe_dump(document))
        code = main([verb, *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return make


def test_it_is_planned_on_as_the_six_are(typed: Typed) -> None:
    code, said = typed("plan", "OUT=out", options=["queue=gpu"])
    assert code == 0, said
    script = "\n".join(path.read_text() for path in Path("out").rglob("*node.sh"))
    assert (
        "in the queue gpu" in script
        and "trainfleet.node.entrypoint --on dummy --folder runs/there" in script
    )
    assert "cd /shared || exit" in script


@pytest.mark.parametrize(
    ("fleet", "problem"),
    [
        ({"shared_folder": None}, "fleet.shared_folder: null: dummy nodes need a shared folder"),
        ({"options": ["qeue=gpu"]}, "fleet.options: qeue: is an unknown key"),
        ({"options": ["queue=7"]}, "fleet.options: queue: must be text, not 7"),
        ({"options": ["queue=a", "queue=b"]}, "fleet.options: queue: is given twice"),
        ({"options": ["queue=[1"]}, "fleet.options: queue: is not valid YAML"),
        ({"options": ["queue"]}, "is not valid"),
        (
            {"backend_options": ["queue=gpu"]},
            "fleet.backend_options: unknown key; did you mean options?",
        ),
        ({"spot": True}, "fleet.spot: true: the dummy backend does not use it"),
        ({"backend": "dumy"}, "sagemaker, dummy; did you mean dummy?"),
        ({"backend": "slurm", "options": ["queue=a"]}, "the slurm backend does not use it"),
    ],
)
def test_what_it_does_not_take_is_refused_by_key(
    typed: Typed, fleet: dict[str, Any], problem: str
) -> None:
    code, said = typed("plan", **fleet)
    assert (
        code == 2
        and problem.partition(": ")[0] in said
        and problem.partition(": ")[2] in " ".join(said.split())
    ), said


def test_what_is_not_written_yet_says_where_to_write_it(typed: Typed) -> None:
    code, said = typed("train")
    assert (
        code
        and "submit is not implemented yet" in said
        and "next: edit src/trainfleet_dummy/__init__.py" in said
    )


def test_its_nodes_find_their_placement(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DUMMY_NODE": "1", "DUMMY_NODES": "2", "DUMMY_MEET": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    options = entrypoint.parse(["--on", "dummy", "--folder", "runs/x", "--", "m"])
    assert (
        options.engine.read() == Placement(1, 2, "10.0.0.1") and placements.here().name == "dummy"
    )
    assert BACKENDS["dummy"].placement is options.engine


FOUND = """
import trainfleet_dummy
from trainfleet.backends import BACKENDS
from trainfleet.node import placements
from trainfleet.hosts.tar import code_files, content_hash
assert BACKENDS["dummy"].placement is placements.source("dummy")
print(trainfleet_dummy.__file__, content_hash(code_files("dummy")))
"""


@pytest.mark.parametrize("editable", [False, True])
def test_its_package_goes_to_the_nodes_with_ours_and_is_found_there(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: bool
) -> None:
    """An editable install has its metadata in another folder than its modules."""
    if editable:
        (info,) = (package / "src").glob("*.dist-info")
        (tmp_path / "site").mkdir()
        info.rename(tmp_path / "site" / info.name)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        forget()
    files = code_files("dummy")
    assert files.keys() - code_files("").keys() == {
        *(f"python/trainfleet_dummy/{name}.py" for name in ("__init__", "bench", "placement")),
        *(
            f"python/trainfleet_dummy-0.1.0.dist-info/{name}"
            for name in ("METADATA", "entry_points.txt")
        ),
    }
    with tarfile.open(fileobj=io.BytesIO(pack(files))) as archive:
        archive.extractall(tmp_path / "sent")
    done = subprocess.run(
        [sys.executable, "-c", FOUND], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}/sent/python", "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    there = f"{tmp_path}/sent/python/trainfleet_dummy/__init__.py"
    assert done.stdout.split() == [there, content_hash(files)], done.stderr


def test_its_package_is_in_the_image(package: Path) -> None:
    fleet = {"backend": "dummy", "shared_folder": "/shared"}
    Path("config.yaml").write_text(yaml.safe_dump({"name": "there", "fleet": fleet}))
    recipe = recipe_for(load(Settings(Path("config.yaml")))[0])
    assert "python/trainfleet_dummy/placement.py" in recipe.files


def test_its_bench_is_found_by_the_cases_of_the_contract(package: Path, tmp_path: Path) -> None:
    bench: Any = install_paths.offered("trainfleet.benches", "dummy")
    cases = SimpleNamespace(
        PROBE="probe", Bench=lambda *given, **named: (given, named), processes_of=lambda folder: [],
        config_of=lambda name, folder, **fleet: (name, fleet),
    )  # fmt: skip
    ((name, config, folder, running, *_), named) = next(bench(tmp_path, cases))
    assert (name, folder, running()) == ("dummy", tmp_path, []) and named["artifacts"] == (
        "node.sh",
    )
    assert (
        config == ("dummy", {"shared_folder": str(tmp_path)})
        and (tmp_path / "probe.py").read_text() == "probe"
    )


def test_it_counts_among_the_backends_and_not_in_the_page_of_this_package(package: Path) -> None:
    assert list(BACKENDS) == [*OURS, "dummy"] and len(BACKENDS) == 7
    assert "dummy" not in table()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("CLASS = Dummy = 7", "must be a subclass of"),
        ("1 / 0", "ZeroDivision"),
    ],
)
def test_a_package_that_is_broken_is_named_and_no_traceback_comes(
    typed: Typed, package: Path, text: str, why: str
) -> None:
    (package / "src/trainfleet_dummy/__init__.py").write_text(f"{text}\n")
    code, said = typed("plan")
    assert (
        code == 1
        and why in said
        and "trainfleet.backends: dummy" in said
        and "Traceback" not in said
    )


def test_a_backend_that_lacks_a_call_or_bears_another_name_is_named(
    typed: Typed, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a file that changes within a second
    file = package / "src/trainfleet_dummy/__init__.py"
    whole = file.read_text()
    for was, now, why in [
        ("def find(", "def found(", "it does not define find"),
        ("tried_on = False", "tested_on = False", "it does not define tried_on"),
        ('name = "dummy"', 'name = "other"', "with the name 'dummy'"),
    ]:
        forget()
        file.write_text(whole.replace(was, now))
        code, said = typed("plan")
        assert code == 1 and why in said and "trainfleet.backends: dummy" in said, said


@pytest.mark.parametrize(
    "fleet", [{"shared_folder": None}, {"on_slow_node": "replace", "shared_folder": None}]
)
def test_a_package_that_is_broken_leaves_the_others_as_they_are(
    typed: Typed, package: Path, fleet: dict[str, Any]
) -> None:
    (package / "src/trainfleet_dummy/__init__.py").write_text("1 / 0\n")
    code, said = typed("plan", backend="local", nodes=1, **fleet)
    assert code == (2 if "on_slow_node" in fleet else 0) and "ZeroDivision" not in said, said


def test_an_engine_that_nobody_offers_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BackendError, match="is not a known scheduler") as caught:
        placements.source("lsf")
    assert "fleet, batch, slurm, sagemaker" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["", "A", "a-b", "../x", "a b", "class", "slurm", "x" * 40, "a\n", "1a", "$(touch evil)"],
)
def test_a_name_that_no_backend_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        skeleton.write(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "trainfleet-mine").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        skeleton.write("mine", tmp_path)
