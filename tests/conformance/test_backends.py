"""What every backend must do, the same cases on each: plan, submit, status, stop, exit codes, logs, and words that arrive as they are."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws.account import Account
from aws.metal import Metal, on_metal, theirs
from aws.sagemaker import Job as TrainingJob
from aws.schedulers import Site, site
from aws.world import aws
from fleet.lab import Lab, lab
from fleet.slurmlab import cluster
from trainfleet.backends import BACKENDS, OURS, Backend, backend_of, terms_of
from trainfleet.backends.base import Can, Handle, Phase, Status, load_job, save_job
from trainfleet.backends.ec2 import Ec2
from trainfleet.config import Config, Settings, dump_resolved, load
from trainfleet.node.entrypoint import AGAIN
from trainfleet.plan.job import Job, Request
from trainfleet.process import install_paths
from trainfleet.run.run_folder import Run
from trainfleet.storage import s3
from trainfleet.trust.errors import BackendError

ROOT = Path(__file__).parents[2]
HARD = (
    "two words",
    "a'quote",
    'a"double"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "line one\nline two",
    "*",
    "~",
    "",
    "ü;|&<>",
    "-n",
)
# Runs on a node: says what it was given, then does what its first word tells it to.
PROBE = """
import json, os, signal, sys, time
node = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK", "?")
given = {name: value for name, value in os.environ.items() if name.startswith("PROBE_") and name != "PROBE_KEY"}
print(json.dumps({"node": node, "words": sys.argv[1:], "given": given, "folder": os.getcwd(), "nodes": os.environ.get("NODES")}), flush=True)
match sys.argv[1]:
    case "exit" | "exit-last":
        if sys.argv[1] == "exit-last" and node == sys.argv[3]:
            time.sleep(15)  # when the others have begun
        sys.exit(int(sys.argv[2]) if node == sys.argv[3] else 0)
    case "die":
        os.kill(os.getpid(), signal.SIGKILL if node == "1" else signal.SIG_DFL)
    case "stay":
        if not os.fork():
            os.setsid()  # a grandchild that leaves the session
        time.sleep(300)
    case "again":  # ends with the engine's own code for another attempt, once
        first = os.environ.get("AWS_BATCH_JOB_ATTEMPT") == "1"
        sys.exit(int(sys.argv[2]) if first and node == "0" else 0)
    case "tell":
        print("it has", len(os.environ[sys.argv[2]]), "letters:", os.environ[sys.argv[2]], flush=True)
    case "polite":
        signal.signal(signal.SIGTERM, lambda *_: (print("finishing", flush=True), sys.exit(0)))
        time.sleep(300)
    case "meet":
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print(f"met {dist.get_rank()} of {dist.get_world_size()} at {os.environ['MASTER_ADDR']}", flush=True)
        dist.barrier()
        dist.destroy_process_group()
"""


CANARY = "canary-77ab01"
# A launcher: submits a request that it was given, says by what handle, and stays.
LAUNCHER = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
from trainfleet.backends import backend_of
from trainfleet.config import load_resolved
from trainfleet.plan.job import Request
request = Request.of(json.loads(Path(sys.argv[2]).read_text()), sys.argv[2])
print(json.dumps(asdict(backend_of(load_resolved(Path(sys.argv[1]))).submit(request))), flush=True)
time.sleep(300)
"""


@dataclass
class Bench:
    """A backend under test, how another process would make it, where its nodes leave their logs, and who runs there."""

    name: str
    config: Config
    folder: Path
    running: Callable[[], list[str]]
    scripts: Callable[[Request], list[str]]  # what the nodes were given to run, by node
    type: Callable[[int, Request], object]  # runs a node's part of a request, as a person would
    forget: Callable[[], None] = lambda: None  # what the nodes have left elsewhere than in `folder`
    prelude: str = ""  # of a program that has this backend
    artifacts: tuple[str, ...] = ("node-0.sh", "node-1.sh")  # of a job of two nodes
    places: tuple[str, ...] = ()  # the hosts, where the engine chooses among them
    image: str = ""
    hard: tuple[str, ...] = HARD  # words that arrive as they are
    killed: frozenset[int] = frozenset({137})  # exit codes of what was ended at once
    crowded: Callable[[], AbstractContextManager[object]] | None = (
        None  # where jobs wait: from now on there are no machines
    )
    lost: Callable[[Handle, int], AbstractContextManager[object]] | None = (
        None  # the machine of a node goes, and comes back
    )

    @property
    def backend(self) -> Backend:
        return backend_of(self.config)

    def another(self) -> Backend:
        """The backend as another process has it, that knows nothing of what this one did."""
        return BACKENDS[self.name](self.config)

    def plan(
        self, *words: str, nodes: int = 2, torchrun: bool = False, **environment: str
    ) -> Request:
        launch = secrets.token_hex(4)
        job = Job(
            "train" if torchrun else "tokenize", "probe", Path("runs/probe"), nodes, 1, "probe", words, torchrun, launch=launch,
            image=self.image,
        )  # fmt: skip
        finds = {
            "PYTHONSAFEPATH": ""
        }  # the probe lies in the folder where nodes start, where no module of a job is looked for
        return self.backend.plan(replace(job, environment=finds | environment), {})

    def said(self, request: Request, node: int) -> str:
        self.backend.place(Run(Path("runs/probe"))).refresh()
        return (self.folder / request.logs[node]).read_text()

    def records(self, request: Request) -> list[dict[str, Any]]:
        """What the probe of each node was given."""
        lines = [
            line
            for node in range(request.job.nodes)
            for line in self.said(request, node).splitlines()
            if '"words"' in line
        ]
        return [json.loads(line.partition(" | ")[2]) for line in lines]

    def until_ended(
        self, handle: Handle, seconds: float = 60, backend: Backend | None = None
    ) -> Status:
        deadline = time.monotonic() + seconds
        while (
            not (status := (backend or self.backend).status(handle)).ended
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        assert status.ended, status
        return status

    def is_quiet(self, seconds: float = 5) -> bool:
        """Whether nothing runs; what dies with its supervisor gets a moment to be gone."""
        deadline = time.monotonic() + seconds
        while (found := self.running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not found

    def until_said(self, request: Request, text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if all(text in self.said(request, node) for node in range(request.job.nodes)):
                    return
            except FileNotFoundError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"{text!r} never came")


def processes_of(folder: Path) -> list[str]:
    """Processes of this machine that run the probe in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text().replace("\0", " ")
            if (entry / "cwd").readlink() == folder and " -m probe" in command:
                found.append(f"{entry.name} {command}")
        except OSError:
            continue
    return found


def config_of(
    backend: str, folder: Path, more: Mapping[str, str] | None = None, **fleet: Any
) -> Config:
    path = folder / f"{backend}.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "probe",
                "train": {"global_batch_size": 48},  # of twelve nodes too
                "fleet": {"backend": backend, "nodes": 2} | fleet,
            }
        )
    )
    return load(
        Settings(path, " ".join(f"{key}={value}" for key, value in (more or {}).items())), terms_of
    )[0]


@contextmanager
def engine(name: str, folder: Path, patch: pytest.MonkeyPatch, nodes: int = 2) -> Iterator[Bench]:
    """AWS Batch or SageMaker, pretended: nodes in namespaces that share no disk, containers that really run, all through S3."""
    with site(folder / "engine", nodes) as place, patch.context() as inner:
        inner.setattr("trainfleet.backends.aws_managed.PACE", 0.2)
        for variable, value in place.environment.items():
            inner.setenv(variable, value)
        inner.chdir(folder)
        (place.cluster.folder / "probe.py").write_text(PROBE)
        paths = {
            "data.tokenized_path": "s3://bucket/sets",
            "checkpoint.path": "s3://bucket/checkpoints",
        }
        fleet = {key: value for key, value in place.fleet(name).items() if key != "backend"}
        if "batch" in fleet:
            fleet["batch"]["attempts"] = 1
        config = config_of(name, folder, paths, **fleet)

        def running() -> list[str]:
            return [
                str(pid)
                for pid in place.cluster.processes()
                if " -m probe" in place.cluster.words(pid)
            ]

        def forget() -> None:
            s3.remove_all(found.address for found in s3.list_objects("s3://bucket/some/"))
            shutil.rmtree(folder / "runs", ignore_errors=True)

        @contextmanager
        def crowded() -> Iterator[None]:
            with pytest.MonkeyPatch.context() as full:
                full.setattr(place.batch, "runnable", -1)
                full.setattr(
                    place.batch,
                    "stuck",
                    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - no such instances here",
                )
                full.setattr(place.sagemaker, "waits", 600.0)
                yield

        @contextmanager
        def lost(handle: Handle, node: int) -> Iterator[None]:
            place.sagemaker.break_host(
                handle.id, node
            ) if name == "sagemaker" else place.containers.lose(handle.id, node)
            yield

        prelude = f"""import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from aws import elsewhere
elsewhere.attach()
"""
        operations = (
            [("batch", "RegisterJobDefinition"), ("batch", "SubmitJob")]
            if name == "batch"
            else [(name, "CreateTrainingJob")]
        )
        names = tuple(
            f"requests/{number:02}-{service}-{operation}.json"
            for number, (service, operation) in enumerate(operations, 1)
        )
        hard = HARD if name == "batch" else tuple(word for word in HARD if "\n" not in word)
        yield Bench(name, config, folder, running, lambda request: sent(place, request), lambda *asked: by_hand(place, *asked), forget,
                    prelude, names, (), config.fleet.container, hard, frozenset({0, 137, 143}), crowded, lost)  # fmt: skip


def on_this_machine(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Bench]:
    patch.chdir(folder)
    (folder / "probe.py").write_text(PROBE)

    def given(request: Request) -> list[str]:
        return [
            (folder / f"runs/probe/nodes/node-{node}.sh").read_text()
            for node in range(request.job.nodes)
        ]

    def typed(node: int, request: Request) -> None:
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(
            ["sh"],
            input=request.artifacts[node].text,
            text=True,
            cwd="/",
            env=bare,
            check=True,
            timeout=60,
        )

    yield Bench(
        "local", config_of("local", folder), folder, lambda: processes_of(folder), given, typed
    )


def on_slurm(nodes: Lab, patch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A real Slurm of two nodes; this process is typed on its head, in a folder that the nodes see."""
    folder = nodes.shared / "work"
    (folder / "runs" / "probe" / "logs").mkdir(parents=True)  # sbatch by hand makes none
    patch.chdir(folder)
    (folder / "probe.py").write_text(PROBE)

    def running() -> list[str]:
        return [
            f"node{node} {pid}"
            for node in range(nodes.count)
            for pid in nodes.processes(node, " -m probe")
        ]

    def given(request: Request) -> list[str]:
        number = (folder / f"runs/probe/nodes/{request.token}").read_text().strip()
        said = subprocess.run(
            ["scontrol", "write", "batch_script", number, "-"],
            capture_output=True,
            text=True,
            check=True,
        )
        return [said.stdout]

    def typed(node: int, request: Request) -> None:
        (folder / "by-hand.sh").write_text(request.artifacts[-1].text)
        subprocess.run(["sbatch", "--wait", "by-hand.sh"], check=True, timeout=60)

    @contextmanager
    def crowded() -> Iterator[None]:
        words = [
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=sleep 600",
        ]
        number = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        yield
        subprocess.run(["scancel", number], check=True)

    # backend_of keeps a backend, and so its folder, for each config
    config = config_of("slurm", folder, exclusive=True, shared_folder=str(folder))
    yield Bench(
        "slurm",
        config,
        folder,
        running,
        given,
        typed,
        artifacts=("job.sbatch",),
        places=("node0", "node1"),
        killed=frozenset({137, 143}),
        crowded=crowded,
    )  # fmt: skip - srun sees one end first, and then ends the others


def sent(place: Site, request: Request) -> list[str]:
    """The bodies that reached the account for a request, but for the job's name and what is of this attempt alone."""
    found = []
    for artifact in request.artifacts:
        operation = artifact.name.rpartition("-")[2].removesuffix(".json")
        body = next(
            deepcopy(body) for _, asked, body in reversed(place.account.calls) if asked == operation
        )
        if operation == "SubmitJob":
            assert body.pop("jobName").endswith(request.token)
            override = body["nodeOverrides"]["nodePropertyOverrides"][0]["containerOverrides"]
            override["environment"] = [
                pair for pair in override["environment"] if pair["name"] not in request.environment
            ]
        if operation == "CreateTrainingJob":
            assert body.pop("TrainingJobName").endswith(request.token)
            body["Environment"] = {
                name: value
                for name, value in body["Environment"].items()
                if name not in request.environment
            }
        found.append(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
    return found


def by_hand(place: Site, node: int, request: Request) -> None:
    """A container of the image with a request's words and environment, as `docker run` on a machine of two would start it."""
    body = json.loads(request.artifacts[-1].text)
    if "AlgorithmSpecification" in body:
        job = TrainingJob("by-hand", body)
        container = place.sagemaker.start(job, node)
    else:
        override = body["nodeOverrides"]["nodePropertyOverrides"][0]["containerOverrides"]
        told = {pair["name"]: pair["value"] for pair in override["environment"]} | {
            "AWS_BATCH_JOB_ID": "by-hand"
        }
        told |= place.cluster.as_batch(2, str(node), "1")
        container = place.containers.start("by-hand", 1, node, 2, override["command"], told)
    assert container.process.wait(60) == 0


def on_hosts(
    name: str, nodes: Lab, folder: Path, patch: pytest.MonkeyPatch, count: int = 2
) -> Iterator[Bench]:
    """sshd nodes, or instances that are such nodes; this process plays the head of the fleet."""
    patch.chdir(nodes.shared)
    (nodes.shared / "probe.py").write_text(PROBE)
    fleet: dict[str, Any] = {"shared_folder": "/fsx", "python": sys.executable, "nodes": count}
    if name == "ec2":
        config = instances(nodes, config_of(name, folder, **fleet, **on_metal(nodes)))
    else:
        config = config_of(name, folder, **fleet, hosts=nodes.hosts(), ssh=nodes.ssh())
    patch.setenv("TRAINFLEET_HEAD", "1")

    def running() -> list[str]:
        return [
            f"node{node} {pid}"
            for node in range(nodes.count)
            for pid in nodes.processes(node, " -m probe")
        ]

    def given(request: Request) -> list[str]:
        script = f"probe-{request.job.kind}.sh"
        files = [
            nodes.root(node) / f"root/.trainfleet/jobs/node{node}" / script
            for node in range(request.job.nodes)
        ]
        return [file.read_text() for file in files]

    def typed(node: int, request: Request) -> None:
        (nodes.shared / "by-hand.sh").write_text(request.artifacts[node].text)
        nodes.run(node, "sh", "/fsx/by-hand.sh")

    @contextmanager
    def lost(handle: Handle, node: int) -> Iterator[None]:
        nodes.destroy(node)
        yield
        nodes.recreate(node)

    yield Bench(name, config, nodes.shared, running, given, typed, lost=lost)


def instances(nodes: Lab, config: Config) -> Config:
    """The config with the instances that AWS has made, found by their tags: what a launch hands to the head."""
    account = Account()
    metal = Metal(nodes, account)
    theirs(account)
    with aws(account):
        backend = BACKENDS[config.fleet.backend](config)
        assert isinstance(backend, Ec2)
        backend.cloud.make((), lambda *_: None, lambda _: None)
        backend.cloud.await_nodes()
        assert metal.free == []
        return backend.head().located


def of_each(backends: Iterable[str]) -> list[Any]:
    """`make test` tries the contract on this machine; on sshd nodes and over S3 it is tried with the drills."""
    return [
        pytest.param(name, marks=[] if name == "local" else [pytest.mark.thorough])
        for name in sorted(backends)
    ]


@pytest.fixture(scope="module", params=of_each(BACKENDS))
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "python"))
        if request.param in ("batch", "sagemaker"):
            with engine(request.param, folder, patch) as made:
                yield made
            return
        if request.param == "local":
            yield from on_this_machine(folder, patch)
            return
        if request.param == "slurm":
            with lab(2) as nodes, cluster(nodes):
                yield from on_slurm(nodes, patch)
            return
        if request.param not in OURS:  # of another package, which has brought a bench
            yield from install_paths.offered("trainfleet.benches", request.param)(
                folder, sys.modules[__name__]
            )  # type: ignore[operator]
            return
        with lab(2) as nodes:
            yield from on_hosts(request.param, nodes, folder, patch)


@pytest.fixture(autouse=True)
def clean(bench: Bench) -> Iterator[None]:
    yield
    for log in (bench.folder / "runs/probe/logs").glob("*"):
        log.unlink()
    bench.forget()
    assert bench.is_quiet() and not list(bench.folder.rglob("pwned"))


def failing(status: Status) -> dict[int, int]:
    """The nodes whose parts failed: SageMaker tells of these alone, and Slurm then asks the others to leave (SIGTERM)."""
    return {node: code for node, code in status.exits.items() if code not in (0, 143)}


def until(holds: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def is_taken(bench: Bench, request: Request) -> bool:
    """Whether a job is run to its end; a host that has just come back may refuse it."""
    try:
        return bench.until_ended(bench.backend.submit(request)).exits == {0: 0, 1: 0}
    except BackendError:
        return False


def test_exit_codes_come_back_by_node(bench: Bench) -> None:
    handle = bench.backend.submit(bench.plan("exit", "7", "1"))
    status = bench.until_ended(handle)
    assert failing(status) == {1: 7} and status.failed and not status.lost and status.attempt == 1
    bench.backend.stop(handle, at_once=True)


def test_a_job_that_ends_well_is_no_failure(bench: Bench) -> None:
    handle = bench.backend.submit(bench.plan("exit", "0", "0"))
    status = bench.until_ended(handle)
    assert status.exits == {0: 0, 1: 0} and not status.failed and status.phase is Phase.ENDED


def test_stopping_what_has_ended_does_nothing_however_often(bench: Bench) -> None:
    handle = bench.backend.submit(bench.plan("exit", "0", "0"))
    bench.until_ended(handle)
    for at_once in (False, True, True):
        bench.backend.stop(handle, at_once)


def test_a_killed_command_is_told_by_its_signal(bench: Bench) -> None:
    request = bench.plan("die")
    handle = bench.backend.submit(request)
    assert failing(bench.until_ended(handle)) == {1: 137}
    assert "was killed by signal 9" in bench.said(request, 1)


def test_planning_twice_is_planning_once(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0", PROBE_ME="yes")
    assert bench.backend.plan(request.job, {}) == request
    assert [artifact.name for artifact in request.artifacts] == list(bench.artifacts)
    said = request.artifacts[-1].text.replace(
        " \\\n  ", " "
    )  # a checkout with a long path folds the line elsewhere
    assert ("export PROBE_ME=yes" in said and "-- probe exit 0 0" in said) or (
        '"PROBE_ME"' in said and '"exit",' in said
    )


def test_what_was_planned_is_what_runs_byte_for_byte(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0", *bench.hard, torchrun=False)
    bench.until_ended(bench.backend.submit(request))
    assert bench.scripts(request) == [artifact.text for artifact in request.artifacts]


def test_a_script_runs_by_hand(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0", "a word")
    bench.type(1, request)
    assert json.loads(bench.said(request, 1).splitlines()[0].partition(" | ")[2])["words"] == [
        "exit",
        "0",
        "0",
        "a word",
    ]


def test_a_request_comes_through_json_whole(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0", *bench.hard, PROBE_ME="yes").with_environment(
        {"TRAINFLEET_ATTEMPT": "3"}
    )
    again = Request.of(json.loads(json.dumps(request.record())), "here")
    assert again == request and again.token == request.token


def test_each_node_knows_its_placement(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0", PROBE_ME="yes")
    bench.until_ended(bench.backend.submit(request))
    assert [record["node"] for record in bench.records(request)] == ["0", "1"]
    assert all(
        record["nodes"] == "2" and record["given"]["PROBE_ME"] == "yes"
        for record in bench.records(request)
    )


def test_words_and_values_arrive_as_they_are(bench: Bench) -> None:
    environment = {f"PROBE_{number}": word for number, word in enumerate(HARD)}
    request = bench.plan("exit", "0", "0", *bench.hard, **environment)
    bench.until_ended(bench.backend.submit(request))
    for record in bench.records(request):
        assert record["words"][3:] == list(bench.hard)
        assert record["given"] == environment


def test_what_is_of_one_attempt_arrives_and_stands_in_no_script(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0").with_environment({"PROBE_ATTEMPT": "4"})
    bench.until_ended(bench.backend.submit(request))
    assert all(record["given"] == {"PROBE_ATTEMPT": "4"} for record in bench.records(request))
    assert not any("PROBE_ATTEMPT" in script for script in bench.scripts(request))


def test_a_secret_arrives_and_is_nowhere_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = bench.backend.plan(
        replace(bench.plan("tell", "PROBE_KEY").job, secrets=("PROBE_KEY",)), {}
    )
    with pytest.raises(BackendError, match="PROBE_KEY is not set"):
        bench.backend.submit(request)
    monkeypatch.setenv("PROBE_KEY", CANARY)
    handle = bench.backend.submit(request)
    bench.until_ended(handle)
    assert f"it has {len(CANARY)} letters" in bench.said(request, 0)
    kept = (
        json.dumps([request.record(), asdict(handle)])
        + "".join(bench.scripts(request))
        + bench.said(request, 0)
    )
    assert CANARY not in kept


def test_every_line_is_in_the_log_with_its_time(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0")
    bench.until_ended(bench.backend.submit(request))
    for node in (0, 1):
        who, clock, bar, text = bench.said(request, node).splitlines()[0].split(maxsplit=3)
        assert (
            (who, bar) == ("agent", "|")
            and len(clock) == 12
            and json.loads(text)["node"] == str(node)
        )


def test_it_runs_in_the_folder_that_has_the_runs(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0")
    bench.until_ended(bench.backend.submit(request))
    folders = {record["folder"] for record in bench.records(request)}
    if Can.SHARED in bench.backend.can:
        assert folders == {bench.config.fleet.shared_folder or str(bench.folder)}
    else:
        assert len(folders) == 2, "each node has its own"


def test_stopped_at_once_nothing_is_left(bench: Bench) -> None:
    request = bench.plan("stay")
    handle = bench.backend.submit(request)
    bench.until_said(request, '"words"')
    assert bench.backend.status(handle).phase is Phase.RUNNING and len(bench.running()) >= 2
    bench.backend.stop(handle, at_once=True)
    if not bench.backend.is_here:  # by its environment, also what has left the session
        assert bench.is_quiet()
    bench.backend.stop(handle, at_once=True)
    for (
        line
    ) in bench.running():  # on one machine a grandchild that left the session is not followed
        os.kill(int(line.split()[0]), 9)
    time.sleep(0.1)


def test_asked_to_stop_it_may_finish_what_it_does(bench: Bench) -> None:
    request = bench.plan("polite")
    handle = bench.backend.submit(request)
    bench.until_said(request, '"words"')
    bench.backend.stop(handle, at_once=False)
    assert bench.backend.status(handle).phase in (Phase.STOPPING, Phase.ENDED)
    assert bench.until_ended(handle, 20).exits == {0: 0, 1: 0}
    assert "finishing" in bench.said(request, 0)


def test_what_waits_for_machines_says_why_and_can_be_stopped(bench: Bench) -> None:
    """Capacity may never come: nothing is run or paid, the engine's reason is told, and a stop leaves nothing in its queue."""
    if bench.crowded is None:
        return  # its machines are there, or a launch is refused
    with bench.crowded():
        request = bench.plan("exit", "0", "0")
        handle = bench.backend.submit(request)
        until(
            lambda: (
                bench.backend.status(handle).phase is Phase.QUEUED
                and bench.backend.status(handle).reason
            ),
            60,
        )
        assert not bench.running()
        bench.backend.stop(handle, at_once=True)
        bench.until_ended(handle)
    assert not list((bench.folder / "runs/probe/logs").glob("node-*")), "nothing has run"
    again = bench.plan("exit", "0", "0")
    assert bench.until_ended(bench.backend.submit(again)).exits == {0: 0, 1: 0}


def test_a_node_that_is_lost_ends_the_attempt_and_not_the_next_job(bench: Bench) -> None:
    if bench.lost is None:
        return
    request = bench.plan("stay")
    handle = bench.backend.submit(request)
    bench.until_said(request, '"words"')
    node = (
        0 if bench.name == "batch" else 1
    )  # where another is lost, Batch goes on: the ranks' heartbeats decide
    with bench.lost(handle, node):
        until(lambda: (status := bench.backend.status(handle)).failed or status.attempt == 2, 90)
        bench.backend.stop(handle, at_once=True)
    until(lambda: (status := bench.backend.status(handle)).ended or status.lost, 60)
    assert bench.is_quiet(30)
    again = bench.plan("exit", "0", "0")
    until(lambda: is_taken(bench, again), 60)


def test_submitted_twice_it_runs_once(bench: Bench) -> None:
    request = bench.plan("polite")
    handle = bench.backend.submit(request)
    bench.until_said(request, '"words"')
    before = sorted(bench.running())
    assert bench.backend.submit(request) == handle == bench.another().submit(request)
    assert sorted(bench.running()) == before and len(bench.records(request)) == 2
    bench.backend.stop(handle, at_once=False)
    bench.until_ended(handle)
    assert bench.another().submit(request) == handle, "also when it has ended"
    assert len(bench.records(request)) == 2


def test_another_attempt_has_a_token_of_its_own(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0")
    bench.until_ended(bench.backend.submit(request))
    again = bench.backend.plan(replace(request.job, attempt=2), {})
    assert again.token != request.token and replace(request.job, attempt=2) == again.job
    assert bench.until_ended(bench.backend.submit(again)).exits == {0: 0, 1: 0}
    assert len(bench.records(request)) == 4


def test_another_process_attaches_by_what_the_run_folder_holds(
    bench: Bench, tmp_path: Path
) -> None:
    run, request = Run(tmp_path / "probe"), bench.plan("polite")
    save_job(run, bench.backend.submit(request), request)
    bench.until_said(request, '"words"')
    found, other = load_job(run), bench.another()
    assert found is not None and found[1] == request
    status = other.status(found[0])
    assert status.phase is Phase.RUNNING and not status.failed
    other.stop(found[0], at_once=False)
    assert bench.until_ended(found[0], 20, other).exits == {0: 0, 1: 0}


def test_another_process_ends_it_at_once(bench: Bench) -> None:
    request = bench.plan("polite")
    handle = bench.backend.submit(request)
    bench.until_said(request, '"words"')
    other = bench.another()
    other.stop(handle, at_once=True)
    assert bench.is_quiet()
    assert set(bench.until_ended(handle, 20).exits.values()) <= bench.killed
    assert set(bench.until_ended(handle, 20, other).exits.values()) <= bench.killed


def test_a_job_of_another_token_is_not_taken_for_this_one(bench: Bench) -> None:
    request = bench.plan("polite")
    handle = bench.backend.submit(request)
    bench.until_said(request, '"words"')
    stranger = replace(handle, token="0" * 16)
    assert bench.another().status(stranger).ended
    assert bench.backend.status(handle).phase is Phase.RUNNING
    bench.backend.stop(handle, at_once=True)


def test_what_runs_is_found_without_any_handle_and_ended(bench: Bench) -> None:
    request = bench.plan("polite")
    bench.backend.submit(request)
    bench.until_said(request, '"words"')
    other = bench.another()
    handle = other.find(Run(Path("runs/probe")))
    other.stop(handle, at_once=True)
    assert bench.is_quiet() and not other.status(handle).lost


def test_it_ends_with_its_launcher_or_outlives_it_as_declared(bench: Bench) -> None:
    request = bench.plan("polite")
    config = bench.folder / "resolved.yaml"
    config.write_text(dump_resolved(bench.config))
    record = bench.folder / "request.json"
    record.write_text(json.dumps(request.record()))
    launcher = subprocess.Popen(
        [sys.executable, "-c", bench.prelude + LAUNCHER, str(config), str(record)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    handle = Handle(
        **{**(told := json.loads(launcher.stdout.readline())), "hosts": tuple(told["hosts"])}
    )
    bench.until_said(request, '"words"')
    launcher.kill()
    launcher.wait()
    if Can.OUTLIVES in bench.backend.can:
        time.sleep(1.5)
        assert bench.another().status(handle).phase is Phase.RUNNING and len(bench.running()) >= 2
        bench.another().stop(handle, at_once=True)
    status = bench.until_ended(handle, 20, bench.another())
    assert set(status.exits.values()) <= bench.killed
    assert bench.is_quiet(10)


def test_ranks_meet_and_number_the_nodes_in_order(bench: Bench) -> None:
    request = bench.plan("meet", torchrun=True)
    handle = bench.backend.submit(request)
    assert bench.until_ended(handle, 120).exits == {0: 0, 1: 0}, bench.said(request, 0)
    for node in (0, 1):
        assert f"met {node} of 2 at " in bench.said(request, node)
        assert f"rank {node} " in bench.said(request, node)


def test_hosts_are_left_out_where_that_can_be(bench: Bench) -> None:
    request = bench.plan("exit", "0", "0")
    if Can.LEAVE_OUT not in bench.backend.can:
        assert bench.backend.plan(request.job, {"nobody": "it is broken"}) == request
        return
    hosts = request.hosts or bench.places
    with pytest.raises(
        BackendError,
        match=r"the job needs 2 nodes, but only 1 of 2 hosts can take a job\n  (node0|i-[0-9a-f]+): it is broken",
    ):
        bench.backend.plan(request.job, {hosts[0]: "it is broken"})
    one = bench.backend.plan(replace(request.job, nodes=1), {hosts[0]: "it is broken"})
    assert one.hosts == request.hosts[1:]
    if not one.hosts:  # the engine chooses
        assert bench.until_ended(bench.backend.submit(one)).hosts == hosts[1:]


def test_more_nodes_than_there_are_is_refused_before_anything_starts(bench: Bench) -> None:
    if bench.backend.is_here:  # this machine plays as many as it is asked to
        assert len(bench.plan("exit", "0", "0", nodes=3).artifacts) == 3
        return
    said = r"the job needs 3 nodes, but (only 2 of 2 hosts|the queue allows 2)|the job needs 3 x ml\.\S+, but your quota '.*' is 2"
    with pytest.raises(
        BackendError, match=said
    ):  # an engine's own limits are asked for when it is to start
        bench.backend.submit(bench.plan("exit", "0", "0", nodes=3))


@pytest.mark.parametrize(("code", "attempts"), [(AGAIN, 2), (7, 1)])
def test_an_engine_tries_again_by_itself_where_the_exit_code_is_worth_it(
    code: int, attempts: int, bench: Bench
) -> None:
    """Only AWS Batch looks at exit codes: SageMaker at machines, Slurm's script at the run (tests/drills/test_slurm.py)."""
    if bench.name != "batch":
        return
    config = bench.config
    again = replace(
        bench,
        config=replace(
            config, fleet=replace(config.fleet, batch=replace(config.fleet.batch, attempts=3))
        ),
    )
    request = again.plan("again", str(code))
    status = again.until_ended(again.backend.submit(request))
    assert status.attempt == attempts and status.failed == (attempts == 1)
    assert failing(status) == ({0: code} if status.failed else {})
