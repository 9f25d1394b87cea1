"""Debian's Chromium, without a window, spoken to over a pipe in its DevTools protocol: no driver, no package, no port."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
KEYS = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
SECONDS = 120.0  # for any answer: the machine may be busy


def _pipe() -> tuple[int, int]:
    """Return the two ends of a pipe, well away from the descriptors that the browser uses."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


class Browser:
    """One browser with one page. `events` are all messages that were no answers."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._folder = tempfile.mkdtemp(prefix="onnx-gconv-chromium-")
        (read_commands, self._commands), (self._answers, write_answers) = _pipe(), _pipe()

        def connect() -> None:  # the browser reads descriptor 3 and writes descriptor 4
            os.dup2(read_commands, 3)
            os.dup2(write_answers, 4)

        # Popen has a pipe of its own, which must not be at 3 or 4 either: these take the lowest free numbers.
        taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
        self._process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (read_commands, write_answers, *taken):
            os.close(end)
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._commands)  # it ends when nobody can command it any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, page: Path, *, width: int, dark: bool = False, height: int = 900) -> None:
        """Load the page in a window of this width."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < until, f"{page} did not load"
            self.run("1")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, *, text: str = "") -> None:
        """Press and release one key; `text` is what it types, which only some keys do."""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **typed)

    def wait(self, script: str) -> bool:
        """Return whether the expression becomes true; scrolling, for one, takes its time."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            if self.run(script):
                return True
            time.sleep(0.05)
        return False

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Return what the page had to complain about, on the console and elsewhere."""
        found = []
        for event in self.events:
            if event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning", "assert"):
                found.append(str(event["params"]["args"]))
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                found.append(str(event["params"]["entry"]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for; data inside the page itself is not a request."""
        sent = [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], SECONDS)
            assert ready, "the browser does not answer"
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser has ended"
            self._unread += piece
        message, self._unread = self._unread.split(b"\0", 1)
        return dict(json.loads(message))
