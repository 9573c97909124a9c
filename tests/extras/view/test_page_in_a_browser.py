"""The page in headless Chromium, served as `tailrace view` serves it, or as one file."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_story import sinks_of, until, write_run

from helpers.record_story import pipelined_round
from tailrace.extras.view.run import open_runs
from tailrace.record.events import RequestEnded, RequestStarted, Spent, Stepped, Waiting
from tailrace.record.run_log import LogWriter
from tailrace.record.steps import StepMeter
from tailrace.types import SampleId, Span

for package in ("plotly", "starlette", "uvicorn"):
    pytest.importorskip(package, reason="no page: pip install 'tailrace[view]'")

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium: apt-get install chromium"),
]
SWITCHES = (
    *("--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    *("--use-angle=swiftshader", "--enable-unsafe-swiftshader"),  # WebGL without a GPU
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=list(SWITCHES))
        yield launched
        launched.close()


class Tab:
    """A page, and the errors that it wrote to the console."""

    def __init__(self, browser: Any, address: str) -> None:
        self.errors: list[str] = []
        self.page = browser.new_page(viewport={"width": 1300, "height": 1000})
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.set_default_timeout(120_000)  # the machine may be busy
        self.page.goto(address)
        self.page.wait_for_function("window.tailrace && window.tailrace.draws > 0")

    def spans(self, run: int = 0) -> dict[str, int]:
        """Spans that the timeline of a run has, by their name in the legend."""
        found: dict[str, int] = self.page.evaluate(
            f"""Object.fromEntries(window.tailrace.runs[{run}].parts.plot.data.filter((trace) => trace.meta)
            .map((trace) => [trace.name, trace.meta.spans]))"""
        )
        return found


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of the page, served by a thread."""
    from tailrace.extras.serve.listening import HttpServer
    from tailrace.extras.view.app import make_app

    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = HttpServer(make_app(open_runs(folders)), bound)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        try:
            yield f"{server.url}/"
        finally:
            server.stop()
            thread.join()


@pytest.fixture(scope="module")
def stories(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """The page of two runs. The first sample has tokens, two of each version."""
    story = pipelined_round()
    sample = next(event for event in story.events if isinstance(event, Stepped)).samples[0]
    sample.completion_ids, sample.behavior_logprobs = [5, 6, 7, 8], [0.0, -1.0, -3.0, -9.0]
    sample.attribute(2, [Span(1, 2)])
    folder = tmp_path_factory.mktemp("stories")
    with served(write_run(folder / "one", story), write_run(folder / "other")) as address:
        tab = Tab(browser, address)
        yield tab
        tab.page.close()


def test_two_runs_stand_side_by_side(stories: Tab) -> None:
    page = stories.page
    assert page.locator("details h2").all_text_contents() == ["one", "other"]
    spans = {
        **{"round": 1, "gradients": 2, "optimizer step": 2, "publication": 1, "ended": 3, "length limit": 1},
        **{"waits for generation": 2, "waits for the rollout's tail": 1, "waits for weights": 1},
    }
    assert (stories.spans(0), stories.spans(1)) == (spans, spans)
    straggler = page.locator(".stragglers").first.inner_text().splitlines()[1].split("\t")
    assert straggler == ["round 0", "1.0/1", "engine-0", "20", "3"]
    reward = "document.querySelectorAll('.chart')[0].data"
    assert page.evaluate(f"{reward}.map((trace) => [trace.name, [...trace.y]])") == [
        ["one: reward", [0.5, 1]],
        ["other: reward", [0.5, 1]],
    ]
    page.select_option("#x-axis", "samples")
    page.wait_for_function(f"{reward}[0].x[0] === 2 && {reward}[0].x[1] === 4")
    assert stories.errors == []


@pytest.mark.parametrize("width", [500, 1300])
def test_buttons_cover_no_title_and_no_table_is_cut(stories: Tab, width: int) -> None:
    page = stories.page
    page.set_viewport_size({"width": width, "height": 1000})
    page.wait_for_function("document.documentElement.scrollWidth <= window.innerWidth")
    overlaps = page.evaluate(
        """[...document.querySelectorAll('.chart')].map((chart) => {
        const [one, other] = ['.modebar', '.gtitle'].map((name) => chart.querySelector(name)
          .getBoundingClientRect());
        return one.width * other.width === 0 || (one.left < other.right && other.left < one.right
          && one.top < other.bottom && other.top < one.bottom);})"""
    )
    assert overlaps and not any(overlaps)
    cut = "[...document.querySelectorAll('.tables > div')].map((box) => box.scrollHeight > box.clientHeight)"
    assert page.evaluate(cut) and not any(page.evaluate(cut))
    page.set_viewport_size({"width": 1300, "height": 1000})
    assert stories.errors == []


def test_a_click_on_a_request_opens_its_sample(stories: Tab) -> None:
    """On the middle of the request of sample 1.0/1: slot 2, from 4 to 10 s."""
    page = stories.page
    middle = """(() => {const {plot} = window.tailrace.runs[0].parts, box = plot.getBoundingClientRect();
        const {xaxis, yaxis} = plot._fullLayout;
        return [box.left + xaxis._offset + xaxis.d2p(7), box.top + yaxis._offset + yaxis.d2p(2)];})()"""
    expected = "1.0/1 on engine-0: 4.00 to 10.00 s, 0 to 20 tokens"
    for _ in range(100):  # the plot moves while parts of the page above it arrive
        where = page.evaluate(middle)
        page.mouse.move(where[0] - 1, where[1])
        page.mouse.move(*where)
        if page.locator(".controls p").first.inner_text().startswith(expected):
            page.mouse.click(*where)
            page.wait_for_selector("dialog[open]")
            if page.locator("#sample-title").inner_text() == "one: sample 1.0/1":
                break
            page.click("dialog button")
        page.wait_for_timeout(100)
    assert page.locator(".controls p").first.inner_text().startswith(expected)
    assert page.locator("#sample-title").inner_text() == "one: sample 1.0/1"
    assert page.locator("#sample-tokens").inner_text() == "answer 1"
    assert page.locator("#sample-prompt").inner_text() == "question 1"
    page.click("dialog button")
    assert stories.errors == []


def test_tokens_have_the_colour_of_their_version_or_log_prob(stories: Tab) -> None:
    page = stories.page
    page.click(".samples >> nth=0 >> tr:has-text('0.0/0')")
    page.wait_for_selector("dialog[open]")
    colours = "[...document.querySelectorAll('#sample-tokens span')].map((span) => span.style.background)"
    first, second, third, fourth = page.evaluate(colours)
    assert first == second != third == fourth
    page.select_option("#colour", "logprob")
    white, *red = page.evaluate(colours)
    assert white == "rgb(255, 255, 255)"
    assert red == ["rgb(255, 233, 229)", "rgb(255, 189, 177)", "rgb(255, 123, 99)"]
    page.click("dialog button")
    assert stories.errors == []


def write_large_log(path: Path, *, num: int, engines: int, slots: int) -> None:
    """Requests of a second each, without a break in any slot."""
    log, width = LogWriter(path), engines * slots
    for second in range(num // width):
        samples = [SampleId(second * width + lane, 0, 0) for lane in range(width)]
        for lane, sample in enumerate(samples):
            log.on(RequestStarted(float(second), sample, f"e{lane // slots}", 0))
        for lane, sample in enumerate(samples):
            tokens = sample.prompt % 997
            log.on(RequestEnded(second + 0.9, sample, f"e{lane // slots}", tokens, tokens, "stop"))
    log.close()


def test_a_hundred_thousand_spans_are_drawn_and_filtered_by_engine(browser: Any, tmp_path: Path) -> None:
    """As pixels, not as elements of the page."""
    image = pytest.importorskip("PIL.Image")
    write_large_log(tmp_path / "events.jsonl", num=100_000, engines=4, slots=25)
    with served(tmp_path) as address:
        tab = Tab(browser, address)
        assert tab.spans()["ended"] == 100_000
        assert tab.page.evaluate("document.querySelectorAll('*').length") < 5_000
        tab.page.locator(".timeline").screenshot(path=tmp_path / "timeline.png")
        pixels = image.open(tmp_path / "timeline.png").convert("RGB").getcolors(2**24)
        assert sum(count for count, colour in pixels if colour == (0x00, 0x72, 0xB2)) > 50_000
        tab.page.select_option("select[multiple]", "e2")
        drawn = "window.tailrace.runs[0].parts.plot.data.find((trace) => trace.name === 'ended')"
        tab.page.wait_for_function(f"{drawn}.meta.spans === 25000")
        assert tab.page.locator(".timeline .ytick text").all_text_contents() == ["e2"]
        assert tab.errors == []
        tab.page.close()


ENDLESS = """
import sys, time
sys.path += sys.argv[2:]
from pathlib import Path
from page_story import sinks_of
from helpers.record_story import Story, pipelined_round
from tailrace.record.steps import StepMeter
meter = StepMeter(*sinks_of(Path(sys.argv[1])), wall_clock=time.time)
round = 0
while True:
    story = Story(num_steps=2 * round)
    for event in pipelined_round(story, round=round, start_s=10.0 + 15 * round).events:
        meter.on(event)
        time.sleep(0.0005)
    round += 1
    print(round, flush=True)
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that SIGKILL ended in a round after the third."""
    folder, tests = tmp_path / "killed", Path(__file__).parents[2]
    words = [sys.executable, "-c", ENDLESS, str(folder), str(tests / "extras" / "view"), str(tests)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        while process.stdout.readline() != b"3\n":
            assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    return folder


def test_the_page_follows_a_run_and_shows_one_that_was_killed(
    browser: Any, tmp_path: Path, killed: Path
) -> None:
    rows = (killed / "metrics.jsonl").read_bytes()
    (killed / "metrics.jsonl").write_bytes(rows + b'{"step": 9, "lo')
    meter = StepMeter(*sinks_of(tmp_path / "grows"), wall_clock=lambda: 0.0)
    begun, events = until(16.0), pipelined_round().events
    for event in begun:
        meter.on(event)
    with served(tmp_path / "grows", killed) as address:
        tab = Tab(browser, address)
        assert (tab.spans(0)["not ended"], tab.spans(0)["ended"]) == (2, 2)
        assert tab.page.locator(".state").first.inner_text() == "is being written"
        # Three rounds of four requests; the fourth has begun and may have got some way.
        assert sum(tab.spans(1).get(name, 0) for name in ("ended", "length limit")) >= 12
        line = rows.count(b"\n") + 1
        said = f"metrics.jsonl, line {line}: the file ends within this line. The rest is shown."
        assert tab.page.locator(".defect").all_text_contents() == [said]
        meter.on(Waiting(16.0, 6.0, "pool: a request of engine-0"))
        stalled = tab.page.locator(".advisory", has_text="stalled")
        stalled.wait_for()
        assert "pool: a request of engine-0\nThe oldest request is sample 1.0/0" in stalled.inner_text()
        config = "run = { rounds = 1, group_size = 2 }\nschedule = { name = 'serial' }\n"
        (tmp_path / "grows" / "config.toml").write_text(config + "prices.sampling = 1.0\n")
        for event in (Spent(16.0, 2.0), *events[len(begun) :]):
            meter.on(event)
        meter.close()
        (tmp_path / "grows" / "summary.json").write_text("{}")
        tab.page.wait_for_function("window.tailrace.runs[0].parts.state.textContent === 'finished'")
        assert stalled.count() == 0
        assert tab.page.locator(".cost").all_text_contents() == ["Cost: 2.0000 USD", ""]
        assert tab.spans(0)["ended"] == 3 and "not ended" not in tab.spans(0)
        assert tab.page.evaluate("document.querySelectorAll('.chart')[0].data[0].y.length") == 2
        assert tab.errors == []
        tab.page.close()
