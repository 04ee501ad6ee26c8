"""Sends metrics to Weights & Biases, MLflow and Trackio (train.loggers).

Each library runs in a separate thread behind a queue, so that neither its errors nor a hanging
network reach training. A failure is reported once, in the node's log and as an event; the run's own
files have every line in any case. The libraries' own environment variables configure destination
and key (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR ...); fleet.secrets passes them to the nodes.

docs.wandb.ai/ref/python/init, mlflow.org/docs/latest/python_api/mlflow.html,
huggingface.co/docs/trackio
"""

from __future__ import annotations

import importlib
import importlib.util
import netrc
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..process.install_paths import installing_package

PROJECT = "trainfleet"
PATIENCE = 30.0  # seconds for the last lines to be sent at the end
MOST = 10_000  # lines that wait for a service: then the oldest are dropped
Metrics = Mapping[str, float]


class Service(Protocol):
    """A tracking service, opened for one run."""

    def log(self, step: int, metrics: Metrics) -> None: ...
    def close(self, status: str) -> None: ...


class Wandb:
    """A run of Weights & Biases, which a resume continues."""

    def __init__(self, name: str, identity: str, config: Mapping[str, Any], folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(
            project=PROJECT,
            name=name,
            id=identity,
            resume="allow",
            config=dict(config),
            dir=str(folder),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self.run.finish(exit_code=0 if status in ("finished", "stopped") else 1)


class Mlflow:
    """A run of MLflow, found again by its tag."""

    def __init__(self, name: str, identity: str, config: Mapping[str, Any], folder: Path) -> None:
        self.mlflow = importlib.import_module("mlflow")
        self.mlflow.set_experiment(PROJECT)
        found = self.mlflow.search_runs(
            filter_string=f"tags.trainfleet = '{identity}'", output_format="list"
        )
        known = found[0].info.run_id if found else None
        self.mlflow.start_run(run_id=known, run_name=name, tags={"trainfleet": identity})
        if not known:
            self.mlflow.log_params({key: str(value)[:500] for key, value in config.items()})

    def log(self, step: int, metrics: Metrics) -> None:
        self.mlflow.log_metrics(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self.mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


class Trackio:
    """A run of Trackio, found again by its name."""

    def __init__(self, name: str, identity: str, config: Mapping[str, Any], folder: Path) -> None:
        self.trackio = importlib.import_module("trackio")
        self.trackio.init(project=PROJECT, name=identity, resume="allow", config=dict(config))

    def log(self, step: int, metrics: Metrics) -> None:
        self.trackio.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self.trackio.finish()


SERVICES: dict[str, Callable[[str, str, Mapping[str, Any], Path], Service]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


Failed = Callable[[str, str], None]  # takes the service that gets no more lines, and why


def lack(kind: str) -> str:
    """Returns why this Python can't open a service in this environment; "" if it may."""
    if importlib.util.find_spec(kind) is None:
        return f"{kind} is not installed: {installing_package(kind)}"
    if (
        kind == "wandb"
        and os.environ.get("WANDB_MODE", "online") == "online"
        and not _has_wandb_key()
    ):
        return (
            "wandb has no key: export WANDB_API_KEY=..., or wandb login, or export "
            "WANDB_MODE=offline"
        )
    return ""


def _has_wandb_key() -> bool:
    """Tells whether wandb finds a key where it looks for one:
    docs.wandb.ai/models/track/environment-variables.
    """
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except FileNotFoundError:
        return False
    except (netrc.NetrcParseError, OSError):
        return True  # wandb itself says what is wrong with it


class Logger:
    """One service of a run, in its thread."""

    def __init__(
        self,
        kind: str,
        name: str,
        identity: str,
        config: Mapping[str, Any],
        folder: Path,
        failed: Failed,
    ) -> None:
        self.kind, self.failed, self.lines = (
            kind,
            failed,
            queue.Queue[tuple[int, Metrics] | str](MOST),
        )
        self.thread = threading.Thread(
            target=self._work, args=(name, identity, config, folder), daemon=True
        )
        self.thread.start()

    def put(self, item: tuple[int, Metrics] | str) -> None:
        """Hands a line over, or the status at the end; never waits."""
        while True:
            try:
                self.lines.put_nowait(item)
                return
            except queue.Full:
                self.lines.get_nowait()

    def _work(self, name: str, identity: str, config: Mapping[str, Any], folder: Path) -> None:
        try:
            service: Service = SERVICES[self.kind](name, identity, config, folder)
            while not isinstance(item := self.lines.get(), str):
                service.log(*item)
            service.close(item)
        except BaseException as error:  # SystemExit too: whatever a library does, the run continues
            missing = isinstance(error, ModuleNotFoundError) and error.name == self.kind
            why = (
                f"it is not installed: {installing_package(self.kind)}"
                if missing
                else f"{type(error).__name__}: {error}"
            )
            self.tell(f"{' '.join(why.split())[:400]}; training continues without it")

    def tell(self, why: str) -> None:
        """Says in the node's log, and to whoever opened it, that the service gets no more lines."""
        print(f"logger {self.kind} has failed: {why}", flush=True)
        self.failed(self.kind, why)


class Loggers:
    """All services of a run."""

    def __init__(
        self,
        kinds: Sequence[str],
        name: str,
        identity: str,
        config: Mapping[str, Any],
        folder: Path,
        failed: Failed,
    ) -> None:
        """`identity` distinguishes the run from others of its name; `config`: dotted keys and their
        values.
        """
        self.all = [Logger(kind, name, identity, config, folder, failed) for kind in kinds]

    def log(self, step: int, metrics: Metrics) -> None:
        for logger in self.all:
            logger.put((step, metrics))

    def close(self, status: str, patience: float = PATIENCE) -> None:
        """Flushes every queue; a service that does not answer is abandoned after `patience`
        seconds.
        """
        for logger in self.all:
            logger.put(status)
        for logger in self.all:
            logger.thread.join(patience)
            if logger.thread.is_alive():
                logger.tell(
                    f"it has not sent its last lines in {patience:.0f} s; they are in metrics.jsonl"
                )
