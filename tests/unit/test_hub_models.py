"""Models and tokenizers by their name on the Hub: a pretended Hub on the loopback interface, the real client library and its cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from trainfleet.config.addresses import fault_of

ROOT = Path(__file__).parents[2]
COMMIT = "1" * 40
SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 320, "max_position_embeddings": 64, "rope_theta": 10000.0,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}  # fmt: skip
WORDS = {"<|endoftext|>": 0} | {chr(code): code for code in range(1, 300)}
TOKENIZER = Tokenizer(BPE(WORDS, [])).to_str()
FILES = {"config.json": json.dumps(SHAPE).encode(), "tokenizer.json": TOKENIZER.encode(), "modeling.py": b"raise SystemExit",
         "pytorch_model.bin": b"a pickle"}  # fmt: skip
CONFIG = "name: x\nmodel: {preset: 'hf://me/small'}\ndata: {tokenizer: 'hf://me/small', sources: [text.txt]}\ntrain: {sequence_length: 32}\n"


class Hub(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if path.startswith("/api/models/me/small"):
            files = [
                {
                    "rfilename": name,
                    "type": "file",
                    "path": name,
                    "size": len(text),
                    "oid": hashlib.sha1(text).hexdigest(),
                }
                for name, text in FILES.items()
            ]
            self.answer(
                json.dumps(
                    files
                    if "/tree/" in path
                    else {"id": "me/small", "sha": COMMIT, "siblings": files}
                ).encode()
            )
        elif path.startswith("/me/small/resolve/") and (name := path.rpartition("/")[2]) in FILES:
            self.answer(FILES[name])
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, text: bytes) -> None:
        self.send_response(200)
        for key, value in (("Content-Length", len(text)), ("X-Repo-Commit", COMMIT), ("ETag", f'"{hashlib.sha1(text).hexdigest()}"'),
                           ("Content-Type", "application/json")):  # fmt: skip
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)

    def log_message(self, format: str, *words: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def plan(desk: Path, server: ThreadingHTTPServer, **more: str) -> tuple[int, str]:
    given = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(desk / "cache"),
        "PYTHONPATH": str(ROOT / "python"),
    }
    done = subprocess.run([sys.executable, "-m", "trainfleet", "plan"], cwd=desk, env=os.environ | given | more, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_shape_and_a_tokenizer_come_from_the_hub_once_and_then_from_the_cache(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("abc")
    code, said = plan(tmp_path, hub)
    assert code == 0 and "model.hidden_size" in said and "48" in said, said
    assert "/me/small/resolve/" + COMMIT + "/config.json" in Hub.asked
    assert not any(path.endswith((".py", ".bin")) for path in Hub.asked)  # no code, no pickle
    Hub.asked.clear()
    code, said = plan(tmp_path, hub, HF_HUB_OFFLINE="1")
    assert code == 0 and not Hub.asked, said


def test_without_a_network_and_a_cache_it_is_refused_with_what_to_do(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("me/small", "me/other"))
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        code, said = plan(tmp_path, hub, **more)
        assert (
            code == 2
            and "config.yaml:2: model.preset: hf://me/other: can't be downloaded from the Hub"
            in said
        ), said
        assert (
            "data.tokenizer: hf://me/other: can't be downloaded" in said and "Traceback" not in said
        )


@pytest.mark.parametrize(
    "address",
    [
        "hf://",
        "hf://me",
        "hf://me/a/b",
        "hf://../etc",
        "hf://me/..",
        "hf://me/a@",
        "hf://me/a@x/y",
        "hf:///etc",
    ],
)
def test_what_names_no_model_is_told_so(address: str) -> None:
    assert "is not a model address" in fault_of(address)


def test_a_name_with_a_revision_is_one() -> None:
    assert fault_of("hf://meta-llama/Llama-3.2-1B@4e20de362430cd3b72f300e6b0f18e50e7166e08") == ""
