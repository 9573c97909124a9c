"""Take the pictures of the page: python docs/make_screenshots.py RUN (needs playwright and Chromium)

The page of the run is written as one file and opened 1,280 pixels wide, in the light.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

from tailrace.cli import main as tailrace

FOLDER = Path(__file__).parent / "images"
CHROMIUM = "/usr/bin/chromium"
WIDTH, COLOURS = 1280, 96
HEIGHTS = {"overview": 860, "timeline": 760}
DRAWN = "window.tailrace?.draws > 1 && ({view} !== 'timeline' || tailrace.windows > 0)"


def main(run: str) -> None:
    with TemporaryDirectory() as scratch, sync_playwright() as playwright:
        path = Path(scratch) / "page.html"
        if tailrace(["view", run, "--output", str(path)]):
            sys.exit(2)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for view, height in HEIGHTS.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": height})
            page.goto(f"{path.as_uri()}#/{view}")
            page.wait_for_function(DRAWN.format(view=repr(view)))
            page.wait_for_timeout(500)
            page.screenshot(path=path.with_suffix(".png"))
            picture = FOLDER / f"page_{view}.png"
            with Image.open(path.with_suffix(".png")) as image:
                image.convert("RGB").quantize(COLOURS).save(picture, optimize=True)
            print(f"{picture.relative_to(FOLDER.parent.parent)}  {picture.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
