"""A headless Chromium that is driven over its debugging pipe: pages, clicks, pictures, and what its console says."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from requirement import need_program

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
         "--hide-scrollbars", "--no-first-run", "--force-color-profile=srgb")  # fmt: skip
LONGEST = 30.0  # seconds for one answer


class Browser:
    """One tab. `said` collects everything that the console, the page's errors and its policy say."""

    def __init__(self, profile: Path) -> None:
        program = need_program("chromium", "apt-get install -y --no-install-recommends chromium")
        theirs, self.ours = os.pipe()
        self.hears, writes = os.pipe()

        def prepare() -> None:  # it reads from descriptor 3 and writes to 4
            reads, says = os.dup(theirs), os.dup(writes)
            os.dup2(reads, 3)
            os.dup2(says, 4)

        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"], pass_fds=(3, 4, theirs, writes),
            preexec_fn=prepare, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(theirs)
        os.close(writes)
        self.numbers, self.rest, self.session = itertools.count(1), b"", ""
        self.said: list[str] = []
        pages = [
            one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page"
        ]
        target = {"targetId": pages[0]["targetId"], "flatten": True}
        self.session = self.ask("Target.attachToTarget", **target)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.hears)

    def ask(self, method: str, **words: Any) -> Any:
        """The result of one command; events that come before it are noted."""
        number = next(self.numbers)
        order = {"id": number, "method": method, "params": words}
        order |= {"sessionId": self.session} if self.session else {}
        os.write(self.ours, json.dumps(order).encode() + b"\0")
        until = time.monotonic() + LONGEST
        while (answer := self._next(until)).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.rest:
            assert select.select([self.hears], [], [], max(0.0, until - time.monotonic()))[0], (
                "no answer"
            )
            self.rest += os.read(self.hears, 1 << 20)
        line, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        words = event.get("params", {})
        if event.get("method") in (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
        ):
            self.said.append(json.dumps(words)[:500])

    def show(self, width: int, height: int = 900, dark: bool = False) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def eval(self, code: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, code: str, seconds: float = 15.0) -> float:
        """Waits until an expression is true; the seconds that it took."""
        began = time.monotonic()
        while not self.eval(code):
            assert time.monotonic() - began < seconds, code
            time.sleep(0.02)
        return time.monotonic() - began

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.ask("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, query: str) -> None:
        self.eval(f"document.querySelector({json.dumps(query)}).click()")

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))
