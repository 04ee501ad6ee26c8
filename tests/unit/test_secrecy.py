"""Secrets that nobody has named: by their variable's name and by their form, whole and in pieces; and ordinary text, untouched."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from trainfleet.config import Settings, load
from trainfleet.process.node_log import Log, say
from trainfleet.run.run_folder import Run
from trainfleet.trust import redaction, safe_output
from trainfleet.trust.errors import ConfigError, RunError, tell
from trainfleet.trust.redaction import hide

OF_VARIABLES = {
    "WANDB_API_KEY": "wandbCANARY00112233",
    "AWS_ACCESS_KEY_ID": "AKIACANARY00",
    "AWS_SECRET_ACCESS_KEY": "awsCANARYsecret/+=Zz",
    "AWS_SESSION_TOKEN": "sessCANARYtoken0123/+",
    "MY_OWN_SECRET": "mineCANARY-in-words",
    "DATABASE_PASSWORD": 'CANARY "quoted" & more',
}
CANARIES = {  # what somebody might print → the secret in it
    "AKIACANARY3456723456": "AKIACANARY3456723456",
    "key ASIACANARY3456723456.": "ASIACANARY3456723456",
    "token hf_CANARYabcdefghijklmnop": "hf_CANARYabcdefghijklmnop",
    "sk-proj-CANARY_9a8b7c6d5e4f3a2b1c": "sk-proj-CANARY_9a8b7c6d5e4f3a2b1c",
    "Incorrect API key provided: sk-ant-api03-CANARYx9a8b7c6d5e4f": "CANARYx9a8b7c6d5e4f",
    "ghp_CANARY0123456789abcdef0123456789": "CANARY0123456789",
    "github_pat_11CANARY_0123456789abcdefghijkl": "11CANARY_0123",
    "xoxb-123456789012-CANARYabcdef": "CANARYabcdef",
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=CANARY%2F2026&X-Amz-Date=20260101T000000Z": "CANARY%2F2026",
    "401 for https://x/?X-Amz-Signature=CANARY0123456789abcdef&t=1": "CANARY0123456789abcdef",
    "'X-Amz-Security-Token': b'CANARYIQoJb3JpZ2luX2Vj//8='": "CANARYIQoJb3JpZ2luX2Vj//8=",
    "https://x/?x-amz-security-token=CANARYFwoGZXIvYXdz%2B": "CANARYFwoGZXIvYXdz",
    "https%3A%2F%2Fx%3FX-Amz-Signature%3DCANARY0123": "CANARY0123",
    "https://c.blob.core.windows.net/d?sv=2024&sig=CANARYabc%3D": "CANARYabc%3D",
    "Authorization: Bearer CANARYtokenvalue": "CANARYtokenvalue",
    "'authorization': 'Basic Q0FOQVJZQ0FOQVJZ'": "Q0FOQVJZQ0FOQVJZ",
    f"AWS4-HMAC-SHA256 Credential=x, SignedHeaders=host, Signature={'0ca4a57' * 9}1": "0ca4a57",
    "aws_secret_access_key = CANARYwJalrXUtnFEMI/K7MDENG": "CANARYwJalrXUtnFEMI",
    '{"SecretAccessKey": "CANARYwJalrXUtnFEMI/K7MDENG"}': "CANARYwJalrXUtnFEMI",
    "export OTHER_HOSTS_TOKEN=CANARYabcdefgh": "CANARYabcdefgh",
    "wandb: ERROR API key: ca4a5700000000000000000000000000000ca4a5": "ca4a5700000000000000000000000000000ca4a5",
    "http://me:CANARY@proxy:3128/simple": "CANARY",
    "postgresql://me:CANARYword@db.internal/x": "CANARYword",
    "https://CANARYghtoken@github.com/a/b": "CANARYghtoken",
}
ORDINARY = [
    "step 99 of 4,000 · loss 2.3051 · 17,312 tokens/s · lr 3e-4 · 00:12 left",
    "commit a3caa76ee5cf0afc1a2b3c4d5e6f708192a3b4c5d of trainfleet",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "runs/first-run/checkpoints/step-00000100/committed.json",
    "hf://roneneldan/TinyStories and hf_hub_download, hf_transfer",
    "s3://my-bucket/prefix, ssh://me@host, git@github.com:a/b, https://index.example/simple, http://127.0.0.1:8642/?token=abcdefghijkl",
    "fleet.secrets=[HF_TOKEN, WANDB_API_KEY]; next: export HF_TOKEN=...",
    "TRAINFLEET_TOKEN=0123456789abcdef is the job's",
    "SSH_PRIVATE_KEY=/home/me/.ssh/id_ed25519, GIT_KEY=$HOME/key, A_KEY=${B_KEY}, THE_KEY=<yours>",
    "sk-learn-style-estimators-are-not-used, sk-container-id-1-text-repr-fallback",
    "KeyError: 'model.layers.0.self_attn.k_proj.weight'; TOKENIZERS_PARALLELISM=false",
    "data.sources: [text]; the signature is (self, *, path); basic characterization of bearers",
    "arn:aws:iam::123456789012:role/train-execution i-0abcdef1234567890 vpc-0a1b2c3d4e5f67890",
    "wandb: Run history: https://wandb.ai/me/p/runs/1a2b3c4d",
    "torch 2.13.0+cpu, numpy 2.3.4, CUDA 13.0, key=value pairs, token=<|endoftext|>",
]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(redaction.NAMES, raising=False)
    for name, value in OF_VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("text", "secret"), CANARIES.items())
def test_a_secret_is_known_by_its_form(text: str, secret: str) -> None:
    assert secret in text, "the case is wrong"
    assert secret not in hide(text) and "***" in hide(text) and redaction.looks_secret(text)
    assert secret not in hide(json.dumps({"message": text})) and secret not in hide(
        repr(ValueError(text))
    )


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert hide(text) == text and hide(f"rank 0 | {text}\n") == f"rank 0 | {text}\n"


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("value", OF_VARIABLES.values())
def test_a_secret_is_known_by_its_variables_name(value: str) -> None:
    for spelt in (value, json.dumps(value), repr(value), quote(value, safe=""),
                  base64.b64encode(value.encode()).decode(), base64.b64encode(f"user:{value}".encode()).decode()):  # fmt: skip
        assert "CANARY" not in hide(f"failed: {spelt}!") and "***" in hide(spelt), spelt


def test_a_variable_that_takes_another_s_place_is_known_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORDINARY", "x")
    assert hide("mineCANARY-in-words") == "mineCANARY-in-words"
    monkeypatch.delenv("ORDINARY")
    monkeypatch.setenv("MY_API_KEY", "mineCANARY-in-words")
    assert hide("mineCANARY-in-words") == "***"


def test_what_is_no_secret_for_its_variables_name_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GIT_SSH_KEY", str(tmp_path))
    monkeypatch.setenv("SORT_KEY", "loss")
    monkeypatch.setenv("TRAINFLEET_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("MINISIGN_PUBLIC_KEY", "RWTpublicpublicpublic")
    text = f"{tmp_path} loss 0123456789abcdef RWTpublicpublicpublic"
    assert hide(text) == text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
@pytest.mark.parametrize(("text", "secret"), CANARIES.items())
def test_a_secret_that_is_cut_at_the_borders_of_writes_is_hidden(
    text: str, secret: str, size: int
) -> None:
    behind = io.StringIO()
    stream = safe_output.SafeStream(behind)
    whole = f"one line\n{text}\nand another\n"
    for start in range(0, len(whole), size):
        stream.write(whole[start : start + size])
        stream.flush()
        assert secret not in behind.getvalue()
    stream.release()
    assert behind.getvalue() == hide(whole)


@pytest.mark.usefixtures("variables")
def test_canaries_are_in_no_file_and_on_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "; ".join((*CANARIES, *OF_VARIABLES.values()))
    run, log = Run(tmp_path / "run"), Log(tmp_path / "run/logs/node-0.log")
    run.record("fault", error="ValueError", message=words, traceback=[words])
    run.update_results(status="failed", sample={"prompt": words, "text": words})
    log.note("node", words)
    log.close()
    say(log.path, words)
    tell(RunError(words, why=words, next=words))
    left = [
        capsys.readouterr().err,
        *(path.read_text() for path in run.folder.rglob("*") if path.is_file()),
    ]
    assert len(left) == 4
    for text in left:
        assert not [secret for secret in (*CANARIES.values(), "CANARY") if secret in text]


@pytest.mark.parametrize("text", list(CANARIES)[2:11])
def test_a_config_that_holds_a_secret_is_refused_and_does_not_show_it(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"name": "x", "data": {"sources": ["stdlib", text]}})
    )
    with pytest.raises(
        ConfigError, match=r"config.yaml:\d+: data.sources: looks like a secret"
    ) as told:
        load(Settings(tmp_path / "config.yaml"))
    assert CANARIES[text] not in hide(str(told.value))


def test_a_rank_prints_what_it_should_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real supervisor over a real process that prints every canary, as a log of a node has it."""
    monkeypatch.setenv("WANDB_API_KEY", OF_VARIABLES["WANDB_API_KEY"])
    program = f"import os; print({list(CANARIES)!r}, os.environ['WANDB_API_KEY']); raise RuntimeError(os.environ['WANDB_API_KEY'])"
    log = tmp_path / "run/logs/node-0.log"
    words = [
        sys.executable,
        "-m",
        "trainfleet.node.supervisor",
        str(log),
        "--",
        sys.executable,
        "-c",
        program,
    ]
    assert subprocess.run(words, check=False, capture_output=True, timeout=60).returncode == 1
    said = log.read_text()
    assert "RuntimeError: ***" in said and not [
        secret for secret in (*CANARIES.values(), "CANARY") if secret in said
    ]
