"""A headless Chromium, spoken to over a pipe in its DevTools protocol: no driver and no package beside the browser.

Found as the tests of Slurm find theirs: by its command. `.ci/run` installs it with apt.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 120.0


def command() -> str | None:
    return next((found for name in COMMANDS if (found := shutil.which(name))), None)


class Page:
    """A tab. errors: what its console said was wrong; requests: every address that it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.loads = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def hear(self, event: dict[str, Any]) -> None:
        of = event["params"]
        match event["method"]:
            case "Runtime.exceptionThrown":
                details = of["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if of["type"] in ("error", "warning", "assert"):
                self.errors.append(f"{of['type']}: " + " ".join(str(a.get("value")) for a in of["args"]))
            case "Log.entryAdded" if of["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{of['entry']['source']}: {of['entry']['text']}")
            case "Page.loadEventFired":
                self.loads += 1
            case "Network.requestWillBeSent":
                self.requests.append(of["request"]["url"])

    def open(self, path: pathlib.Path, then: str = "") -> None:
        """Opens a file and waits until its script has run. then: behind the # of its address."""
        before = self.loads
        self.call("Page.navigate", url=path.resolve().as_uri() + then)
        self.await_load(before + 1)

    def await_load(self, number: int) -> None:
        """Waits until the page has loaded so many times in all, and its script has run."""
        while self.loads < number:
            self._browser.hear()
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise's when it is kept."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (
                f"never came true in {TIMEOUT_S:g} s: {condition}; console: {self.errors}"
            )
            time.sleep(0.05)

    def screenshot(self) -> bytes:
        """PNG of what is seen."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._browser.forget(self._session)


class Browser:
    """The process. Messages are JSON that a zero byte ends, on the file descriptors 3 and 4 of the browser."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number, self._buffer = 0, b""
        self._pages: dict[str, Page] = {}

    def page(self, width: int = 1200, height: int = 900) -> Page:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return page

    def forget(self, session: str) -> None:
        self.call("Page.close", {}, session)
        self._pages.pop(session)

    def call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while (answer := self.hear()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def hear(self) -> dict[str, Any]:
        """The next message, an event of a page given to that."""
        message = self._next()
        if "method" in message and (page := self._pages.get(message.get("sessionId", ""))) is not None:
            page.hear(message)
        return message

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], TIMEOUT_S)
            assert ready, f"the browser said nothing for {TIMEOUT_S:g} s"
            read = os.read(self._back, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def running() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the context."""
    found = command()
    assert found is not None
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
        # descriptors may be 3 and 4 here already, in the other order: a shell moves them in the new process
        words = ["bash", "-c", f'exec 8<&{to_read} 9>&{back_write}; exec 3<&8 4>&9; exec "$@"', "bash", found]
        process = subprocess.Popen(
            [*words, *flags, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_read, back_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(back_write)
        try:
            yield Browser(to_write, back_read)
        finally:
            os.close(to_write)  # a browser whose pipe is closed ends
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(back_read)


def main(page: str, picture: str) -> None:
    """Makes docs/images/report.png: `python -m tests.report.browser runs/arithmetic-grpo/report/index.html PNG`."""
    import PIL.Image

    with running() as browser:
        tab = browser.page(1180, 760)
        tab.open(pathlib.Path(page), "#" + urllib.parse.quote(json.dumps({"smooth": 0.8})))
        tab.js("[...document.querySelectorAll('h2')].find((h) => h.innerText === 'Reward').scrollIntoView()")
        tab.js("window.scrollBy(0, -60)")
        tab.wait("[...document.querySelectorAll('[data-chart^=reward] .js-line')].length >= 4")
        assert not tab.errors, tab.errors
        image = PIL.Image.open(io.BytesIO(tab.screenshot()))
    image.quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
