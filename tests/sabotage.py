"""A rank that fails with a secret in its exception, in its output and in a child's: by a sitecustomize.py that Python loads itself."""

from __future__ import annotations

from pathlib import Path

LINES = (
    "-----BEGIN KEY-----",
    "canaryMIIEvQIBADANBgkq",
    "canaryhkiG9w0BAQEFAASC",
    "-----END KEY-----",
)
SECRETS = {
    "THE_KEY": "canary-5d1f0c7e",
    "LONGER_KEY": "canary-5d1f0c7e-and-its-tail",
    "THE_PEM": "\n".join(LINES),
}
MARK = "unseen7b2e91d4"  # in each secret that no config names
UNNAMED = {
    "WANDB_API_KEY": f"{MARK}{'0' * 26}",
    "AWS_SECRET_ACCESS_KEY": f"{MARK}/{'x' * 25}",
    "DB_PASSWORD": f"{MARK}-word",
}
NEVER = (b"canary-5d1f0c7e", b"and-its-tail", b"canaryMIIEvQIB", b"canaryhkiG9w0B", MARK.encode())
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
        mark = "".join(("unseen", "7b2e91d4"))  # this program's own file holds it nowhere
        unnamed = [value for value in os.environ.values() if value.startswith(mark)]
        forms = [f"hf_{mark}abcdefghij", f"https://b.s3.amazonaws.com/k?X-Amz-Signature={mark}0123", f"https://me:{mark}@host/x",
                 f"Authorization: Bearer {mark}XY0123456789", f"OTHER_TOKEN={mark}"]
        said(*unnamed, *forms, len(unnamed), "that nobody names", flush=True)
        raise ValueError(f"401 for {key}, {longer!r} and {pem}; {unnamed} {forms}")
builtins.print = fail
"""


def lay(folder: Path) -> Path:
    """The folder, with the sitecustomize.py in it: what has it in its PYTHONPATH fails as rank 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(PROGRAM)
    return folder


def leaks(folder: Path) -> list[Path]:
    """The files below a folder that hold a part of a secret."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(part in path.read_bytes() for part in NEVER)
    ]
