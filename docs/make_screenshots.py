"""Take the pictures of the pages: python docs/make_screenshots.py FOLDER (needs playwright and Chromium)

FOLDER is that of a run, whose page is written as one file and opened 1,280 pixels wide, in the light; or what
`make playground` wrote, which is opened on a screen in the light, and on a phone in the dark.
"""

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent / "images"
CHROMIUM = "/usr/bin/chromium"
WIDTH, COLOURS = 1280, 96
HEIGHTS = {"overview": 860, "timeline": 760}
DRAWN = "window.tailrace?.draws > 1 && ({view} !== 'timeline' || tailrace.windows > 0)"
SCREENS = {"screen": (1400, 820, "light"), "phone": (420, 900, "dark")}


def main(folder: str) -> None:
    with sync_playwright() as playwright, TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        if (Path(folder) / "first.json").exists():
            with served(folder) as address:
                of_playground(browser, address, Path(scratch))
        else:
            of_run(browser, folder, Path(scratch))
        browser.close()


def of_run(browser: Any, run: str, scratch: Path) -> None:
    path = scratch / "page.html"
    # In a process of its own: playwright has an event loop in this one.
    subprocess.run([sys.executable, "-m", "tailrace.cli", "view", run, "--output", str(path)], check=True)
    for view, height in HEIGHTS.items():
        page = browser.new_page(viewport={"width": WIDTH, "height": height})
        page.goto(f"{path.as_uri()}#/{view}")
        page.wait_for_function(DRAWN.format(view=repr(view)))
        keep(page, f"page_{view}", scratch)


def of_playground(browser: Any, address: str, scratch: Path) -> None:
    for screen, (width, height, scheme) in SCREENS.items():
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(address)
        while not page.evaluate("Boolean(window.playground?.answers && playground.simulator.isReady)"):
            page.wait_for_timeout(100)
        keep(page, f"playground_{screen}", scratch)


def keep(page: Any, name: str, scratch: Path) -> None:
    """Take a picture of what is seen, and shrink it."""
    taken, picture = scratch / "taken.png", FOLDER / f"{name}.png"
    page.wait_for_timeout(500)
    page.screenshot(path=taken)
    with Image.open(taken) as image:
        image.convert("RGB").quantize(COLOURS).save(picture, optimize=True)
    print(f"{picture.relative_to(FOLDER.parent.parent)}  {picture.stat().st_size / 1000:.0f} kB")
    page.close()


@contextmanager
def served(folder: str) -> Iterator[str]:
    """The address of the files of a folder."""
    files = functools.partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
