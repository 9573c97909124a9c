"""The playground of `make playground` in headless Chromium, which has no network but this test's servers."""

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from helpers.browser import chromium, needs_chromium, wait_for
from tailrace.extras.playground.simulation import Question, SimulationAnswer, answer, source_of

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "build" / "playground"
pytestmark = [
    pytest.mark.playground,
    needs_chromium,
    pytest.mark.skipif(not (BUILT / "first.json").exists(), reason="no playground: make playground"),
]
# Every other host is behind a proxy that is not there.
SWITCHES = ("--no-sandbox", "--proxy-server=http://127.0.0.1:9", "--proxy-bypass-list=127.0.0.1")
SCHEDULES = ("serial", "april", "tailrace", "pipelinerl")
SET_UPS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "as it is": ("tail", {}),
    "equal lengths": ("tail", {"sim.lengths.sigma": 0}),
    "a longer tail": ("tail", {"sim.lengths.sigma": 1.6, "sim.lengths.median_tokens": 4000}),
    "other devices": ("tail", {"sim.cluster.devices": 6, "sim.cluster.rollout_devices": 4}),
    "all devices in turn": ("tail", {"sim.cluster.devices": 8, "sim.cluster.rollout_devices": 8}),
    "large groups": ("tail", {"run.group_size": 12}),
    "slow rewards": ("tail", {"sim.rewards.median_s": 20}),
    "little lag": ("tail", {"schedule.staleness": 1}),
    "RolloutPipe": ("rolloutpipe", {}),
    "APRIL": ("april", {}),
}


class Server:
    """The files of a folder on a port of this machine, and the paths that were asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked = list[str]()
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                asked.append(self.path)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> "Server":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(SWITCHES) as launched:
        yield launched


@pytest.fixture(scope="module")
def site() -> Iterator[Server]:
    with Server(BUILT) as server:
        yield server


class Tab:
    """A page of the playground. Its errors are those of the console that name no policy."""

    def __init__(
        self, browser: Any, address: str, *, width: int = 1400, before: str = "", **how: Any
    ) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, **how)
        self.page.set_default_timeout(300_000)  # the machine may be busy
        self.said = list[str]()
        self.page.on("console", lambda said: self.said.append(said.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        if before:
            self.page.add_init_script(before)
        self.page.goto(address)
        self.wait("window.playground?.runs.length")

    def wait(self, condition: str) -> None:
        wait_for(self.page, condition, self.said, seconds=300)

    def idle(self) -> None:
        self.page.wait_for_timeout(50)
        self.wait("playground.isIdle")

    def problems(self) -> list[str]:
        return [each for each in self.page.locator(".run > .defect").all_inner_texts() if each]

    def ask(self, question: object) -> Any:
        return self.page.evaluate("(question) => playground.simulator.ask(question)", question)


@pytest.fixture(scope="module")
def tab(browser: Any, site: Server) -> Iterator[Tab]:
    """A page whose simulator has started. It has all the time that it needs."""
    tab = Tab(browser, site.address)
    tab.page.evaluate("playground.simulator.answerMs = 300000, playground.simulator.start()")
    yield tab
    tab.page.close()


@pytest.mark.parametrize("name", SET_UPS)
def test_a_browser_simulates_the_same_events_seconds_and_figures_as_python(tab: Tab, name: str) -> None:
    preset, values = SET_UPS[name]
    tab.page.evaluate(
        """([preset, values]) => {
            playground.setUp.choose(preset);
            Object.assign(playground.setUp.values, values); }""",
        [preset, values],
    )
    for schedule in SCHEDULES:
        question = tab.page.evaluate("(name) => playground.setUp.question(name, null)", schedule)
        with ThreadPoolExecutor(1) as other:  # the thread of the test has playwright's loop
            here = other.submit(answer, msgspec.convert(question, Question)).result()
        there = tab.ask(question)
        if not isinstance(here, SimulationAnswer):
            assert there == {"problem": here.problem}
            continue
        assert there["events"] == here.events > 300
        assert there["seconds"] == pytest.approx(here.seconds, rel=1e-9)
        assert there["figures"] == pytest.approx(here.figures, rel=1e-9, abs=1e-12)
        assert there["window"] == json.loads(msgspec.json.encode(here.window))
    tab.page.evaluate("playground.setUp.choose('tail')")


def test_python_of_the_browser_is_3_14_and_its_memory_stays_below_a_gigabyte(tab: Tab) -> None:
    lines = source_of("serial").replace(
        "    run.declare",
        "    import pyodide_js, sys\n"
        "    assert 0, (sys.version_info[:2], pyodide_js._module.HEAP8.length)\n    run.declare",
    )
    question = tab.page.evaluate("playground.setUp.question('serial', null)")
    said = tab.ask(question | {"lines": lines})["problem"]
    version, size = said.removeprefix("line 4: AssertionError: ((").rstrip(")").split("), ")
    assert version == "3, 14" and 2e7 < int(size) < 4e8


def test_the_page_has_pictures_before_python_starts_and_only_its_own_server_is_asked(
    browser: Any, site: Server
) -> None:
    tab = Tab(browser, site.address, before="window.Worker = class { postMessage() {} terminate() {} }")
    tab.wait("playground.runs.every((run) => run.picture.drawn?.requests > 500)")
    assert tab.page.locator("#verdict").inner_text().startswith("tailrace is the fastest here, ")
    assert "Content Security Policy" not in " ".join(tab.said)
    tab.page.close()


def test_a_slider_simulates_anew_and_the_address_carries_the_set_up(browser: Any, site: Server) -> None:
    tab = Tab(browser, site.address + "#schedules=serial%2Ctailrace")
    tab.page.evaluate("playground.simulator.answerMs = 300000")
    tab.idle()
    before = tab.page.evaluate("playground.runs.map((run) => run.answer.seconds)")
    tab.page.focus("[id='sim.lengths.sigma']")
    tab.page.keyboard.press("ArrowRight")
    tab.idle()
    after = tab.page.evaluate("playground.runs.map((run) => run.answer.seconds)")
    assert after[0] > before[0] and tab.problems() == []
    fragment = tab.page.evaluate("location.hash")
    assert fragment == "#schedules=serial%2Ctailrace&sim.lengths.sigma=1.1"
    other = Tab(browser, site.address + fragment)
    other.page.evaluate("playground.simulator.answerMs = 300000")
    other.idle()
    assert other.page.evaluate("playground.runs.map((run) => run.answer.seconds)") == after
    assert (
        other.page.locator(
            "[id='sim.lengths.sigma'] ~ *, .slider:has([id='sim.lengths.sigma']) output"
        ).first.inner_text()
        == "longest 22 \N{MULTIPLICATION SIGN}"
    )
    for each in (tab, other):
        each.page.close()


ESCAPES = """async def serial(run, groups_per_round, groups_per_step):
    import js
    found = []
    def attempt(name, act):
        try:
            found.append(f"{name} {act()}")
        except Exception as why:
            found.append(f"{name} refused")
    def read(address):
        request = js.XMLHttpRequest.new()
        request.open("GET", address, False)
        request.send()
        return request.status
    attempt("own", lambda: read("OWN"))
    attempt("other", lambda: read("OTHERread"))
    attempt("eval", lambda: js.eval("1 + 1"))
    attempt("fetch", lambda: js.fetch("OTHERfetch") and "asked")
    attempt("socket", lambda: js.WebSocket.new("OTHERsocket".replace("http", "ws")) and "asked")
    attempt("beacon", lambda: js.navigator.sendBeacon("OTHERbeacon"))
    attempt("worker", lambda: js.Worker.new("OTHERworker") and "asked")
    assert 0, ", ".join(found)
"""


def test_lines_reach_the_page_s_own_files_only(browser: Any, site: Server, tmp_path: Path) -> None:
    with Server(tmp_path) as other:
        tab = Tab(browser, site.address)
        tab.page.evaluate("playground.simulator.answerMs = 300000")
        lines = ESCAPES.replace("OWN", f"{site.address}first.json").replace("OTHER", other.address)
        question = tab.page.evaluate("playground.setUp.question('serial', null)")
        said = tab.ask(question | {"lines": lines})["problem"]
        tab.page.wait_for_timeout(1_000)
        assert "own 200, other refused, eval refused" in said
        assert other.asked == []
        tab.page.close()


def test_a_link_with_lines_runs_nothing_before_a_click(browser: Any, site: Server) -> None:
    lines = source_of("serial").replace(
        "    run.declare",
        "    import js\n    request = js.XMLHttpRequest.new()\n"
        f"    request.open('GET', '{site.address}first.json?ran', False)\n"
        "    request.send()\n    run.declare",
    )
    words = urlencode({"schedules": "serial,april", "lines.serial": lines, "run.group_size": 3})
    tab = Tab(browser, f"{site.address}#{words}")
    tab.page.evaluate("playground.simulator.answerMs = 300000")
    tab.idle()
    assert tab.page.evaluate("playground.runs.map((run) => Boolean(run.answer))") == [False, True]
    assert tab.page.locator(".lines .muted").first.inner_text() == (
        "These lines came with the link. Nothing of them has run."
    )
    tab.page.focus("[id='run.group_size']")
    tab.page.keyboard.press("ArrowRight")
    tab.idle()
    assert "/first.json?ran" not in site.asked
    tab.page.locator("button.main").first.click()
    tab.idle()
    assert "/first.json?ran" in site.asked and tab.problems() == []
    assert "lines.serial=async" in tab.page.evaluate("location.hash"), "a link has them again"
    tab.page.locator("text=published lines").first.click()
    tab.idle()
    assert "lines.serial" not in tab.page.evaluate("location.hash")
    tab.page.close()


def test_a_schedule_without_an_end_is_ended_and_the_next_question_answered(
    browser: Any, site: Server
) -> None:
    tab = Tab(browser, site.address)
    assert tab.page.evaluate("playground.simulator.answerMs") == 10_000
    tab.page.evaluate("playground.simulator.start()")
    tab.page.evaluate("playground.simulator.answerMs = 2000")
    tab.page.locator("textarea").first.fill(
        "async def serial(run):\n    run.declare(staleness=0)\n    while True:\n        pass\n"
    )
    tab.page.keyboard.press("Control+Enter")
    tab.wait("document.querySelector('.run > .defect').textContent")
    assert tab.problems() == [
        "there was no answer within 2 s: the lines may loop for ever, or the set-up is too large"
    ]
    tab.page.evaluate("playground.simulator.answerMs = 300000")
    tab.page.locator("textarea").first.fill("async def serial(run):\n    raise ValueError('no')\n")
    tab.page.keyboard.press("Control+Enter")
    tab.wait("document.querySelector('.run > .defect').textContent.startsWith('line 2')")
    assert tab.problems() == ["line 2: ValueError: no"]
    assert tab.page.evaluate("playground.simulator.starts") == 2
    tab.page.locator("text=published lines").first.click()
    tab.wait(
        "document.querySelector('.run > .defect').hidden && playground.runs[0].answer.figures.lag_mean === 0"
    )
    tab.page.close()


@pytest.mark.parametrize(
    ("fragment", "said"),
    [
        ("preset=moon", 'there is no preset "moon"'),
        ("schedules=serial,nothing", 'there is no schedule "nothing"'),
        ("schedules=serial,serial", "it has more than 4 schedules, or one twice"),
        ("run.rounds=1000000", 'there is no setting "run.rounds"'),
        ("run.group_size=1e9", 'run.group_size = "1e9" is not from 2 to 16'),
        ("sim.cluster.devices=3", "more devices generate than there are"),
        ("%%%=&=", 'there is no setting "%%%"'),
    ],
)
def test_a_broken_link_is_one_sentence_and_the_page_shows_its_own_set_up(
    browser: Any, site: Server, fragment: str, said: str
) -> None:
    tab = Tab(browser, f"{site.address}#{fragment}", before="delete window.Worker")
    assert tab.page.locator("#notice").inner_text() == (
        f"This link is broken: {said}. The page shows its own set-up."
    )
    assert tab.page.evaluate("playground.setUp.address") == ""
    tab.page.close()


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("delete window.WebAssembly", "this browser has no WebAssembly: open the page in a newer one"),
        (
            "window.Worker = class { postMessage() { setTimeout(() => this.onmessage({ data: { failed:"
            " 'RangeError: WebAssembly.Memory(): could not allocate memory' } })); } terminate() {} }",
            "this browser has too little memory for Python: close other pages and load this one again",
        ),
    ],
)
def test_a_browser_that_cannot_run_python_says_so_and_keeps_its_pictures(
    browser: Any, site: Server, before: str, said: str
) -> None:
    tab = Tab(browser, site.address, before=before)
    tab.wait("document.querySelector('#state').textContent.length > 20")
    assert tab.page.locator("#state").inner_text() == said
    tab.wait("playground.runs.every((run) => run.picture.drawn?.requests > 500)")
    tab.page.close()


@pytest.mark.parametrize("width", [420, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_screen_and_follows_its_colours(
    browser: Any, site: Server, width: int, scheme: str
) -> None:
    tab = Tab(browser, site.address, width=width, before="delete window.Worker", color_scheme=scheme)
    tab.wait("playground.answers")
    ground = tab.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == {"light": "rgb(245, 247, 249)", "dark": "rgb(14, 19, 23)"}[scheme]
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    names = tab.page.evaluate(
        "[...document.querySelectorAll('#controls input')].every((each) => each.labels.length)"
    )
    assert names, "every slider has a label"
    tab.page.close()
