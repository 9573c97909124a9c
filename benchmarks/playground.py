"""The playground's simulator in Chromium, beside the same in Python: seconds for four schedules.

    make playground; python benchmarks/playground.py [--repeats 5] [--json F]

Eight engines, 256 samples, and `serial`, `rolloutpipe`, `april` and `tailrace`. Both answer equal questions,
in turn, on one machine; the first round is a warm-up. The ratio is that of the medians of the wall time, and
of the least times, to which other processes on the machine can only add. The times to the first picture and
until Python has started are those of one page.
"""

import functools
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
from playwright.sync_api import sync_playwright

from common import run, write
from tailrace.extras.playground.command import BUILT
from tailrace.extras.playground.simulation import answered

CHROMIUM = "/usr/bin/chromium"
SCHEDULES = ("serial", "rolloutpipe", "april", "tailrace")
ROUNDS = {"run.rounds": 2}
"""Of 128 samples."""
ASK = """async (questions) => {
    const begun = performance.now(), answers = [];
    for (const each of questions) answers.push(await playground.simulator.ask(each));
    return [(performance.now() - begun) / 1000, answers.map((each) => each.events)];
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


def main(*, repeats: int = 5, json: Path | None = None) -> None:
    """Print the seconds of both, and their ratio.

    Args:
        repeats: rounds that count.
        json: a file for the results.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(BUILT)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        begun = time.perf_counter()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        waited_s = {
            name: _until(page, what, begun)
            for name, what in (
                ("first_picture_s", "window.playground?.answers"),
                ("python_s", "playground.simulator.isReady"),
            )
        }
        page.evaluate("playground.simulator.answerMs = 300000")
        questions = page.evaluate(
            "(names) => names.map((name) => playground.setUp.question(name, null))", SCHEDULES
        )
        for each in questions:
            each["settings"] |= ROUNDS
        rows = [_round(page, questions) for _ in range(repeats + 1)][1:]
        browser.close()
    server.shutdown()
    here, there = ([row[name] for row in rows] for name in ("python_s", "browser_s"))
    found = {
        "schedules": SCHEDULES,
        **{f"start/{name}": seconds for name, seconds in waited_s.items()},
        "rounds": rows,
        "ratio_of_medians": statistics.median(there) / statistics.median(here),
        "ratio_of_least": min(there) / min(here),
    }
    print(f"Python    {statistics.median(here):.2f} s (least {min(here):.2f})")
    print(f"browser   {statistics.median(there):.2f} s (least {min(there):.2f})")
    print(f"ratio     {found['ratio_of_medians']:.2f} of medians, {found['ratio_of_least']:.2f} of the least")
    print(f"page      first picture {waited_s['first_picture_s']:.1f} s, Python {waited_s['python_s']:.1f} s")
    write(json, found)


def _until(page: Any, condition: str, begun: float) -> float:
    while not page.evaluate(f"Boolean({condition})"):
        page.wait_for_timeout(20)
    return time.perf_counter() - begun


def _round(page: Any, questions: list[Any]) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as other:  # this thread has the loop of playwright
        python_s, answers = other.submit(_in_python, questions).result()
    browser_s, events = page.evaluate(ASK, questions)
    assert events == [each["events"] for each in answers]
    return {"python_s": python_s, "browser_s": browser_s}


def _in_python(questions: list[Any]) -> tuple[float, list[Any]]:
    """Answer as the worker does: a question is JSON, and so is an answer."""
    texts = [msgspec.json.encode(each).decode() for each in questions]
    begun = time.perf_counter()
    answers = [msgspec.json.decode(answered(each)) for each in texts]
    return time.perf_counter() - begun, answers


if __name__ == "__main__":
    run(main)
