"""A headless Chromium, told what to do over a pipe (the DevTools protocol)."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LIMIT_S = 30.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--lang=en-US",
)


def find_chromium() -> str | None:
    """Returns the program that CHROMIUM names, or the first that is installed."""
    names = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else _NAMES
    return next((path for name in names if (path := shutil.which(name))), None)


class Tab:
    """A page that is open.

    Attributes:
        complaints: What the console printed, errors that nobody caught, and addresses that the page
            asked for besides its own.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._text = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, dark: bool = False) -> None:
        """Opens a file and waits until it is loaded."""
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self.complaints.clear()
        self._call("Page.navigate", url=path.as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def resize(self, width: int | None) -> None:
        """Makes the window as wide; None gives it its first size back."""
        if width is None:
            self._call("Emulation.clearDeviceMetricsOverride")
        else:
            sizes = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            self._call("Emulation.setDeviceMetricsOverride", **sizes)

    def value(self, script: str) -> Any:
        """Returns the value of an expression, once it is there if it is a promise."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key such as ArrowRight."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def type(self, text: str) -> None:
        """Writes text into what has the focus."""
        self._call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Clicks on the middle of an element."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _LIMIT_S
        while b"\0" not in self._text:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {_LIMIT_S:g} s"
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium ended"
            self._text += read
        text, _, self._text = self._text.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(json.dumps(given))
            case "Network.requestWillBeSent":
                if not given["request"]["url"].startswith("file:"):
                    self.complaints.append(f"asks for {given['request']['url']}")
        return message


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[Tab]:
    """Starts a Chromium with an empty page, and ends it."""
    read_requests, requests = os.pipe()
    answers, write_answers = os.pipe()

    def as_three_and_four() -> None:
        # Copies at first: either may be 3 or 4 itself.
        copies = [os.dup(end) for end in (read_requests, write_answers)]
        for copy, wanted in zip(copies, (3, 4), strict=True):
            os.dup2(copy, wanted)
            os.set_inheritable(wanted, True)

    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=False,
            preexec_fn=as_three_and_four,
            env={**os.environ, "LANG": "en_US.UTF-8", "LC_ALL": "en_US.UTF-8"},
        )
        os.close(read_requests)
        os.close(write_answers)
        try:
            yield Tab(requests, answers)
        finally:
            process.kill()
            process.wait()
            os.close(requests)
            os.close(answers)
