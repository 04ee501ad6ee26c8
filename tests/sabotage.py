"""A rank that fails with a secret in its exception, in its output and in a child's: by a sitecustomize.py that Python loads itself."""

from __future__ import annotations

from pathlib import Path

LINES = ("-----BEGIN KEY-----", "canaryMIIEvQIBADANBgkq", "canaryhkiG9w0BAQEFAASC", "-----END KEY-----")
SECRETS = {"THE_KEY": "canary-5d1f0c7e", "LONGER_KEY": "canary-5d1f0c7e-and-its-tail", "THE_PEM": "\n".join(LINES)}
NEVER = (b"canary-5d1f0c7e", b"and-its-tail", b"canaryMIIEvQIB", b"canaryhkiG9w0B")
PROGRAM = """
import builtins, os, subprocess, sys
said = builtins.print
def fail(*words, **more):
    said(*words, **more)
    if os.environ.get("RANK") == "1" and words and str(words[0]).startswith("rank 1 of 2 on "):
        key, longer, pem = (os.environ[name] for name in ("THE_KEY", "LONGER_KEY", "THE_PEM"))
        said("with", key, longer, pem, flush=True)
        for part in (longer[:4], longer[4:9], longer[9:], "\\n"):
            sys.stdout.write(part)
            sys.stdout.flush()
        subprocess.run(["sh", "-c", 'echo "$LONGER_KEY and $THE_PEM"'])
        raise ValueError(f"401 for {key}, {longer!r} and {pem}")
builtins.print = fail
"""


def lay(folder: Path) -> Path:
    """The folder, with the sitecustomize.py in it: what has it in its PYTHONPATH fails as rank 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(PROGRAM)
    return folder


def leaks(folder: Path) -> list[Path]:
    """The files below a folder that hold a part of a secret."""
    return [path for path in folder.rglob("*") if path.is_file() and any(part in path.read_bytes() for part in NEVER)]
