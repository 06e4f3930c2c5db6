"""Drive Chromium through its debugging pipe, without a package: open a page, press keys, look at it."""
import base64
import json
import os
import subprocess
from itertools import count

FLAGS = ("--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --hide-scrollbars "
         "--disable-dev-shm-usage --remote-debugging-pipe")


class Browser:
    """One page. `noted` has what it wrote to the console, exceptions too; `requested` the addresses that it asked for."""
    def __init__(self, folder, width=1280, height=900):
        to_read, their_write = os.pipe()
        their_read, to_write = os.pipe()
        # Chromium reads commands from file 3 and writes to file 4
        command = f"exec chromium {FLAGS} --user-data-dir={folder}/profile 3<&{their_read} 4>&{their_write}"
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(their_read, their_write), stderr=subprocess.DEVNULL)
        os.close(their_read)
        os.close(their_write)
        self.reader, self.writer = os.fdopen(to_read, "rb"), os.fdopen(to_write, "wb")
        self.numbers, self.session, self.rest, self.noted, self.requested = count(1), None, b"", [], []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(width, height)
        self.scheme("light")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def message(self):
        while b"\0" not in self.rest:
            more = os.read(self.reader.fileno(), 1 << 16)
            assert more, "Chromium has ended"
            self.rest += more
        one, _, self.rest = self.rest.partition(b"\0")
        return json.loads(one)

    def ask(self, method, **params):
        """Send a command, and note what happens until its answer."""
        number = next(self.numbers)
        command = dict(id=number, method=method, params=params) | (dict(sessionId=self.session) if self.session else {})
        self.writer.write(json.dumps(command).encode() + b"\0")
        self.writer.flush()
        while True:
            said = self.message()
            self.note(said.get("method"), said.get("params", {}))
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    def note(self, method, params):
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.noted.append(params)
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def resize(self, width, height):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def scheme(self, name):
        self.ask("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value=name)])

    def open(self, address):
        self.ask("Page.navigate", url=address)
        return self.wait_for("document.readyState === 'complete'")

    def value(self, expression):
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression):
        """Wait until an expression is true, and return it."""
        return self.value(f"new Promise(done => {{ const look = () => {{ const now = {expression}; "
                          "now ? done(now) : setTimeout(look, 50); }; look(); })")

    def press(self, key, times=1):
        codes = dict(ArrowRight=39, ArrowLeft=37, Tab=9, Enter=13, End=35, Home=36)
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                text = dict(text="\r") if key == "Enter" and kind == "keyDown" else {}
                self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def picture(self, path, whole=True):
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
