"""Each number that README.md and results.md print about learning is computed from the files."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

import learning_report as report
from kl_study import MAX_LAG, switch_positions

ROOT = report.RESULTS.parents[2]
README, RESULTS = ROOT / "README.md", report.PAGES / "results.md"
RUNS = cache(lambda: report.read_all(report.RESULTS))


@cache
def figures(study: str) -> report.Figures:
    return report.figures_of(report.runs_of(RUNS(), study))


def mean(study: str, schedule: str, column: str = "accuracy") -> float:
    return fmean(row[column] for row in figures(study)[schedule].values())


def less(study: str, schedule: str, against: str, column: str = "accuracy") -> str:
    found = report.paired(figures(study), schedule, against, column)
    return f"{fmean(found):+.3f} ± {report.interval(found):.3f}"


def printed(paper: str, rows: list[str], what: str, key: str, form: str) -> list[str]:
    """Figures of a paper, or our predictions of them."""
    tables = json.loads((ROOT / f"reproductions/results/0.1.0/{paper}.json").read_text(encoding="utf-8"))[
        "tables"
    ].values()
    found = {each["row"]: each[key] for table in tables for each in table if each["what"] == what}
    return [format(found[row], form) for row in rows]


def results() -> Iterator[str]:
    yield f"differs from that of one step a round by {less('lag', 'pipelinerl', 'G=1')}."
    yield f"of the same mean lag lose {less('lag', 'G=16', 'G=1')[1:]} of accuracy"
    best = report.best_of(RUNS())[RUNS()["lag"]["G=1"][0]["config"]]
    yield f"whose best accuracy in any run is {best:.2f}"
    lag, largest = (mean("lag", "pipelinerl", f"lag, {each}") for each in ("mean", "largest"))
    yield f"with in-flight updates the mean lag is {lag:.1f} steps, the largest {largest:.0f}."
    for name, words in (
        ("G=1", "samples (one step a round: {})"),
        ("G=64", "at a learning rate of 2e-4 the accuracy of G = 64 declines ({})."),
    ):
        at = [dict(map(tuple, run["evaluations"])) for run in RUNS()["lag"][name]]
        yield words.format(" to ".join(f"{fmean(each[n] for each in at):.2f}" for n in (2048, 20_480)))
    ends = [f"{mean('diverge', f'{name} 4e-4'):.2f}" for name in ("G=1", "pipelinerl", "G=32", "G=64")]
    yield "one step a round ends at {}, in-flight updates at {}, G = 32 at {}, G = 64 at {}.".format(*ends)
    starts = [run["divergences"]["100"] for run in RUNS()["kl"]["L=200"]]
    for kind, words in (
        ("kept", "is kept has {:.2f} to {:.2f} times"),
        ("recomputed", "recomputed {:.2f} to {:.2f} times."),
    ):
        ratios = [fmean(each[kind][place] / each["old"][place] for each in starts) for place in range(4)]
        yield words.format(min(ratios), max(ratios))
    seen = sum(place < fmean(each["tokens"] for each in starts) for place in switch_positions(MAX_LAG, 200))
    yield f"sees {seen} of the 32 updates."
    yield f"`serial` ends at {mean('april', 'serial'):.3f}, which"
    difference = less("rollpacker", "rollpacker", "serial", "all")
    yield f"so its difference in mean reward, {difference}, is partly selection."
    yield f"after {RUNS()['rollpacker']['rollpacker'][0]['evaluations'][-1][0]:,} samples."
    peer, *two = (f"{row['all']:.2f}" for name in ("TRL", "serial") for row in figures("trl")[name].values())
    yield f"The mean reward of TRL is {peer} (one seed), that of `serial` {' and '.join(two)}."


def readme() -> Iterator[str]:
    order = report.paired(figures("order"), "rolloutpipe", "serial", "accuracy")
    yield f"it learns as `serial` within {report.verdict(order, 0.02)[-1]} points of accuracy."  # 0.02
    yield f"is not decided, {less('april', 'april', 'serial')}: the task is near its ceiling."
    bound, rounds = less("april", "april age 1", "serial", "all"), less("lag", "G=16", "G=1")
    yield f"Our bound of 1 on staleness cost {bound[1:6]} of the mean reward"
    (times,) = printed("pipelinerl", ["G = 32, 64 at once"], "PipelineRL against it", "ours", ".1f")
    yield f"{times} times the throughput of conventional RL; the paper prints 2."
    yield f"from one step a round is seen, {less('lag', 'pipelinerl', 'G=1')}; conventional rounds"
    yield f"of the same mean lag lose {rounds[1:6]}"
    yield f"no difference in validation accuracy is seen, {less('rollpacker', 'rollpacker both', 'serial')}."
    pair = (["Qwen2.5-7B/8k", "Qwen2.5-14B/16k", "Qwen2.5-32B/32k"], "+ trainer")
    ours, theirs = (", ".join(printed("rollpacker", *pair, key, ".1f")) for key in ("ours", "printed"))
    yield f"{ours} times as fast; the paper prints {theirs} (the first is fitted)."


PAGES = {RESULTS: results, README: readme}


def text_of(page: Path, begin: str = "", end: str = "\0") -> str:
    text = page.read_text(encoding="utf-8")
    return " ".join(text[text.index(begin) :].partition(end)[0].split())


def test_the_pages_say_what_the_files_say() -> None:
    for page, sentences in PAGES.items():
        assert [each for each in sentences() if each not in text_of(page)] == []


def test_there_is_no_other_number_of_learning() -> None:
    """Others are printed by a paper, or have a row of results.md."""
    assert "| -30.5% | live, 0.4M" in text_of(RESULTS) and "| 3.4x | live, 135M" in text_of(RESULTS)
    others = ["30.5% less time", "3.4 times as", "0.4M", "TRL 1.16", "+2.1%", "2.1 points", "2,048"]
    for place in ((RESULTS, "<!-- end -->", "## Does it"), (README, "## What became", "## Development")):
        text = re.sub(r"\[[^]]*\]\([^)]*\)", "", text_of(*place))
        for sentence in (*PAGES[place[0]](), *others):
            text = text.replace(sentence, "")
        assert re.findall(r"\S*\d[.,]\d\S*|\S*\d%\S*", text) == []


def test_the_report_is_up_to_date() -> None:
    pages = {report.PAGE: report.text(RUNS())}
    pages |= {report.PAGES / name: report.filled(report.PAGES / name, RUNS()) for name in report.TABLES}
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, "python benchmarks/learning.py --report"
