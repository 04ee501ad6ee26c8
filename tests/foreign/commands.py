"""Bad command lines: SET, NODES and the other variables, as make hands them over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from trainfleet.cli import VERBS
from trainfleet.cli.models import chosen
from trainfleet.cli.variables import flag, number, read_variables
from trainfleet.config import Settings
from trainfleet.launch.command import config_of, run_named, settings_of
from trainfleet.plan.measurement import counts_of
from trainfleet.recipes import recipe_named
from trainfleet.trust.errors import ConfigError

from .cases import Case

GOOD = "name: a\ntrain:\n  steps: 5\n  global_batch_size: 8\nmodel:\n  heads: 4\n"
SETS = [
    "nmae=x", "=x", "=", "x", "train.steps", "train.steps=", "train.=1", ".train=1", "train..steps=1", ".=1", "..", "train.steps=abc", "train.steps=1.5", "train.steps=.nan",
    "train.steps=1e400", "train.steps=010", "train.steps=" + "9" * 5000, "train={steps: 1, steps: 2}", "'train={steps: 1, steps: 2}'", "'train={steps: 1, \"steps\": 2}'", "train=5", "train.steps.x=1", "train=[1]",
    "'name=&a [*a]'", "'name=[*a]'", "name=[[[[", "'name=" + "[" * 5000 + "'", "name=!!python/object/apply:os.system", "'name=!!binary aGk='", "'name=\"a\\0b\"'", "'name=\"a\\nb\"'", "name=a\nb=c", "'name=a\n'",
    "name='a", "name=\"a", "name=a\\", "train.steps=5 train.steps=6", "train.lr=1", "TRAIN.STEPS=x", "train.STEPS=5", "data.sources[0]=x", "data.sources=", "data.sources=[]", "data.sources=[4]", "fleet.nodes=0", "fleet.nodes=-1",
    "fleet.nodes=٤", "fleet.rendezvous_port=80", "fleet.hosts=[gpu-[0-99999999]]", "model.heads=7", "model.preset=none", "train.micro_batch_size=3", "train.global_batch_size=7", "train.warmup_steps=9", "train.parallelism.tensor=3", "train.parallelism=none", "checkpoint.every=x",
    "budget.max_usd=.inf", "budget.max_usd=0", "train.activation_memory_budget=.nan", "data.name=../../x", "name=../x", "name=", "name=null", "name=[a]", "name={a: b}", "a" * 40_000, "x=" + "y" * 40_000, "a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p=1",
    "__class__=1", "name.__class__=1", "'name=a # b' x", "name=%x", "name=@x", "name=`x`", "'name=*'", "'name=? a'", "'name=- a'", "name=---", "train.seed=0x10", "train.seed=1_000", "train.seed=1:30", "train.seed=true", "'train.seed= '", "\x1b[31m=1", "train.\x1b[31m=1",
    "train.steps=5;id", "train.steps=$(id)", "train.compile=yes", "train.compile=on", "train.compile=1", "data.tokenized_path=s3:///x", "checkpoint.path=/a/../b", "fleet.shared_folder=x", "model={heads: 7}", "'fleet={nodes: 3}'", "'data={validation_fraction: 0}'",
]  # fmt: skip
NUMBERS = (
    "٤",
    "-1",
    "1.5",
    "1e3",
    "x",
    " ",
    " 1",
    "1 ",
    "+1",
    "0x1",
    "1_0",
    "9" * 30,
    "½",
    "²",
    "１",
    "\n1",
    "1\n",
    "NaN",
    "None",
)
FLAGS = ("maybe", "2", "-1", "٠", "y", "on", "yes please", "TRUE!", " 1", "01")


def sets() -> Iterator[Case]:
    """SET, typed and checked like the file; what is wrong with it is told of SET, and never of a line of the file."""
    for text in SETS:
        yield Case("SET", repr(text[:60]), _blaming(text, "SET"))
    for text in (
        "nmae=x",
        "name=",
        "x",
        "name='a",
        "train={steps: 1, steps: 2}",
        "naem=b",
        "NAME=b",
        "nam.e=b",
    ):
        yield Case("SET at a look", repr(text), _look(text))
    for text in (
        "0",
        "-1",
        "x",
        "",
        " ",
        "٤",
        "1.5",
        "4096000",
        "9" * 5000,
        "[2]",
        "{a: b}",
        "&a [*a]",
        "!!python/name:os.system",
        "4; touch x",
        "null",
        "true",
        '"\\0"',
        "65",
        "3",
    ):
        yield Case("NODES", repr(text[:40]), _blaming("", "NODES", NODES=("fleet.nodes", text)))


def _blaming(text: str, source: str, **short: tuple[str, str]) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        (folder / "config.yaml").write_text(GOOD)
        try:
            config_of(Settings(folder / "config.yaml", text, short))
        except ConfigError as error:
            assert all(problem.where == source for problem in error.problems), f"blamed on {error}"
            raise

    return run


def _look(text: str) -> Callable[[Path], object]:
    def run(folder: Path) -> object:
        (folder / "config.yaml").write_text(GOOD)
        return run_named({"CONFIG": str(folder / "config.yaml"), "SET": text})

    return run


def variables() -> Iterator[Case]:
    """Variables that a verb does not take or that are no number, no flag, no text."""
    for verb, allowed in VERBS.items():
        for word in (
            "NODE=4",
            "nodes=4",
            "X=1",
            "=1",
            "4",
            "",
            "NODES",
            "PURGE =1",
            "config=x",
            "SETT=a",
            "\x1b[31m=1",
            "CONFIG=\udcff",
        ):
            yield Case(
                "variable",
                f"{verb} {word!r}",
                lambda folder, v=verb, a=allowed, w=word: read_variables(v, a, [w], {}),
            )
    for name in ("SAMPLE", "STEPS"):
        for text in NUMBERS:
            yield Case(
                "number",
                f"{name}={text!r}",
                lambda folder, n=name, t=text: number({n: t}, n, 20, least=1),
            )
    for name in ("YES", "PURGE", "FOLLOW", "VERIFY", "WEAK"):
        for text in FLAGS:
            yield Case("flag", f"{name}={text!r}", lambda folder, n=name, t=text: flag({n: t}, n))
    for text in (*NUMBERS, "0", "3", "٢ ٤"):
        yield Case("sizes", f"NODES={text!r}", lambda folder, t=text: counts_of(t, 4))
        yield Case(
            "step", f"STEP={text!r}", lambda folder, t=text: chosen({"STEP": t}, _Steps(), "a")
        )  # type: ignore[arg-type]
    for text in ("", "x", "../x", "/etc/passwd", "first-run.yaml", "FIRST", "\0", "a" * 9999):
        yield Case("recipe", repr(text[:30]), lambda folder, t=text: recipe_named(t))


class _Steps:
    """A store of two checkpoints."""

    def steps(self) -> list[int]:
        return [10, 20]


def config_files() -> Iterator[Case]:
    """CONFIG that is no regular file, or can't be one."""
    for label, make in SPECIAL.items():

        def run(folder: Path, make: Callable[[Path], Path] = make) -> object:
            return config_of(settings_of({"CONFIG": str(make(folder))}))

        yield Case("config file", label, run)


def _pipe(folder: Path) -> Path:
    import os

    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _socket(folder: Path) -> Path:
    import os
    import socket

    here = Path.cwd()
    os.chdir(folder)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")
    os.chdir(here)
    return folder / "s"


def _loop(folder: Path) -> Path:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    return folder / "a"


def _file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file" / "below"


def _link(folder: Path, to: str = "/dev/zero") -> Path:
    (folder / "link").symlink_to(to)
    return folder / "link"


SPECIAL: dict[str, Callable[[Path], Path]] = {
    "pipe": _pipe, "socket": _socket, "loop": _loop, "below a file": _file, "link to zeros": _link, "zeros": lambda _: Path("/dev/zero"), "nothing": lambda folder: folder / "none",
    "folder": lambda folder: folder, "random": lambda _: Path("/dev/urandom"), "terminal": lambda _: Path("/dev/tty"), "kernel": lambda _: Path("/proc/kmsg"), "memory": lambda _: Path("/proc/self/mem"), "long name": lambda folder: folder / ("x" * 300),
    "long path": lambda folder: folder / "/".join(["x" * 200] * 40), "NUL": lambda folder: Path(f"{folder}/a\0b"), "empty": lambda _: Path(), "dangling": lambda folder: _link(folder, "nowhere"), "root": lambda _: Path("/"), "null": lambda _: Path("/dev/null"), "half": lambda folder: folder / "\udcff",
}  # fmt: skip
