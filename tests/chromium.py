"""A Chromium that tests drive: pages are opened, clicked, typed into and photographed.

It speaks the DevTools protocol over two pipes, so it needs neither a port nor a library.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest

BROWSER: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_OPTIONS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "--use-mock-keychain"),
)
# The browser reads commands from descriptor 3 and writes answers to 4.
_EXEC: Final = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_LIMIT_S: Final = 20.0


class Page:
    """A tab.

    Attributes:
        messages: what it wrote to its console, and what it could not load.
    """

    def __init__(self, browser: "Browser", target: str, session: str) -> None:
        self.messages: list[str] = []
        self._browser, self._target, self._session = browser, target, session
        browser.listeners[session] = self._note
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol."""
        return self._browser.send(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Go to an address, and wait until it is loaded."""
        with self._loading():
            self.send("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        """Return the value of an expression; promises are waited for."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def find(self, selector: str, text: str = "") -> bool:
        """Return whether there is an element that is seen, with this text in it."""
        return bool(self.run(f"({_FIND})({json.dumps(selector)}, {json.dumps(text)}) !== undefined"))

    def wait(self, selector: str, text: str = "", limit_s: float = _LIMIT_S) -> None:
        """Wait until there is such an element."""
        end_s = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(AssertionError):  # the page is just being left
                if self.find(selector, text):
                    return
            if time.monotonic() > end_s:
                shown = self.run("document.body.innerText")[:1500]
                raise AssertionError(f"no {selector} with {text!r} after {limit_s} s on:\n{shown}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """Return the text of the first such element."""
        return cast(str, self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str, text: str = "", *, leaves: bool = True) -> None:
        """Click with the mouse; waits for the next page if that `leaves` this one."""
        self.wait(selector, text)
        place = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center', behavior: 'instant'}}); const r ="
            " e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })"
            f"(({_FIND})({json.dumps(selector)}, {json.dumps(text)}))"
        )
        with self._loading() if leaves else contextlib.nullcontext():
            for kind in ("mousePressed", "mouseReleased"):
                self.send(
                    "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1
                )

    def type(self, selector: str, text: str) -> None:
        """Write into a field, instead of what was there."""
        self.run(
            f"(e => {{ e.focus(); e.select && e.select() }})(document.querySelector({json.dumps(selector)}))"
        )
        self.send("Input.insertText", text=text)

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Choose files in a field for them."""
        field = self.send("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        names = [str(path) for path in paths]
        self.send("DOM.setFileInputFiles", files=names, objectId=field["result"]["objectId"])

    def choose(self, selector: str, value: str) -> None:
        """Choose a value of a list."""
        self.run(
            f"(e => {{ e.value = {json.dumps(value)};"
            " e.dispatchEvent(new Event('change', {bubbles: true})) })"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def press(self, key: str, *, leaves: bool = False) -> None:
        """Press a key, such as `Tab` or `Enter`."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        with self._loading() if leaves else contextlib.nullcontext():
            for kind in ("keyDown", "keyUp"):
                self.send(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    windowsVirtualKeyCode=codes[key],
                    text=text if kind == "keyDown" else "",
                )

    def set_view(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """Set the size of the window and the system's theme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def photograph(self, path: Path, *, whole: bool = True) -> None:
        """Write the `whole` page, or what is in the window, as PNG."""
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        """Close the tab."""
        self._browser.send("Target.closeTarget", targetId=self._target)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        loaded = threading.Event()
        self._on_load = loaded.set
        yield
        assert loaded.wait(_LIMIT_S), "the page was not loaded"
        self._on_load = _nothing

    _on_load: Callable[[], None] = staticmethod(lambda: None)

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._on_load()
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(one.get("value", one)) for one in parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            entry = parameters["entry"]
            self.messages.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")


_FIND: Final = """(selector, text) => [...document.querySelectorAll(selector)].find(
  e => e.checkVisibility() && e.textContent.replace(/\\s+/g, ' ').includes(text))"""


def _nothing() -> None:
    pass


class Browser:
    """A running Chromium; ends with the `with` block."""

    def __init__(self, folder: Path) -> None:
        """Start it with a profile of its own in `folder`."""
        assert BROWSER is not None
        self.listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._numbers = itertools.count(1)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _EXEC, str(to_read), str(to_write)),
                *(BROWSER, *_OPTIONS, f"--user-data-dir={folder / 'profile'}"),
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AssertionError):
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(10)
        os.close(self._to)

    def new_page(self) -> Page:
        """Return a tab with cookies of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, target, session)

    def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        with self._news:
            assert self._news.wait_for(lambda: number in self._answers, _LIMIT_S), f"no answer to {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return cast("dict[str, Any]", answer["result"])

    def _read(self) -> None:
        with os.fdopen(self._from, "rb") as stream:
            rest = b""
            while part := stream.read1(1 << 20):
                *whole, rest = (rest + part).split(b"\0")
                for message in whole:
                    self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            with self._news:
                self._answers[message["id"]] = message
                self._news.notify_all()
        elif listener := self.listeners.get(message.get("sessionId", "")):
            listener(message["method"], message["params"])


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Yield a browser for all tests of a run."""
    if BROWSER is None:
        pytest.skip("no chromium on PATH")
    with Browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running
