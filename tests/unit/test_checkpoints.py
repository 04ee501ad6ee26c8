"""Which checkpoints exist, which are good, which stay and which a config may go on from: all without torch."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import subprocess
import sys
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from requirement import need
from trainfleet.checkpoints import marker
from trainfleet.checkpoints.marker import MARKER, Broken, Commit, FileSum, parse, render
from trainfleet.checkpoints.store import CheckpointStore, stays, store_of
from trainfleet.config import Config, Settings, dump_resolved, load
from trainfleet.run import run_folder
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import ConfigError, RunError, S3Error

ROOT = Path(__file__).parents[2]
CONFIG = "name: line\ndata: {sources: [text]}\n"


def config_of(folder: Path, set: str = "") -> Config:
    (folder / "config.yaml").write_text(CONFIG)
    return load(Settings(folder / "config.yaml", set))[0]


def commit_of(config: Config, step: int, **files: bytes) -> Commit:
    return Commit(
        step=step, samples=16 * step, tokens=4096 * step, seconds_trained=1.5, loss=2.5, time=1795205086.0, world_size=2,
        layout={"dp": 2, "fsdp": 1, "tp": 1, "pp": 1, "cp": 1}, dataset="0123456789abcdef", config=marker.flatten(config),
        versions={"trainfleet": "0", "torch": "2"}, files={name: FileSum(len(data), zlib.crc32(data)) for name, data in files.items()},
    )  # fmt: skip


def put(store: CheckpointStore, config: Config, step: int, **files: bytes) -> None:
    """A checkpoint, as a save makes it."""
    files = files or {"part": b"%d" % step * 1000}
    store.begin(step)
    for name, data in files.items():
        with store.create(step, name) as stream:
            stream.write(data)
    store.commit(step, render(commit_of(config, step, **files)))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


# the marker


def test_a_marker_reads_back_as_it_was(config: Config) -> None:
    commit = commit_of(config, 4, part=b"x")
    assert parse(render(commit), "here") == commit


def test_any_changed_byte_of_a_marker_is_found(config: Config) -> None:
    text = render(commit_of(config, 4, part=b"x"))
    for place in range(len(text)):
        for changed in (chr(ord(text[place]) ^ 1), "", text[place] * 2):
            with pytest.raises(Broken):
                parse(text[:place] + changed + text[place + 1 :], "here")


def test_a_marker_of_another_format_is_not_called_damaged(config: Config) -> None:
    with pytest.raises(RunError, match="format 99, but this program reads") as caught:
        parse(render(dataclasses.replace(commit_of(config, 4), format=99)), "here")
    assert not isinstance(caught.value, Broken)


# what is in sight


def test_only_what_is_committed_is_in_sight(store: CheckpointStore, config: Config) -> None:
    store.begin(4)
    with store.create(4, "part") as stream:
        stream.write(b"x")
    assert store.steps() == [] and list(store.look()) == []
    store.abandon(4)
    put(store, config, 8)
    put(store, config, 12)
    (store.files.folder / "step-00000016").mkdir()  # without a marker
    assert [(entry.step, entry.fault) for entry in store.look()] == [
        (8, ""),
        (12, ""),
        (16, f"has no {MARKER}"),
    ]


def test_a_look_finds_what_is_missing_or_cut_and_reading_it_the_rest(
    store: CheckpointStore, config: Config
) -> None:
    put(store, config, 4, a=b"aaaa", b=b"bbbb", c=b"cccc")
    commit, folder = store.read(4), store.files.folder / "step-00000004"
    (folder / "a").unlink()
    (folder / "b").write_bytes(b"bbb")
    (folder / "c").write_bytes(b"cxcc")
    assert [entry.fault for entry in store.look()] == ["a is missing; b has 3 bytes, not 4"]
    assert "c does not match its checksum" in store.damage(4, "c", commit.files["c"])


@pytest.mark.parametrize(
    ("error", "damage"),
    [
        (OSError(errno.ESTALE, "stale"), False),
        (OSError(errno.ETIMEDOUT, "slow"), False),
        (S3Error("S3 is busy"), False),  # which has EIO's number too
        (OSError(errno.EIO, "bad"), True),
    ],
)
def test_only_a_disk_s_read_error_is_damage(
    store: CheckpointStore,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    damage: bool,
) -> None:
    """What a file server or a bucket fails to read once is not set aside for good."""
    put(store, config, 4)
    (name, file), *_ = store.read(4).files.items()

    class Failing(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise error

    monkeypatch.setattr(store, "open", lambda *_: Failing(bytes(file.size)))
    with nullcontext() if damage else pytest.raises(type(error)):
        assert store.damage(4, name, file) == f"{name} can't be read: bad"


def test_a_save_takes_the_place_of_a_damaged_one_of_its_step(
    store: CheckpointStore, config: Config
) -> None:
    put(store, config, 4)
    put(store, config, 4, part=b"new")
    assert store.open(4, "part").read() == b"new" and store.broken() == [4]
    store.retain(4, keep=1, keep_every=None)
    assert store.steps() == [4] and store.broken() == []


def test_a_sweep_takes_only_what_was_left_behind(store: CheckpointStore, config: Config) -> None:
    put(store, config, 4)
    store.begin(8)
    store.sweep()
    assert [path.name for path in store.files.folder.iterdir()] == ["step-00000004"]


# what stays


@pytest.mark.parametrize(
    ("steps", "keep", "keep_every", "left"),
    [
        ([], 2, None, []),
        ([100], 2, None, [100]),
        ([100, 200, 300], 2, None, [200, 300]),
        ([100, 200, 300, 400, 500], 1, 200, [200, 400, 500]),
        ([90, 190, 290, 390], 1, 200, [290, 390]),  # by the clock: the first after each multiple
        ([210, 250, 410, 450], 1, 200, [210, 410, 450]),
    ],
)
def test_the_newest_stay_and_every_kth_for_good(
    steps: list[int], keep: int, keep_every: int | None, left: list[int]
) -> None:
    assert sorted(stays(steps, keep, keep_every)) == left


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    some.sets(some.integers(1, 10**6), max_size=30),
    some.integers(1, 5),
    some.none() | some.integers(1, 10**5),
)
def test_what_once_stays_for_good_always_does_and_the_newest_never_goes(
    new: set[int], keep: int, keep_every: int | None
) -> None:
    kept: Sequence[int] = []
    for step in sorted(new):
        stay = stays([*kept, step], keep, keep_every)
        assert step in stay and len(stay) >= min(keep, len(kept) + 1)
        kept = sorted(stay)
    if keep_every:
        first = {
            step // keep_every: step for step in sorted(new, reverse=True) if step >= keep_every
        }
        assert set(first.values()) <= set(kept)


def test_retention_leaves_alone_what_is_newer_than_the_commit(
    store: CheckpointStore, config: Config
) -> None:
    for step in (4, 8, 12, 100):
        put(store, config, step)
    store.retain(12, keep=1, keep_every=None)
    assert store.steps() == [12, 100]


# what may change


@pytest.mark.parametrize(
    "set",
    ["fleet.nodes=4", "train.steps=9000", "train.learning_rate=1e-4", "train.weight_decay=0.5", "train.micro_batch_size=1", "checkpoint.keep=9",
     "name=other", "data.validation_fraction=0.2"],
)  # fmt: skip
def test_a_run_goes_on_with_what_does_not_make_it_another(
    tmp_path: Path, config: Config, set: str
) -> None:
    marker.check(commit_of(config, 4), config_of(tmp_path, set), "0123456789abcdef", "here")


@pytest.mark.parametrize(
    "set",
    ["train.seed=2", "train.global_batch_size=32", "train.sequence_length=128", "model.layers=3"],
)
def test_a_run_does_not_go_on_as_another_one(tmp_path: Path, config: Config, set: str) -> None:
    key, value = set.split("=")
    with pytest.raises(RunError) as caught:
        marker.check(commit_of(config, 4), config_of(tmp_path, set), "0123456789abcdef", "here")
    assert (
        key in caught.value.what
        and f"to {value}: " in caught.value.why
        and "name=again" in caught.value.next
    )


@pytest.mark.parametrize(("family", "taken"), [("llama", True), ("gpt2", False)])
def test_more_positions_may_come_only_where_none_is_learnt(
    tmp_path: Path, family: str, taken: bool
) -> None:
    shape = f"model.family={family} model.layers=2 model.hidden_size=32 model.heads=2 model.kv_heads=2 model.max_position_embeddings="
    was, now = (config_of(tmp_path, shape + length) for length in ("1024", "2048"))
    if taken:
        marker.check(commit_of(was, 4), now, "0123456789abcdef", "here")
        return
    with pytest.raises(RunError, match=r"a different model\.max_position_embeddings"):
        marker.check(commit_of(was, 4), now, "0123456789abcdef", "here")


def test_other_data_is_refused(config: Config) -> None:
    with pytest.raises(RunError, match="the dataset's tokens"):
        marker.check(commit_of(config, 4), config, "other", "here")


def test_what_changed_is_told(tmp_path: Path, config: Config) -> None:
    now = config_of(tmp_path, "train.learning_rate=1e-4 fleet.nodes=4")
    told = marker.check(commit_of(config, 4), now, "0123456789abcdef", "here")
    assert (
        told["train.learning_rate"] == (config.train.learning_rate, 1e-4)
        and "fleet.nodes" not in told
    )


@pytest.mark.parametrize("optimizer", ["muon", "lamb"])
def test_another_optimizer_is_refused_with_what_works(
    tmp_path: Path, config: Config, optimizer: str
) -> None:
    now = config_of(tmp_path, f"train.optimizer={optimizer}")
    with pytest.raises(RunError, match=r"a different train\.optimizer") as caught:
        marker.check(
            commit_of(config, 4), now, "0123456789abcdef", "runs/a/checkpoints/step-00000004"
        )
    assert "SET='name=again train.init_from=runs/a/checkpoints/step-00000004'" in caught.value.next


def test_what_takes_no_weights_along_is_not_proposed(tmp_path: Path, config: Config) -> None:
    with pytest.raises(RunError) as caught:
        marker.check(
            commit_of(config, 4), config_of(tmp_path, "model.layers=3"), "0123456789abcdef", "here"
        )
    assert "SET='name=again'" in caught.value.next and "init_from" not in caught.value.next


SCHEDULES = ["cosine", "linear", "polynomial", "wsd"]


@pytest.mark.parametrize(
    "more", ["train.steps=200", "train.steps=9000", "train.steps=100 train.learning_rate=1e-4"]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_that_jumps_is_told_with_what_avoids_it(
    tmp_path: Path, schedule: str, more: str
) -> None:
    was = config_of(tmp_path, f"train.steps=100 train.schedule={schedule}")
    step = 100 if "9" in more or "200" in more else 50
    told = marker.jump(
        commit_of(was, step), config_of(tmp_path, f"train.schedule={schedule} {more}"), "here"
    )
    assert (
        told.startswith("warning: the learning rate jumps from ") and f" at step {step} to " in told
    )
    held = told.partition("SET='")[2].partition("'")[0]
    keys = dict(pair.split("=") for pair in f"train.schedule={schedule} {more} {held}".split())
    holding = config_of(tmp_path, " ".join(f"{key}={value}" for key, value in keys.items()))
    assert not marker.jump(commit_of(was, step), holding, "here")
    assert not marker.jump(
        commit_of(was, 40),
        config_of(tmp_path, f"train.steps=100 train.schedule={schedule}"),
        "here",
    )


def test_a_rate_that_has_fallen_to_zero_can_only_begin_anew(tmp_path: Path) -> None:
    was = config_of(tmp_path, "train.steps=100 train.min_lr_ratio=0")
    told = marker.jump(
        commit_of(was, 100),
        config_of(tmp_path, "train.steps=200 train.min_lr_ratio=0"),
        "here",
    )
    assert "from 0 at step 100" in told and "SET='name=again train.init_from=here'" in told


@pytest.mark.parametrize("value", ["fast", None, [], 0, -1, 1e999])
@pytest.mark.parametrize(
    "key", ["train.learning_rate", "train.warmup_steps", "train.schedule_steps", "train.schedule"]
)
def test_a_marker_whose_values_are_no_schedule_has_no_rate(
    key: str, value: object, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "train.steps=200")
    commit = commit_of(config, 100)
    assert isinstance(
        marker.jump(
            dataclasses.replace(commit, config={**commit.config, key: value}), config, "here"
        ),
        str,
    )


# the keys


def test_an_interval_is_steps_or_minutes(tmp_path: Path) -> None:
    for text, steps, seconds in (("50", 50, 0.0), ("15min", 0, 900.0), ("'1.5 min'", 0, 90.0)):
        (tmp_path / "config.yaml").write_text(f"{CONFIG}checkpoint: {{every: {text}}}\n")
        policy = load(Settings(tmp_path / "config.yaml"))[0].checkpoint
        assert (policy.every_steps, policy.every_seconds) == (steps, seconds)
    for text in ("0", "0min", "often", "-5", "1.5"):
        with pytest.raises(ConfigError, match=r"checkpoint\.every"):
            config_of(tmp_path, f"checkpoint.every={text}")


def test_the_destination_is_the_runs_own_folder_or_one_of_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path / "runs" / "line")
    assert store_of(run, None).address(4) == str(tmp_path / "runs/line/checkpoints/step-00000004")
    assert store_of(run, f"{tmp_path}/fsx/").address(4) == str(tmp_path / "fsx/line/step-00000004")


# make checkpoints, make verify


def shell(folder: Path, verb: str, *words: str, **environment: str) -> tuple[int, str]:
    """A verb in a process that may not import torch."""
    code = "import sys; sys.modules['torch'] = None; from trainfleet.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, verb, *words], cwd=folder, text=True, capture_output=True,
                          env={"PYTHONPATH": str(ROOT / "python"), "PATH": "", **environment})  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_checkpoints_lists_them_and_says_which_are_broken(tmp_path: Path, config: Config) -> None:
    assert shell(tmp_path, "checkpoints") == (
        1,
        "error: runs/line: the run was never started\n  next: make train\n",
    )
    run = run_folder.run_of("line", tmp_path / "runs")
    run_folder.write_atomic(run.config, dump_resolved(config))
    assert "has no checkpoint yet" in shell(tmp_path, "checkpoints")[1]
    store = CheckpointStore(run.checkpoints)
    for step in (100, 200, 1200):
        put(store, config, step)
    code, text = shell(tmp_path, "checkpoints")
    assert code == 0 and [line.split()[0] for line in text.splitlines()] == [
        "step",
        "100",
        "200",
        "1,200",
        "next:",
    ]
    assert "2.500  dp 2    good" in text
    (store.files.folder / "step-00000200" / "part").unlink()
    code, text = shell(tmp_path, "checkpoints")
    assert code == 1 and "broken: part is missing" in text and "newest good one" in text


def test_training_on_as_another_run_is_refused_before_a_rank_starts(
    tmp_path: Path, config: Config
) -> None:
    run = run_folder.run_of("line", tmp_path / "runs")
    run_folder.write_atomic(run.config, before := dump_resolved(config))
    store = CheckpointStore(run.checkpoints)
    put(store, config, 100)
    (store.files.folder / "step-00000200").mkdir()  # a damaged one is not asked
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("A text.\n")
    code, text = shell(tmp_path, "train", "SET=model.layers=3")
    assert (
        code == 1
        and "can't resume with a different model.layers" in text
        and "to 3: the weights fit only a model of that shape" in text
    )
    assert run.config.read_text() == before and not run.events.exists()


def test_a_bucket_that_does_not_answer_is_told_without_a_traceback(
    tmp_path: Path, config: Config
) -> None:
    need("boto3")
    run = run_folder.run_of("line", tmp_path / "runs")
    run_folder.write_atomic(
        run.config, dump_resolved(config_of(tmp_path, "checkpoint.path=s3://bucket/far"))
    )
    closed = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    code, text = shell(tmp_path, "checkpoints", **closed)
    assert (
        code == 1
        and text.startswith("error: s3://bucket/far/line/: S3 sent no valid response")
        and "aws s3 ls" in text
    )
    assert "Traceback" not in text


def test_verify_finds_a_changed_byte(tmp_path: Path, config: Config) -> None:
    run = run_folder.run_of("line", tmp_path / "runs")
    run_folder.write_atomic(run.config, dump_resolved(config))
    store = CheckpointStore(run.checkpoints)
    put(store, config, 100)
    put(store, config, 200, part=b"x" * 3_000_000)
    assert "every byte is intact" in shell(tmp_path, "verify", "STEP=100")[1]
    data = bytearray((store.files.folder / "step-00000200" / "part").read_bytes())
    data[2_000_000] ^= 1
    (store.files.folder / "step-00000200" / "part").write_bytes(data)
    code, text = shell(tmp_path, "verify")
    assert (
        code == 1
        and "step-00000200: differs from the committed checkpoint" in text
        and "part does not match its checksum" in text
    )
    code, text = shell(tmp_path, "verify", "STEP=7")
    assert code == 2 and "checkpoints exist at 100, 200" in text


def test_the_marker_is_json_for_other_programs(config: Config) -> None:
    assert json.loads(render(commit_of(config, 4, part=b"x")))["commit"]["files"] == {
        "part": {"size": 1, "crc32": zlib.crc32(b"x")}
    }
