"""A headless Chromium that tests open pages in, move the mouse in, and ask what there is."""

import asyncio
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from tornado.websocket import WebSocketClientConnection, websocket_connect

COMMAND = shutil.which("chromium") or shutil.which("google-chrome")
LIMIT_SECONDS = 100.0


@final
class Page:
    """One page, by Chrome's DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: WebSocketClientConnection) -> None:
        self._loop = loop
        self._connection = connection
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        """Errors of the page's scripts, and of its console."""
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        return self._run(self._send(method, parameters))

    def open(self, path: Path) -> None:
        """Open a file, and return when it has loaded."""
        self.send("Page.navigate", url=path.as_uri())
        self.wait_until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Return when an expression is true."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)

    def move_mouse(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, LIMIT_SECONDS))

    async def _send(self, method: str, parameters: dict[str, Any]) -> Any:
        number = next(self._numbers)
        await self._connection.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            text = await self._connection.read_message()
            assert text is not None, "the browser closed the connection"
            message = json.loads(text)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        found = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(found["exceptionDetails"])[:500])
        elif event["method"] == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(found["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and found["type"] == "error":
            self.errors.append(str(found["args"]))


@contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """Start the browser and give its first page."""
    assert COMMAND is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--remote-debugging-port=0"]
    process = subprocess.Popen([COMMAND, *flags, f"--user-data-dir={profile}"], stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    try:
        connection = loop.run_until_complete(_connect(_address(profile, process)))
        yield Page(loop, connection)
    finally:
        process.kill()
        process.wait()
        loop.close()


async def _connect(address: str) -> WebSocketClientConnection:
    return await websocket_connect(address, max_message_size=1 << 26)


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + LIMIT_SECONDS
    place = profile / "DevToolsActivePort"
    while not (place.exists() and place.read_text().count("\n")):
        assert process.poll() is None, "the browser has ended"
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.02)
    port = place.read_text().split("\n")[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        [page] = [each for each in json.load(answer) if each["type"] == "page"]
    return str(page["webSocketDebuggerUrl"])
