"""When a run saves, what it keeps, what a save that fails costs, and what a new run begins with: all through the real trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import ranks
from huggingface_hub import ModelCard
from ranks import Bench

from trainfleet.engine import evaluate, export
from trainfleet.run import run_folder
from trainfleet.watch.diagnosis import diagnose, parse
from trainfleet.watch.verdict import _faults

HINDERED = str(Path(__file__).with_name("hindered.py"))


@pytest.fixture(scope="module")
def unhindered(bench: Bench) -> Path:
    return bench.train("unhindered", 2)


def train(bench: Bench, hindrance: str, name: str, **values: object) -> tuple[Path, int, str]:
    """The run folder, the exit code and the output of two ranks of which saves are hindered."""
    run = bench.prepare(name, 2, **values)
    return run, *bench.attempt(run, 2, HINDERED, hindrance)


def saved(run: Path) -> list[int]:
    return [event["step"] for event in ranks.events(run, "checkpointed")]


def there(run: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")
    )


def test_a_full_disk_stops_saving_and_not_training(bench: Bench, unhindered: Path) -> None:
    """Rank 1 alone has no room, at two saves: all ranks let go of both, the older ones stay, and the third save is made."""
    run, code, output = train(bench, "full:1:8,12:0", "full")
    assert code == 0 and ranks.metrics(run) == ranks.metrics(unhindered), output
    assert (
        saved(run) == [4, 16, 20]
        and there(run) == [16, 20]
        and not list((run / "checkpoints").glob(".*"))
    )
    failures = ranks.events(run, "unsaved")
    assert [failure["step"] for failure in failures] == [8, 12] and "No space left" in failures[0][
        "why"
    ]
    assert (
        "step 8 was not saved: No space left on device (rank-00001.safetensors) (can't write a checkpoint on rank 1); free"
        in output
    )
    assert diagnose(list(parse(output.splitlines(), 0))) is None, (
        "a later failure would be laid to this one's charge"
    )


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_failed_save_stops_the_run_when_it_is_to(
    bench: Bench, unhindered: Path, seconds: int
) -> None:
    """Also when the ranks hear of it only because the next save, four steps later, waits for it."""
    run, code, output = train(
        bench, f"full:1:8:{seconds}", f"stops-{seconds}", **{"checkpoint.on_failure": "stop"}
    )
    assert (
        code == 1
        and output.count("can't write a checkpoint on rank 1") <= 2
        and "Traceback" not in output
    ), output
    assert saved(run) == [4] and there(run) == [4] and ranks.metrics(run)[-1]["step"] < 20
    bench.train(run.name, 2)
    assert ranks.metrics(run) == ranks.metrics(unhindered)


def test_the_last_save_must_be_made(bench: Bench) -> None:
    run, code, output = train(bench, "full:0:20:0", "last")
    assert code == 1 and saved(run) == [4, 8, 12, 16] and there(run) == [12, 16], output
    assert [event["step"] for event in ranks.events(run, "unsaved")] == [20]
    assert ranks.results(run)["last_checkpoint"].endswith("step-00000016")
    finding = diagnose(list(_faults(ranks.events(run, "fault"))))
    assert finding and finding.cause == "disk"


def test_a_slow_disk_with_a_save_every_step_loses_none(bench: Bench, unhindered: Path) -> None:
    """At most one is under way: the others wait, and so does training, which is what a save every step asks for."""
    run, code, output = train(
        bench, "slow:0.1", "slow", **{"checkpoint.every": 1, "checkpoint.keep": 3}
    )
    assert code == 0 and ranks.metrics(run) == ranks.metrics(unhindered), output
    assert saved(run) == list(range(1, 21)) and there(run) == [18, 19, 20]


def test_the_clock_of_rank_0_decides_for_all(bench: Bench, unhindered: Path) -> None:
    run, code, output = train(
        bench, "fast:300", "clock", **{"checkpoint.every": "1min", "checkpoint.keep": 100}
    )
    assert code == 0 and ranks.metrics(run) == ranks.metrics(unhindered), output
    assert len(saved(run)) >= 2 and saved(run)[-1] == 20 and there(run) == saved(run)


def test_the_newest_stay_and_every_kth_for_good(bench: Bench) -> None:
    run = bench.train(
        "kept", 1, **{"checkpoint.every": 2, "checkpoint.keep": 2, "checkpoint.keep_every": 8}
    )
    assert saved(run) == list(range(2, 21, 2)) and there(run) == [8, 16, 18, 20]


def test_a_run_begins_with_the_weights_of_another(bench: Bench, unhindered: Path) -> None:
    """From a run, one of its checkpoints, a Hugging Face folder, and NxD's: sharded over two ranks, at a rate that changes nothing."""
    source = run_folder.Run(unhindered)
    export.export(source, folder := bench.folder / "exported")
    export.export(source, slices := bench.folder / "slices", "nxd-tp2-pp2")
    expected = evaluate.evaluate(source).loss
    values = {
        "train__steps": 1,
        "train__learning_rate": 1e-9,
        "train__seed": 7,
        "train__parallelism__fsdp": 2,
    }
    for number, address in enumerate(
        (unhindered, unhindered / "checkpoints" / "step-00000020", folder, slices)
    ):
        run = bench.train(f"begun-{number}", 2, **values, train__init_from=str(address))
        assert ranks.events(run, "initialized")[0]["source"].startswith(str(address))
        assert evaluate.evaluate(run_folder.Run(run)).loss == pytest.approx(expected, rel=1e-5)
    bench.train("begun-0", 2, **(values | {"train__steps": 2}), train__init_from=str(unhindered))
    run = bench.folder / "runs" / "begun-0"
    assert [event["step"] for event in ranks.events(run, "resumed")] == [1] and len(
        ranks.events(run, "initialized")
    ) == 1


def test_a_rank_that_can_t_read_the_first_weights_ends_every_rank(
    bench: Bench, unhindered: Path
) -> None:
    """Rank 0, for which the others would wait in the first collective that distributes a weight."""
    export.export(run_folder.Run(unhindered), folder := bench.folder / "unread")
    values = {"train.parallelism.fsdp": 2, "train.init_from": str(folder)}
    _, code, output = train(bench, "lost:0", "unread", **values)
    assert code == 1 and "Traceback" not in output, output
    assert (
        "can't load a Hugging Face folder on rank 0\n  why: model.safetensors: is missing" in output
    )


def test_the_card_of_a_continued_run_says_what_it_was_continued_from_and_the_next_one_too(
    bench: Bench, unhindered: Path
) -> None:
    """A run, its folder, a run that begins from that folder, its folder, and so on: what each has learned from is in its card."""
    export.export(run_folder.Run(unhindered), first := bench.folder / "grandparent")
    assert "Trained from scratch with trainfleet, on `text`" in (first / export.CARD).read_text()
    (first / export.CARD).write_text("---\nlicense: apache-2.0\n---\n")
    values = {"train__steps": 1, "train__learning_rate": 1e-9, "train__validate_every": 0}
    second = export_of(bench, "parent", **values, train__init_from=str(first))
    third = export_of(bench, "child", **values, train__init_from=str(second))
    sibling = export_of(
        bench, "sibling", **values, train__init_from=str(bench.folder / "runs" / "parent")
    )
    for folder, base, licence in (
        (second, first, True),
        (third, second, True),
        (sibling, None, False),
    ):
        read = ModelCard(text := (folder / export.CARD).read_text())
        digest = base and hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
        from_ = (
            f"`{base.name}` (sha256 of model.safetensors: {digest})"
            if base
            else "`step 1 of parent` (sha256 of its"
        )
        assert f"Continued with trainfleet from {from_}" in text and "from scratch" not in text
        assert (
            read.data.license == ("apache-2.0" if licence else None)
            and str(bench.folder) not in text
        ), text
    tokens = ranks.results(bench.folder / "runs" / "parent")["tokens"]
    assert (
        f"after the {tokens:,} that step 1 of parent was trained on"
        in (sibling / export.CARD).read_text()
    )


def export_of(bench: Bench, name: str, **values: object) -> Path:
    """The exported folder of a new run."""
    run = bench.train(name, 1, **values)
    export.export(run_folder.Run(run), out := bench.folder / f"{name}-exported")
    return out


def test_a_folder_that_can_t_be_cleared_is_told_once_by_all(bench: Bench) -> None:
    run = bench.prepare("unswept", 2)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / ".step-00000004").touch()  # a file where a folder is to be removed
    bench.train("unswept", 2, code=1)
    assert (
        bench.output.count("can't remove leftovers of unfinished saves on rank 0") == 1
        and "Traceback" not in bench.output
    )
    assert ".step-00000004" in bench.output, bench.output


def test_weights_of_another_shape_are_refused(bench: Bench, unhindered: Path) -> None:
    bench.train("misfit", 2, code=1, train__init_from=str(unhindered), model__layers=3)
    assert (
        bench.output.count("model.layers is 2 in the checkpoint, 3 in the config") == 1
        and "Traceback" not in bench.output
    ), bench.output
