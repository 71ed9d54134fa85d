"""A real browser without a window, driven by the DevTools protocol over two pipes. It knows no part of Potluck."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
ANSWER_S = 30.0


class Browser:
    """One page. `faults` are errors in its console, `requests` the addresses that it asked for."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp(prefix="potluck-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        # The shell gives chromium its pipes as 3 and 4, whatever numbers they have here, and leaves it: it starts
        # and ends processes as it likes, which are no leaks of a test. It ends with its pipes.
        command = f'"$@" 3<&{to_read} 4>&{to_write} &'
        shell = subprocess.Popen(
            ["bash", "-c", command, "-", CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
            start_new_session=True,
        )
        self._group = shell.pid
        shell.wait(10)
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.faults: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self._read, self._write):
            os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until it has painted."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.faults.clear()
        self.requests.clear()
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert not failed, failed
        painted = "performance.getEntriesByName('first-contentful-paint').length > 0"
        self.until(f"document.readyState === 'complete' && {painted}")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, deadline_s: float = 20.0) -> float:
        """Wait for an expression to be true; returns the seconds it took."""
        began = time.monotonic()
        while not self.value(expression):
            assert time.monotonic() - began < deadline_s, f"not within {deadline_s} s: {expression}"
            time.sleep(0.03)
        return time.monotonic() - began

    def text(self, selector: str = "body") -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A screenshot as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.faults.append(json.dumps(event["params"]["exceptionDetails"]))
            case "Log.entryAdded" if event["params"]["entry"]["level"] in ("error", "warning"):
                self.faults.append(json.dumps(event["params"]["entry"]))
            case "Runtime.consoleAPICalled" if event["params"]["type"] in ("error", "warning", "assert"):
                self.faults.append(json.dumps(event["params"]["args"]))
