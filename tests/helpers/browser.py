"""A page in the system's headless Chromium."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium: apt-get install chromium")


@contextmanager
def chromium(switches: Sequence[str]) -> Iterator[Any]:
    """A browser with the switches. The test is skipped without playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=list(switches))
        yield launched
        launched.close()


def wait_for(page: Any, condition: str, said: Sequence[str], seconds: int) -> None:
    """Wait for a JavaScript expression. Playwright's own wait needs a page that may evaluate texts. `said`:
    what the page has written to the console."""
    for _ in range(10 * seconds):
        if page.evaluate(f"Boolean({condition})"):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{condition}: {said}")
