"""A headless Chromium, driven over its debugging pipe. This needs no package and no port."""
import json
import os
import shutil
import subprocess
import threading
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking --no-first-run "
         "--remote-debugging-pipe").split()


class Chromium:
    def __init__(self, profile):
        here, theirs = os.pipe(), os.pipe()               # it reads from file descriptor 3 and writes to 4
        start = f'exec "$0" "$@" 3<&{here[0]} 4>&{theirs[1]}'
        words = ["bash", "-c", start, FOUND, *FLAGS, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(words, pass_fds=(here[0], theirs[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(here[0]), os.close(theirs[1])
        self.watch = threading.Timer(600, self.process.kill)                       # so that no read waits for ever
        self.watch.start()
        self.to, self.out, self.number, self.events, self.session = here[1], os.fdopen(theirs[0], "rb"), 0, [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        os.write(self.to, json.dumps(dict(id=self.number, method=method, params=params, **self.session)).encode() + b"\0")
        while True:
            message = self.receive()
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def receive(self):
        text = bytearray()
        while (byte := self.out.read(1)) != b"\0":
            assert byte, "Chromium ended"
            text += byte
        return json.loads(text)

    def run(self, script):
        """Evaluate an expression and return its value. If it is a promise, wait and return what it resolves to."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, path, state=""):
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"file://{path}#{state}")
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def visit(self, url):
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.protocol !== 'about:'")

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.05)

    def screen(self, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value="dark" if dark else "light")])

    def press(self, key):
        named = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Enter": 13, "End": 35, "Home": 36, "Escape": 27}
        text = {"text": "\r" if key == "Enter" else key} if key not in named or key == "Enter" else {}
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            code = named.get(key, ord(key[0]))
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def complaints(self, ours="file:"):
        """Return the errors, the warnings, and the URLs that were fetched from anywhere but `ours`."""
        errors = "Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"
        found = [e["params"] for e in self.events if e["method"] in errors]
        # the request for /answer is refused on purpose
        found = [one for one in found if not one.get("entry", {}).get("url", "").endswith("/answer")]
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return found + [url for url in asked if not url.startswith((ours, "blob:", "data:", "about:"))]

    def stop(self):
        self.session = {}
        self.call("Browser.close")
        self.process.wait(60)
        self.watch.cancel()
