"""Chromium without a window, driven by its DevTools protocol: enough to open a page, read its text,
take a picture.
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S, ANSWER_S = 30.0, 30.0


def installed() -> str:
    """Path of a browser, or ""."""
    return next((found for name in NAMES if (found := shutil.which(name))), "")


class Page:
    """One page 1600 x 1000 pixels large. `headers` go with every request."""

    def __init__(self, folder: Path, headers: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [
                installed(),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "--window-size=1600,1000",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        word, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
        while not (word.is_file() and word.read_text().strip()):
            assert self.process.poll() is None and time.monotonic() < deadline, (
                "the browser did not start"
            )
            time.sleep(0.1)
        port = word.read_text().split()[0]
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/json/list", timeout=ANSWER_S
        ) as answer:
            target = next(t for t in json.load(answer) if t["type"] == "page")
        self.socket = connect(target["webSocketDebuggerUrl"], max_size=None, open_timeout=ANSWER_S)
        self.ids = itertools.count(1)
        self.ask("Network.enable")
        self.ask("Network.setExtraHTTPHeaders", headers=headers)
        self.ask("Page.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.ids)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads(self.socket.recv(timeout=ANSWER_S))
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)

    def text(self) -> str:
        return self.ask("Runtime.evaluate", expression="document.body?.innerText ?? ''")["result"][
            "value"
        ]

    def picture(self) -> bytes:
        """PNG"""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(timeout=20)
