"""The page in headless Chromium, served as `tailrace view` serves it, or as one file."""

import asyncio
import json
import socket
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_story import sinks_of, until, write_run

from helpers.browser import chromium, needs_chromium, wait_for
from helpers.record_story import WALL_TIME, pipelined_round
from tailrace.extras.view.run import open_runs
from tailrace.record.events import Spent, Stepped, Waiting
from tailrace.record.steps import StepMeter
from tailrace.types import Span

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="no page: pip install 'tailrace[view]'")

pytestmark = [
    pytest.mark.slow,
    needs_chromium,
]
SWITCHES = (
    *("--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    "--disable-3d-apis",  # the page needs no WebGL
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(SWITCHES) as launched:
        yield launched


class Tab:
    """A page, and the errors that it wrote to the console."""

    def __init__(self, browser: Any, address: str, *, width: int = 1400, **how: Any) -> None:
        self.errors: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 1000}, **how)
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.set_default_timeout(120_000)  # the machine may be busy
        self.page.goto(address)
        self.wait("window.tailrace && tailrace.draws > 0 && tailrace.runs.every((run) => run.record)")

    def wait(self, condition: str) -> None:
        wait_for(self.page, condition, self.errors, seconds=120)

    def open(self, view: str) -> None:
        self.page.click(f".tabs [value={view}]")
        if view == "timeline":
            self.wait("tailrace.timeline.panels.every((panel) => panel.picture.drawn)")

    def drawn(self, run: int = 0) -> dict[str, int]:
        """How many requests, bins and pieces of lanes the timeline shows."""
        found: dict[str, int] = self.page.evaluate(f"tailrace.timeline.panels[{run}].picture.drawn")
        return found

    def outcomes(self, run: int = 0) -> Counter[str]:
        """The requests in the loaded window by their outcome."""
        lanes = f"tailrace.timeline.panels[{run}].data.lanes"
        return Counter(self.page.evaluate(f"{lanes}.flatMap((lane) => lane.requests || []).map((r) => r[3])"))

    def place(self, time_s: float, lane: str, part: float = 0.5) -> tuple[float, float]:
        """The point of the page at a time in a lane of the first run; `part`: from its top to its bottom."""
        script = f"""(() => {{const {{canvas, picture}} = tailrace.timeline.panels[0];
            const box = canvas.getBoundingClientRect();
            const place = picture.places.find((each) => each.name === "{lane}");
            return [box.left + picture.x({time_s}), box.top + place.top + {part} * place.height];}})()"""
        x, y = self.page.evaluate(script)
        return x, y

    def tip(self, time_s: float, lane: str, part: float = 0.5) -> str:
        """What the page says of a point of a lane. The pointer moves again while the page still lays itself
        out."""
        for _ in range(100):
            self.page.mouse.move(*self.place(time_s, lane, part))
            if self.page.locator("#tip").is_visible():
                return str(self.page.locator("#tip").inner_text())
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{lane} at {time_s} s: nothing is said; {self.errors}")

    def range(self) -> tuple[float, float]:
        """The range of time that the timeline shows."""
        start_s, end_s = self.page.evaluate("[tailrace.timeline.from, tailrace.timeline.to]")
        return start_s, end_s

    def heap_mb(self) -> float:
        """The heap of the page's scripts after a collection."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("HeapProfiler.collectGarbage")
        return float(session.send("Runtime.getHeapUsage")["usedSize"]) / 1e6

    def is_cut(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


def tailrace(*words: str) -> None:
    """Run a command in a process of its own: the thread of the test has playwright's loop."""
    subprocess.run([sys.executable, "-m", "tailrace.cli", *words], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of the page, served by a thread."""
    from tailrace.extras.serve.listening import HttpServer
    from tailrace.extras.view.app import make_app

    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = HttpServer(make_app(open_runs(folders, wait=True), "token"), bound)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        try:
            yield f"{server.url}/token/"
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


def test_two_runs_are_overlaid_and_compared_in_one_table(stories: Tab) -> None:
    page = stories.page
    names = "tailrace.overview.charts[0].lines.map((line) => [line.text, line.data[1]])"
    assert page.evaluate(names) == [
        ["one reward of the step", [0.5, 1]],
        ["other reward of the step", [0.5, 1]],
    ]
    assert page.locator("#head h1").inner_text() == "2 runs"
    heads, *rows = page.locator("#comparison tr").all_inner_texts()
    assert page.evaluate("document.createElement('canvas').getContext('webgl')") is None
    assert heads.split("\t")[:2] == ["run", "reward, mean of rounds"] and [
        row.splitlines()[0].split("\t")[0][:3] for row in rows
    ] == ["one", "oth"]
    assert page.locator("#config-differences").count() == 0
    page.click(".segments [value=samples]")
    assert page.evaluate("tailrace.overview.charts[0].lines[0].data[0]") == [2, 4]
    page.locator("#comparison input").last.uncheck()
    assert page.evaluate("tailrace.overview.charts[0].lines.length") == 1
    page.locator("#comparison input").last.check()
    assert stories.errors == []


def test_smoothing_is_off_at_first_and_draws_a_mean_over_what_happened(stories: Tab) -> None:
    page = stories.page
    assert page.locator("#smoothing").input_value() == "0"
    for smoothing, mean in ((0, [0.5, 1.0]), (0.9, [0.5, 0.7632])):
        slide = f"(slider) => {{slider.value = {smoothing}; slider.dispatchEvent(new Event('input'));}}"
        page.locator("#smoothing").evaluate(slide)
        found = page.evaluate("tailrace.overview.charts[0].lines[0].data")
        assert (found[1], found[2], found[3]) == ([0.5, 1.0],) * 3, "what happened stays"
        assert found[4] == pytest.approx(mean, abs=1e-4)
        legend = page.locator(".chart[data-title=Reward] .legend b").first.inner_text()
        assert legend == "1", "never a mean"
        lag = "tailrace.overview.charts.find((each) => each.spec.title === 'Length').lines"
        longest = page.evaluate(f"{lag}.find((each) => each.name === 'completions/max_length').data")
        assert longest[4] == longest[1] == [6, 20]


def test_a_click_on_a_request_opens_its_sample(stories: Tab) -> None:
    """On the middle of the request of sample 1.0/1: slot 2, from 4 to 10 s."""
    page = stories.page
    stories.open("timeline")
    said = "1.0/1 on engine-0: ended at the length limit\n4 s to 10 s, 0 to 20 tokens"
    assert stories.tip(7.0, "engine-0", 0.8) == said
    page.mouse.click(*stories.place(7.0, "engine-0", 0.8))
    stories.wait("tailrace.samples.sample?.id === '1.0/1'")
    assert page.locator("#sample-title").inner_text() == "Prompt 1.0"
    assert page.locator("#sample-tokens").inner_text() == "answer 1"
    assert page.locator("#sample-prompt").inner_text() == "question 1"
    about = page.locator("#sample-about").inner_text()
    assert (
        about == "sample 1.0/1 · step 2 · 20 tokens · truncated at the length limit · straggler of its round"
    )
    assert stories.errors == []


def test_samples_are_read_by_prompt_ordered_filtered_and_searched(stories: Tab) -> None:
    page = stories.page
    stories.open("samples")
    stories.wait("tailrace.samples.rows.length === 4")
    groups = page.locator(".group .prompt")
    assert groups.all_inner_texts() == ["question 0", "question 1"]
    page.select_option("[aria-label=order]", "longest")
    assert groups.all_inner_texts() == ["question 1", "question 0"]
    page.select_option("[aria-label=only]", "truncated")
    assert groups.all_inner_texts() == ["question 1"]
    page.select_option("[aria-label=only]", "all")
    page.select_option("[aria-label=order]", "newest")
    page.fill("[aria-label=search]", "question 1")
    stories.wait("tailrace.samples.rows.length === 2")
    page.fill("[aria-label=search]", "")
    stories.wait("tailrace.samples.rows.length === 4")
    groups.first.click()
    stories.wait("tailrace.samples.sample?.id === '0.0/0'")
    page.locator("#samples .groups").focus()
    for id in ("0.0/1", "1.0/0"):
        page.keyboard.press("ArrowRight")
        stories.wait(f"tailrace.samples.sample?.id === '{id}'")
    page.click("[aria-label='previous sample']")
    stories.wait("tailrace.samples.sample?.id === '0.0/1'")
    assert stories.errors == []


def test_tokens_have_the_colour_of_their_version_or_log_prob(stories: Tab) -> None:
    page = stories.page
    stories.open("samples")
    stories.wait("tailrace.samples.rows.length === 4")
    page.locator(".group").first.click()
    stories.wait("tailrace.samples.sample?.id === '0.0/0' && tailrace.samples.sample.tokens")
    colours = """[...document.querySelectorAll('#sample-tokens span')]
        .map((span) => getComputedStyle(span).backgroundColor)"""
    first, second, third, fourth = page.evaluate(colours)
    assert first == second != third == fourth
    page.click(".segments [value=logprob]")
    alphas = [float(each.rpartition(" ")[2].rstrip(")")) for each in page.evaluate(colours)]
    assert alphas == pytest.approx([0.0, 0.125, 0.375, 0.75], abs=0.01)
    page.click(".segments [value=version]")
    assert stories.errors == []


def test_wheel_keys_and_pointer_zoom_and_move(stories: Tab) -> None:
    page = stories.page
    stories.open("timeline")
    page.keyboard.press("0")
    assert stories.range() == (0, 15)
    page.mouse.move(*stories.place(5.0, "trainer"))
    page.mouse.wheel(0, -400)
    stories.wait("tailrace.timeline.to - tailrace.timeline.from < 8")
    start_s, end_s = stories.range()
    assert (5.0 - start_s) / (end_s - start_s) == pytest.approx(1 / 3, abs=0.02), "the point stays in place"
    for name, grows, moves in (("w", -1, 0), ("s", 1, 0), ("d", 0, 1), ("a", 0, -1)):
        before = stories.range()
        page.keyboard.press(name)
        after = stories.range()
        span, middle = (after[1] - after[0]) - (before[1] - before[0]), sum(after) - sum(before)
        assert (round(span, 6) > 0) - (round(span, 6) < 0) == grows
        assert (round(middle, 6) > 0) - (round(middle, 6) < 0) == moves
    before = stories.range()
    x, y = stories.place(sum(before) / 2, "trainer")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 100, y, steps=4)
    page.mouse.up()
    assert stories.range()[0] < before[0]
    page.keyboard.press("0")
    page.mouse.click(*stories.place(7.0, "rounds"))
    assert stories.range() == (0, 15), "the only round is the whole run"
    stories.wait("location.hash.startsWith('#/timeline/0-15')")
    assert stories.errors == []


def test_advisories_are_marks_of_the_timeline(browser: Any, tmp_path: Path) -> None:
    """A pointer at the end of the fourth step, from which on too many samples are truncated."""
    story = pipelined_round(round=1, start_s=40.0, story=pipelined_round())
    with served(write_run(tmp_path / "run", story)) as address:
        tab = Tab(browser, address)
        tab.open("timeline")
        (mark,) = tab.page.evaluate("tailrace.runs[0].record.marks")
        said = tab.tip(mark["time_s"], "advisories")
        assert said.startswith(f"truncation, since {mark['time_s']:g} s: ") and "of the samples" in said
        tab.page.mouse.move(*tab.place(mark["time_s"] - 10, "advisories"))
        assert tab.page.locator("#tip").is_hidden() and tab.errors == []
        tab.page.close()


def test_a_run_of_a_version_without_a_log_shows_its_figures_and_says_what_is_missing(
    browser: Any, tmp_path: Path
) -> None:
    """No tile tells of rounds and seconds, which only the log has."""
    earlier = Path(__file__).parents[2] / "drivers/commands/earlier_folders"
    for name in ("train-0.1.0-early", "train-0.1.0"):
        with tarfile.open(earlier / f"{name}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
    with served(tmp_path / "train-0.1.0-early") as address:
        tab = Tab(browser, address)
        tiles = ["reward, last round", "held-out reward", "seconds a step", "trained tokens/s"]
        assert tab.page.locator(".tile dt").all_inner_texts() == tiles
        assert tab.page.locator(".tile .value").all_inner_texts()[:2] == ["0.125", "0.0625"]
        body = tab.page.locator("body").inner_text()
        assert (
            "events.jsonl: it is not there, so there is no timeline" in body and "It cannot be read." in body
        )
        tab.page.close()
    with served(tmp_path / "train-0.1.0") as address:
        tab = Tab(browser, address)
        tiles += ["trainer computes", "rounds"]
        assert tab.page.locator(".tile dt").all_inner_texts() == tiles
        assert tab.page.locator(".tile .value").all_inner_texts()[-1] == "2 / 2" and tab.errors == []
        tab.page.close()


def test_a_simulated_run_names_a_faster_schedule_and_says_how_prompts_were_completed(
    browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(LONG.replace("rounds = 1000", "rounds = 4"))
    words = ["--schedule.name", "serial", "--run.eval_every", "2", "--output-dir", str(tmp_path / "run")]
    tailrace("simulate", str(tmp_path / "run.toml"), *words)
    with served(tmp_path / "run") as address:
        tab = Tab(browser, address)
        tab.wait("tailrace.runs[0].faster?.schedule")
        said = tab.page.locator("#head .verdict").inner_text()
        name, times = tab.page.evaluate(
            "(({ schedule, times }) => [schedule, times])(tailrace.runs[0].faster)"
        )
        assert times > 1.1 and f"In a simulation with its costs, {name} is {times:.1f} times faster" in said
        assert tab.page.locator(".chip").all_inner_texts() == ["finished", "simulated"]
        assert tab.page.locator("[data-title=Reward]").is_hidden(), "its rewards are drawn at random"
        assert "reward" not in tab.page.locator(".tiles").inner_text()
        names = tab.page.evaluate(
            "[...tailrace.runs[0].figures.names, ...tailrace.runs[0].record.summary.map((each) => each.key)]"
        )
        assert [name for name in names if name.startswith("reward")] == []
        tab.open("timeline")
        assert tab.page.locator("button", has_text="follow").is_hidden(), "a finished run"
        assert tab.errors == []
        tab.page.close()


def test_no_run_is_the_best_in_what_reads_the_same_or_lies_within_the_intervals(
    browser: Any, tmp_path: Path
) -> None:
    rows = {}
    for name, accuracy in (("one", 0.8), ("other", 0.81)):
        folder = write_run(tmp_path / name)
        first, *others = (folder / "metrics.jsonl").read_text().splitlines()
        rows[name] = json.loads(first) | {"eval/reward": accuracy, "eval/num_samples": 5.0}
        (folder / "samples" / "eval").mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"id": f"-{n}.0/0", "reward": accuracy + 0.01 * (n - 3)}) for n in range(1, 6))
        (folder / "samples" / "eval" / f"round_{rows[name]['round']:06d}.jsonl").write_text("\n".join(lines))
        (folder / "metrics.jsonl").write_text("\n".join([json.dumps(rows[name]), *others, ""]))
    with served(tmp_path / "one", tmp_path / "other") as address:
        tab = Tab(browser, address)
        assert "held-out reward" in tab.page.locator("#comparison").inner_text()
        assert tab.page.locator(".best").count() == 0
        tab.page.evaluate("""tailrace.runs[1].figures.evaluations[0].low = 0.95, tailrace.overview.draw()""")
        assert tab.page.locator("#comparison .best").all_inner_texts() == ["0.810"]
        assert tab.errors == []
        tab.page.close()
    (path,) = (tmp_path / "one" / "samples" / "eval").iterdir()
    path.write_text(path.read_text().partition("\n")[0])
    with served(tmp_path / "one") as address:
        tab = Tab(browser, address)
        assert "one prompt: no interval; first 0.8" in tab.page.locator("body").inner_text()
        assert tab.errors == []
        tab.page.close()


def test_back_forward_and_links_lead_to_views_ranges_and_samples(browser: Any, tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run")) as address:
        tab = Tab(browser, address)
        shown = "document.querySelector('main > section[role=tabpanel]:not([hidden])').id"
        tab.open("samples")
        tab.open("timeline")
        for go, view in (("go_back", "samples"), ("go_back", "overview"), ("go_forward", "samples")):
            getattr(tab.page, go)()
            tab.wait(f"{shown} === '{view}'")
        tab.page.evaluate("location.hash = '#/timeline/3-9'")
        tab.wait(f"{shown} === 'timeline' && tailrace.timeline.from === 3 && tailrace.timeline.to === 9")
        tab.page.evaluate(f"location.hash = '#/samples/0/{'1.0%2F1'}'")
        tab.wait("tailrace.samples.sample?.id === '1.0/1'")
        tab.page.locator("#sample-title", has_text="Prompt 1.0").wait_for()
        tab.page.go_back()
        tab.wait(f"{shown} === 'timeline'")
        tab.page.goto(f"{address}#/accounts")
        tab.wait(f"{shown} === 'accounts'")
        assert tab.page.locator("#head .verdict").is_hidden(), "it is on the overview"
        assert tab.errors == []
        tab.page.close()


def test_the_table_of_runs_says_in_which_settings_they_differ_and_a_run_shows_its_config(
    browser: Any, tmp_path: Path
) -> None:
    folders = [write_run(tmp_path / name) for name in ("slow", "fast")]
    for folder, rate in zip(folders, ("2e-4", "5e-4"), strict=True):
        config = (
            f"trainer.learning_rate = {rate}\ndata.path = 'private/{folder.name}.jsonl'\ndata.kind = 'rows'\n"
        )
        (folder / "config.toml").write_text(
            f"run.rounds = 2\nrun.group_size = 2\nschedule.name = 'serial'\nmodel.path = 'model'\n{config}"
        )
    with served(*folders) as address:
        tab = Tab(browser, address)
        first, second = tab.page.locator("#comparison .differs").all_inner_texts()
        assert "trainer.learning_rate = 0.0002" in first and "trainer.learning_rate = 0.0005" in second
        tab.page.close()
    with served(folders[0]) as address:
        tab = Tab(browser, address)
        card = tab.page.locator("#config")
        assert "trainer.learning_rate" in card.locator("code").all_inner_texts(), (
            "it differs from its default"
        )
        assert card.locator("code", has_text="trainer.max_grad_norm").count() == 0
        card.locator("summary").click()
        card.locator("code", has_text="trainer.max_grad_norm").wait_for()
        assert "private" not in card.inner_text()
        tab.page.close()


def test_figures_have_names_in_words_and_their_meaning_and_legends_the_step(stories: Tab) -> None:
    page = stories.page
    stories.open("overview")
    page.click(".segments [value=step]")
    chart = page.locator(".chart[data-title=Entropy]")
    assert chart.locator(".legend .at").inner_text() == "step 2"
    assert "Entropy of the policy at the sampling temperature." in str(
        chart.locator("h3").get_attribute("title")
    )
    options = page.locator("[aria-label='another figure'] option")
    texts = options.all_inner_texts()
    assert "age: max" in texts and not any("/" in text for text in texts)
    meant = page.locator("[aria-label='another figure'] option[value='lag/tenth/0']").get_attribute("title")
    assert meant and meant.startswith("lag/tenth/0\nunit: optimizer steps\nMean lag of each tenth")


@pytest.mark.parametrize("width", [420, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_the_screen_and_follows_its_colours(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    with served(write_run(tmp_path / "run")) as address:
        tab = Tab(browser, address, width=width, color_scheme=scheme)
        ground = tab.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert ground == {"light": "rgb(245, 247, 249)", "dark": "rgb(14, 19, 23)"}[scheme]
        for view in ("overview", "timeline", "samples", "accounts"):
            tab.open(view)
            assert not tab.is_cut(), view
        tab.open("overview")
        reward = tab.page.locator("[data-title=Reward] canvas").bounding_box()
        assert reward["y"] < 700 and reward["y"] + reward["height"] < 1000
        assert tab.errors == []
        tab.page.close()


def test_a_printed_page_has_overview_and_accounts_and_no_controls(browser: Any, tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run")) as address:
        tab = Tab(browser, address)
        tab.open("samples")
        tab.page.emulate_media(media="print")
        tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        shown = "(name) => document.querySelector(name).getBoundingClientRect().height > 0"
        assert [
            tab.page.evaluate(shown, name) for name in ("#overview", "#accounts", ".top", ".controls")
        ] == [*(True, True, False, False)]
        texts = tab.page.locator("#accounts .card").all_inner_texts()[:3]
        assert [text.replace("\n\n", "\n") for text in texts] == [
            "Tokens\n40 tokens were generated; 100.0% were trained, none wasted.\ntrained\t40\t100.0%\t",
            "Groups\ntrained\t2\t100.0%\t",
            "Weights\n1 publication, which no engine was asked to prove.",
        ]
        tab.page.close()


LONG = """
[run]
rounds = 1000
group_size = 8
eval_every = 50
eval_prompts = 32

[schedule]
name = "rolloutpipe"
groups_per_round = 8
groups_per_step = 4

[sampling]
max_completion_tokens = 1024

[engine]
max_num_seqs = 16

[sim.engines]
count = 2
"""


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run of 1,000 rounds with 64,000 requests of training."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "run.toml").write_text(LONG)
    tailrace("simulate", str(folder / "run.toml"), "--output-dir", str(folder / "run"))
    return folder / "run"


def test_a_thousand_rounds_are_light_and_begin_with_curves(browser: Any, long_run: Path) -> None:
    with served(long_run) as address:
        tab = Tab(browser, address)
        assert tab.page.locator("[data-title='Where a step\\'s time goes'] canvas").bounding_box()["y"] < 700
        assert tab.page.evaluate("tailrace.runs[0].figures.x.step.at(-1)") == 2_000
        assert tab.page.evaluate("document.querySelectorAll('*').length") < 1_000
        tab.open("timeline")
        far = tab.drawn()
        assert far["requests"] == 0 and 100 < far["bins"] < 20_000
        lane = "tailrace.timeline.panels[0].data.lanes.find((lane) => lane.name === 'engine-0')"
        assert 300 < tab.page.evaluate(f"{lane}.slots_used.generating.length") <= 400
        assert tab.heap_mb() < 100
        other = [
            each for each in tab.page.evaluate("tailrace.runs[0].record.shares") if each["cause"] == "other"
        ]
        assert all(each["share"] <= 0.01 for each in other)
        tab.page.click("text=last 5 rounds")
        tab.wait("tailrace.timeline.panels[0].picture.drawn.requests > 0")
        assert tab.drawn()["requests"] < 4_000 and tab.heap_mb() < 100
        assert sum(tab.outcomes().values()) >= 5 * 64
        assert tab.errors == []
        tab.page.close()


def test_a_thousand_rounds_are_a_small_file_that_says_what_it_lacks(
    browser: Any, long_run: Path, tmp_path: Path
) -> None:
    tailrace("view", str(long_run), "--output", str(tmp_path / "long.html"))
    assert (tmp_path / "long.html").stat().st_size < 3_000_000
    tab = Tab(browser, (tmp_path / "long.html").as_uri())
    tab.open("timeline")
    assert "parts of equal length, and single requests of its last rounds only" in tab.page.inner_text(
        "#timeline"
    )
    assert tab.drawn()["requests"] == 0 and tab.drawn()["bins"] > 100
    tab.page.click("text=last 5 rounds")
    tab.wait("tailrace.timeline.panels[0].picture.drawn.requests > 5 * 64")
    assert tab.heap_mb() < 100 and tab.errors == []
    tab.page.close()


def test_a_page_that_is_opened_before_the_run_shows_it_when_it_comes(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path / "later") as address:
        tab = Tab(browser, address)
        assert tab.page.locator(".chip").inner_text().startswith("waits for the first record of")
        write_run(tmp_path / "later")
        tab.wait("tailrace.runs[0].figures.y.reward && tailrace.runs[0].record.end_s === 15")
        tab.page.locator("[data-title=Reward] canvas").wait_for()
        assert tab.page.locator("#head .verdict").inner_text().startswith("The trainer waited 60% of 15 s")
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
    meter = StepMeter(*sinks_of(tmp_path / "grows"), wall_clock=lambda: WALL_TIME)
    begun, events = until(16.0), pipelined_round().events
    for event in begun:
        meter.on(event)
    with served(tmp_path / "grows", killed) as address:
        tab = Tab(browser, address)
        tab.open("timeline")
        tab.wait("tailrace.timeline.panels[1].data")
        assert tab.outcomes(0) == {"unfinished": 2, "stop": 2}
        assert tab.page.locator("#comparison .chip").first.inner_text() == "is being written"
        # Three rounds of four requests; the fourth has begun and may have got some way.
        assert sum(count for name, count in tab.outcomes(1).items() if name != "unfinished") >= 12
        line = rows.count(b"\n") + 1
        said = f"killed: metrics.jsonl, line {line}: the file ends within this line. The rest is shown."
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
        tab.wait("tailrace.runs[0].record.state.text === 'finished'")
        tab.wait("tailrace.runs[0].figures.cost === '2.0000 USD'")
        tab.wait("tailrace.timeline.panels[0].data.to >= 15")
        assert stalled.count() == 0
        assert tab.outcomes(0) == {"stop": 3, "length": 1}
        assert tab.page.evaluate("tailrace.runs[0].figures.y.reward[0].length") == 2
        assert tab.errors == []
        tab.page.close()
