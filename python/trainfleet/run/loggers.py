"""Sends metrics to Weights & Biases, MLflow and Trackio (train.loggers).

Each library runs in a separate thread behind a queue, so neither its errors nor a network hang can
affect training. A failure is reported once, in the node's log and as an event. The run folder
always contains all metrics. Each library's environment variables set its destination and key
(WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR ...). fleet.secrets passes these variables to the
nodes.

docs.wandb.ai/ref/python/init, mlflow.org/docs/latest/python_api/mlflow.html,
huggingface.co/docs/trackio
"""

from __future__ import annotations

import importlib
import importlib.util
import netrc
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..process.install_paths import installing_package

PROJECT = "trainfleet"
PATIENCE = 30.0  # timeout in seconds for flushing the queue at the end
MOST = 10_000  # maximum queue length; the oldest items are dropped if it is full
# Parts of metric names that MLflow rejects, for example in a source's path
BAD_NAME = re.compile(r"[^\w/. :-]|(?<=/)\.{1,2}(/|$)|/(?=/)|/$")
Metrics = Mapping[str, float]


class Wandb:
    """Weights & Biases run, which is continued when training resumes."""

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
    """MLflow run, looked up by tag when training resumes."""

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
        known = {BAD_NAME.sub("_", name): value for name, value in metrics.items()}
        self.mlflow.log_metrics(known, step=step)

    def close(self, status: str) -> None:
        self.mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


class Trackio:
    """Trackio run, looked up by name when training resumes."""

    def __init__(self, name: str, identity: str, config: Mapping[str, Any], folder: Path) -> None:
        self.trackio = importlib.import_module("trackio")
        self.trackio.init(project=PROJECT, name=identity, resume="allow", config=dict(config))

    def log(self, step: int, metrics: Metrics) -> None:
        self.trackio.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self.trackio.finish()


SERVICES = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
Failed = Callable[[str, str], None]  # callback with the failed service and the reason


def lack(kind: str) -> str:
    """Returns why a service can't be used from this Python environment, or "" if it can."""
    if importlib.util.find_spec(kind) is None:
        return f"{kind} is not installed: {installing_package(kind)}"
    if (
        kind == "wandb"
        and os.environ.get("WANDB_MODE", "online") == "online"
        and not _has_wandb_key()
    ):
        return (
            "wandb has no API key; export WANDB_API_KEY=..., run wandb login, or export "
            "WANDB_MODE=offline"
        )
    return ""


def _has_wandb_key() -> bool:
    """Returns whether wandb can find an API key.

    Source: docs.wandb.ai/models/track/environment-variables.
    """
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except FileNotFoundError:
        return False
    except (netrc.NetrcParseError, OSError):
        return True  # wandb reports the problem when it starts.


class Logger:
    """Thread and queue that send a run's metrics to one service."""

    def __init__(self, kind: str, connect: Callable[[], Any], failed: Failed) -> None:
        self.kind, self.failed = kind, failed
        self.lines = queue.Queue[tuple[int, Metrics] | str](MOST)
        self.thread = threading.Thread(target=self._work, args=(connect,), daemon=True)
        self.thread.start()

    def put(self, item: tuple[int, Metrics] | str) -> None:
        """Queues a step's metrics or the final status. Drops the oldest item instead of blocking if
        the queue is full.
        """
        while True:
            try:
                self.lines.put_nowait(item)
                return
            except queue.Full:
                self.lines.get_nowait()

    def _work(self, connect: Callable[[], Any]) -> None:
        try:
            service = connect()
            while not isinstance(item := self.lines.get(), str):
                service.log(*item)
            service.close(item)
        # Also catches SystemExit, because a library must not be able to end the run.
        except BaseException as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == self.kind
            why = (
                f"it is not installed: {installing_package(self.kind)}"
                if missing
                else f"{type(error).__name__}: {error}"
            )
            self.tell(f"{' '.join(why.split())[:400]}; training continues without it")

    def tell(self, why: str) -> None:
        """Reports the service's failure in the node's log and through the callback."""
        print(f"logger {self.kind} failed: {why}")
        self.failed(self.kind, why)


class Loggers:
    """All tracking services of a run."""

    def __init__(
        self,
        kinds: Sequence[str],
        name: str,
        identity: str,
        config: Mapping[str, Any],
        folder: Path,
        failed: Failed,
    ) -> None:
        """Opens the services.

        `identity` distinguishes runs that have the same name. `config` maps dotted keys to values.
        """
        self.all = [
            Logger(kind, partial(SERVICES[kind], name, identity, config, folder), failed)
            for kind in kinds
        ]

    def log(self, step: int, metrics: Metrics) -> None:
        for logger in self.all:
            logger.put((step, metrics))

    def close(self, status: str, patience: float = PATIENCE) -> None:
        """Flushes all queues. Abandons a service that does not finish within `patience` seconds."""
        for logger in self.all:
            logger.put(status)
        for logger in self.all:
            logger.thread.join(patience)
            if logger.thread.is_alive():
                logger.tell(
                    f"its last lines were not sent in {patience:.0f} s; they are in metrics.jsonl"
                )
