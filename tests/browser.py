"""Headless Chromium, driven over a pipe by its DevTools protocol: what a person sees of a page."""

import base64
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
from urllib.parse import urlsplit

import pytest

_UNPACKED = Path(__file__).parent.parent / ".data" / "chromium" / "run"
_SECONDS = 30.0
"""How long Chromium may take for anything."""


def find_chromium() -> str:
    """Find what tests/chromium.sh has seen to, or skip the test."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    for name in (*names, str(_UNPACKED)):
        if found := shutil.which(name):
            return found
    pytest.skip("there is no Chromium: `make test` gets Debian's where there is apt-get")


@contextmanager
def opened_browser(profile: Path) -> Iterator["Browser"]:
    """Start Chromium with an empty profile, and end it."""
    chromium = find_chromium()
    its_commands, commands = os.pipe()
    answers, its_answers = os.pipe()
    with subprocess.Popen(
        [
            *("bash", "-c", f'exec "$0" "$@" 3<&{its_commands} 4>&{its_answers}', chromium),
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-quic", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
            "about:blank",
        ],
        pass_fds=(its_commands, its_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(its_commands)
        os.close(its_answers)
        try:
            yield Browser(commands, answers)
        finally:
            process.kill()
            os.close(commands)
            os.close(answers)


class Browser:
    """One tab, in which pages run no script: those of the service need none."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        (target,) = (each["targetId"] for each in targets if each["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setScriptExecutionDisabled", value=True)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Become a screen of so many pixels, on which people like it light or dark."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        self._events_of("Page.loadEventFired", forget=True)
        self._call("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")

    def type(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.read(f"document.querySelector({json.dumps(selector)}).focus()")
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        """Send the form whose field has the focus, and wait for the page that answers."""
        self._events_of("Page.loadEventFired", forget=True)
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, **key)
        self._wait_for("Page.loadEventFired")

    def read(self, expression: str) -> Any:
        """Evaluate JavaScript of the test's own and return what it gives, as JSON."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The visible texts of all elements."""
        return list(
            self.read(
                f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
            )
        )

    def picture(self) -> bytes:
        """The whole page as a PNG."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    @property
    def errors(self) -> list[Any]:
        """The console's errors, such as what the page's policy refused or what was not found."""
        entries = [event["entry"] for event in self._events_of("Log.entryAdded")]
        return [
            *(entry for entry in entries if entry["level"] == "error"),
            *self._events_of("Runtime.exceptionThrown"),
            *self._events_of("Network.loadingFailed"),
        ]

    @property
    def requested_hosts(self) -> set[str]:
        """Whom all requests so far went to; the browser's own pictures are in it (data:)."""
        requests = self._events_of("Network.requestWillBeSent")
        addresses = [urlsplit(event["request"]["url"]) for event in requests]
        return {address.netloc for address in addresses if address.scheme != "data"}

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                result: dict[str, Any] = message["result"]
                return result

    def _wait_for(self, method: str) -> None:
        while not self._events_of(method):
            self._receive()

    def _events_of(self, method: str, *, forget: bool = False) -> list[dict[str, Any]]:
        found = [event["params"] for event in self._events if event["method"] == method]
        if forget:
            self._events = [event for event in self._events if event["method"] != method]
        return found

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select(
                [self._answers], [], [], max(deadline - time.monotonic(), 0)
            )
            assert ready, "Chromium does not answer"
            part = os.read(self._answers, 1 << 16)
            assert part, "Chromium has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message
