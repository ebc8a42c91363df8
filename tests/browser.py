"""What tests of pages read them with: a parser that minds the balance of tags, and Chromium, where there is one."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import zlib
from html.parser import HTMLParser

VOID = ("meta", "br")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
WIDTHS = {"desktop": 1280, "phone": 375}
COMPLAINTS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.requestWillBeSent")
# elements with text of their own that is too pale for the nearest ground behind it, by WCAG 2.2
PALE = r"""(() => {
  const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = text => {
    const [r, g, b] = text.match(/[\d.]+/g).map(Number).map(c => linear(c / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = element => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (!/, 0\)$/.test(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const speaks = element => [...element.childNodes].some(node => node.nodeType == 3 && node.data.trim());
  const contrast = element => {
    const [ink, back] = [light(getComputedStyle(element).color), light(ground(element))];
    return (Math.max(ink, back) + .05) / (Math.min(ink, back) + .05);
  };
  return [...document.querySelectorAll('.jaxpar *:not(style, svg *)')].filter(speaks)
    .filter(element => !(contrast(element) >= 4.5)).map(element => element.outerHTML.slice(0, 120));
})()"""
# elements that reach out of the page to the right, but for what stands in a box that scrolls
CUT = r"""(() => {
  const scrolls = element => getComputedStyle(element.closest('.jx-scroll') ?? document.body).overflowX == 'auto';
  const edge = document.documentElement.clientWidth + 1;
  return [...document.querySelectorAll('.jaxpar *:not(svg *)')]
    .filter(element => element.getBoundingClientRect().right > edge && !scrolls(element))
    .map(element => element.outerHTML.slice(0, 120));
})()"""
OPEN = "document.querySelectorAll('details').forEach(each => each.open = true)"


class Reader(HTMLParser):
    """Reads text and attributes, and notes what is not balanced."""

    def __init__(self, html):
        super().__init__()
        self.open, self.wrong, self.text, self.attributes, self.tags = [], [], [], [], []
        self.feed(html)
        self.close()
        self.wrong += [f"<{name}> is never closed" for name in self.open]

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        names = [name for name, _ in attrs]
        self.wrong += [f"<{tag}> has two {name}" for name in {*names} if names.count(name) > 1]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def said(self):
        return "\n".join(self.text)


class Browser:
    """Chromium at the end of a pipe, in the DevTools protocol: one JSON text after the other, with NUL between."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        wiring = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", wiring, "", CHROMIUM, *FLAGS.split(), f"--user-data-dir={self.folder.name}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},  # it has its own allocator
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.to, self.back = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb", 0)
        self.numbers, self.session, self.said, self.rest = itertools.count(1), {}, [], b""
        self.watchdog = threading.Timer(90, self.process.kill)
        self.watchdog.start()
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.watchdog.cancel()
        self.to.close()
        self.back.close()
        self.process.terminate()
        self.process.wait(20)
        self.folder.cleanup()

    def hear(self):
        while b"\0" not in self.rest:
            more = os.read(self.back.fileno(), 1 << 20)
            assert more, f"{CHROMIUM} ended, or was ended after 90 s"
            self.rest += more
        first, self.rest = self.rest.split(b"\0", 1)
        return json.loads(first)

    def call(self, method, **parameters):
        number = next(self.numbers)
        self.to.write(
            json.dumps({"id": number, "method": method, "params": parameters} | self.session).encode() + b"\0"
        )
        while (heard := self.hear()).get("id") != number:
            self.said.append(heard)
        assert "error" not in heard, (method, heard)
        return heard["result"]

    def show(self, file, *, width, theme, medium="screen"):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", media=medium, features=[scheme])
        self.said.clear()
        self.call("Page.navigate", url=file.as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self.said):
            self.said.append(self.hear())

    def ask(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self, file):
        own = file.as_uri()
        said = [each for each in self.said if each.get("method") in COMPLAINTS]
        return [each for each in said if each["params"].get("request", {}).get("url") != own]

    def picture(self, file):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def paper(self, file):
        printed = self.call("Page.printToPDF", preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69)
        file.write_bytes(base64.b64decode(printed["data"]))


def shades(picture):
    """Returns how many different bytes the pixels of a PNG file have."""
    data = picture.read_bytes()
    at, packed = 8, b""
    while at < len(data):
        length = int.from_bytes(data[at : at + 4])
        packed += data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    return len({*zlib.decompress(packed)})
