"""A save to S3 with a fault at each of its requests in turn: `python faults_s3.py FOLDER` prints what came of it.

The server is moto's, in a process of its own that outlives those it strikes. Of the requests that change something, the n-th
kills      the process that saves: before the server hears of it (`lost`), or when it has done it and not answered (`done`)
is busy    503 once, as S3 answers while it splits a prefix: the save must not notice
is away    503 from then on: the save fails, says so, and leaves nothing in sight; the next one, with the server back, is whole
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from faults import build, forked, join, save, values

from trainfleet.checkpoints.store import NAME
from trainfleet.config import Config, Settings, load
from trainfleet.engine.checkpoint import Checkpoints
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.process.processes import die_with_parent
from trainfleet.run.run_folder import Run
from trainfleet.storage import s3
from trainfleet.trust.errors import TrainfleetError

CONFIG = """
name: drill
data: {sources: [text], vocab_size: 300}
model: {layers: 1, hidden_size: 8, heads: 2, kv_heads: 1, intermediate_size: 8}
checkpoint: {every: 4, keep: 2, path: "s3://bucket/some"}
"""
KINDS = ("lost", "done", "busy", "away")
PART = 4096  # bytes: so that this small state goes in parts
BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Server:
    """S3, with the fault that the last request to /fault asked for."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application, self.lock = application, threading.Lock()
        self.kind, self.at, self.process, self.names = "", 0, 0, list[str]()

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environment["PATH_INFO"], environment["REQUEST_METHOD"]
        if path.startswith("/fault/"):
            told = json.dumps(self.names).encode()
            _, _, self.kind, at, process = path.split("/")
            self.at, self.process, self.names = int(at), int(process), []
            start("200 OK", [("Content-Length", str(len(told)))])
            return [told]
        with self.lock:
            number = len(self.names)
            if changes := method in ("PUT", "POST", "DELETE"):
                self.names.append(
                    f"{method} {path.rpartition('/')[2]} {environment['QUERY_STRING'][:10]}".strip()
                )
        struck = changes and number == self.at
        if (struck and self.kind == "busy") or (self.kind == "away" and len(self.names) > self.at):
            start(
                "503 Slow Down",
                [("Content-Type", "application/xml"), ("Content-Length", str(len(BUSY)))],
            )
            return [BUSY]
        if struck and self.kind == "lost":
            os.kill(self.process, signal.SIGKILL)
            start("500 Nobody Listens", [("Content-Length", "0")])
            return []
        answer = self.application(environment, start)
        if struck and self.kind == "done":
            os.kill(self.process, signal.SIGKILL)
        return answer


def serve(port: int) -> None:
    """Tells `port`, a pipe, where it listens; never returns."""
    die_with_parent()
    import moto.s3.models
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1  # S3's is 5 MiB
    WSGIRequestHandler.log_request = lambda *_: None  # type: ignore[method-assign, assignment]
    serving = make_server(
        "127.0.0.1", 0, Server(DomainDispatcherApplication(create_backend_app)), threaded=True
    )
    os.write(port, str(serving.port).encode())
    serving.serve_forever()


def order(kind: str, at: int) -> list[str]:
    """Sets the fault for this process from here on; the requests that changed something since the order before."""
    url = f"{os.environ['AWS_ENDPOINT_URL']}/fault/{kind}/{at}/{os.getpid()}"
    return list(json.loads(urllib.request.urlopen(url).read()))


def strike(run: Run, config: Config, kind: str, at: int) -> None:
    """Two good checkpoints, step 12 with the fault, and step 16 without it when the process lives; `said.json` tells."""
    checkpoints, (model, optimizer) = Checkpoints(run, config, "tokens", join()), build()
    for step in (4, 8):
        save(checkpoints, model, optimizer, step)
        checkpoints.settle()
    order(kind, at)
    save(checkpoints, model, optimizer, 12)
    error = ""
    try:
        checkpoints.settle()
    except TrainfleetError as raised:
        error = str(raised)
    names = order("none", 0)
    said = {"requests": names, "error": error, "visible": checkpoints.store.steps()}
    (run.folder / "said.json").write_text(json.dumps(said))
    if at < len(names):
        save(checkpoints, model, optimizer, 16)
        checkpoints.settle()


def judge(run: Run, config: Config) -> None:
    """What was in sight before the resume, byte for byte, and what the resume found, to `found.json`."""
    order("none", 0)
    checkpoints, (model, optimizer) = Checkpoints(run, config, "tokens", join()), build()
    store = checkpoints.store
    assert store.files.remote
    seen = {step: store.read(step).files for step in store.steps()}
    faults = [
        text
        for step, files in seen.items()
        for name, file in files.items()
        if (text := store.damage(step, name, file))
    ]
    progress = checkpoints.resume(TorchParts(model, optimizer))
    kept = {
        f"{NAME.search(found.address.split('/')[-2])[0]}"
        for found in s3.list_objects(store.files.describe(""))
    }  # type: ignore[index]
    left = sorted(kept - {f"step-{step:08d}" for step in store.steps()}) + s3._pages(
        "list_multipart_uploads", "Uploads", store.files.describe("")
    )
    found = {
        "step": progress.step,
        "values": sorted(values(model, optimizer)),
        "faults": faults,
        "left": list(map(str, left)),
    }
    (run.folder / "found.json").write_text(json.dumps(found))


def case(folder: Path, config: Config, kind: str, at: int) -> tuple[list[str], list[str]]:
    """What is wrong after a fault at request `at` of a save, and the save's requests."""
    run = Run(folder / f"{kind}-{at}")
    run.folder.mkdir()
    code = forked(strike, run, config, kind, at)
    said = (
        json.loads((run.folder / "said.json").read_text())
        if code == 0
        else {"requests": [], "error": "", "visible": []}
    )
    if forked(judge, run, config):
        return [f"{kind} at {at}: the resume failed"], said["requests"]
    found = json.loads((run.folder / "found.json").read_text())
    struck, killed = at < len(said["requests"]), code == -signal.SIGKILL
    wrong = []
    if killed != (kind in ("lost", "done") and at < 10**6) or (code and not killed):
        wrong.append(f"the save ended with {code}")
    if found["step"] not in ({8, 12} if killed else {16} if struck else {12}) or found[
        "values"
    ] != [float(found["step"])]:
        wrong.append(f"resumed at {found['step']} with {found['values']}")
    if found["faults"] or found["left"]:
        wrong.append(f"half-seen: {found['faults']}, left behind: {found['left']}")
    if kind == "busy" and (said["error"] or said["visible"] != [8, 12]):
        wrong.append(f"a busy server failed the save: {said['error']}")
    if kind == "away" and struck and not said["error"]:
        wrong.append("a save failed and nobody said so")
    if kind == "away" and struck and "can't commit" in said["error"] and 12 in said["visible"]:
        wrong.append("a save failed and is in sight")
    return [f"{kind} at {at}: {text}" for text in wrong], said["requests"]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    reader, writer = os.pipe()
    if os.fork() == 0:
        serve(writer)
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{os.read(reader, 9).decode()}", "AWS_MAX_ATTEMPTS": "2",
                   "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
    s3.PART = PART
    build()  # imports, once for all forks, what torch imports late
    (folder / "config.yaml").write_text(CONFIG)
    config, _ = load(Settings(folder / "config.yaml"))
    s3.client().create_bucket(Bucket="bucket")
    wrong, requests = case(folder, config, "busy", 10**6)
    cases = [(kind, at) for kind in KINDS for at in range(len(requests))]
    for kind, at in cases:
        wrong += case(folder, config, kind, at)[0]
    print(json.dumps({"cases": len(cases), "requests": requests, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
