"""A real browser for tests: Debian's Chromium, spoken to through a pipe in its own protocol.

Messages are JSON with a zero byte behind each (--remote-debugging-pipe): no port, no web socket, no other package. What
the page asks for, and what it says on its console, arrives as events that are kept.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import need

SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-dev-shm-usage --hide-scrollbars "
    "--remote-debugging-pipe"
).split()
PATIENCE = 60.0  # seconds for an answer
TROUBLE = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


def chromium() -> str:
    """The browser; skips the test where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    need("browser", path is not None, "chromium was not found: apt install chromium")
    return str(path)


class Browser:
    """One tab of a browser."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read, self.rest, self.number, self.session = write, read, b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        answer = self.wait(lambda found: found.get("id") == self.number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def wait(self, wanted: Any) -> dict[str, Any]:
        """The next message that is wanted; events are kept on the way."""
        deadline = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self.rest:
                text, _, self.rest = self.rest.partition(b"\0")
                found = json.loads(text)
                if "method" in found:
                    self.events.append(found)
                if wanted(found):
                    return dict(found)
            ready, _, _ = select.select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self.read, 1 << 20) if ready else b""
            if not piece:
                raise TimeoutError("the browser does not answer")
            self.rest += piece

    def open(self, page: Path, width: int, height: int = 800, scheme: str = "light", media: str = "") -> None:
        """Load a page from its file on a screen of that width; what was heard of an earlier one is forgotten."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.wait(lambda found: found.get("method") == "Page.loadEventFired")
        self.run("Promise.all([...document.images].map(i => i.decode().catch(() => 0)))")

    def run(self, script: str) -> Any:
        """The value of a script in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """What stands on the console: messages, errors, and what was refused or not found."""
        return [json.dumps(event["params"])[:3000] for event in self.events if event["method"] in TROUBLE]

    def addresses(self) -> list[str]:
        """What the page asked for, but for what it holds itself."""
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith("data:")]

    def screenshot(self, out: Path, whole: bool = False) -> None:
        """A picture of what is seen, or of the whole page."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        out.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser of its own, with an empty profile in a folder of the test."""
    program = chromium()
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'  # the browser reads from 3 and writes to 4
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *SWITCHES, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(profile)},
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(ours_out)
        os.close(ours_in)
