"""A headless Chromium, driven over its pipe: JSON messages, each ended by a zero byte.

The protocol is Chromium's DevTools protocol; nothing has to be installed but the browser.
"""

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

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 180


def executable() -> str | None:
    """Where a Chromium is, if there is one; $CHROMIUM goes before."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab.

    Attributes:
        complaints: what the console said of errors and refusals, and scripts that failed.
        requests: every address that the page asked for.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._buffer, self._count = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._from, 1 << 16) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._buffer += chunk
        first, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path) -> float:
        """Load a file; the seconds until it was drawn."""
        start = time.monotonic()
        self.send("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.readyState === 'complete'")
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - start

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        done = self.send(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never became true: {condition}")
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """What can be read in each element that a selector finds."""
        found: list[str] = self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
        )
        return found

    def click(self, selector: str, which: int = 0) -> None:
        self.run(f"document.querySelectorAll({json.dumps(selector)})[{which}].click()")

    def type(self, selector: str, value: str) -> None:
        """Put a value into a field, as typing does."""
        self.run(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); "
            f"field.value = {json.dumps(value)}; "
            "for (const name of ['input', 'change']) "
            "field.dispatchEvent(new Event(name, {bubbles: true})) })()"
        )

    def look_like(self, width: int, height: int, theme: str = "light", media: str = "") -> None:
        """The size of the window, the theme, and whether it is being printed."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        content = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(content))


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, whose profile is in a folder."""
    found = executable()
    assert found is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # The browser reads messages at 3 and writes them at 4.
    words = 'exec "$0" "$@" 3<&{} 4>&{}'.format(theirs_in, theirs_out)  # noqa: UP032
    flags = [
        *("--headless", "--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-sandbox"),
        *("--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    ]
    process = subprocess.Popen(
        ["bash", "-c", words, found, *flags],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait(SECONDS)
        os.close(ours_out)
        os.close(ours_in)
