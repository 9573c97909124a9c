"""`tailrace advise`: what a log's tail costs, the framework's own orders of work, and what is refused."""

import json
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest
from peer_logs import MODES, SAMPLES, UNSAID, written

from tailrace.cli import main
from tailrace.errors import ConfigError
from tailrace.extras.plan import advise
from tailrace.extras.plan.advise import MODES as ORDERS
from tailrace.extras.plan.advise import Advice, in_turn
from tailrace.extras.plan.peers import FORMATS, read_peer
from tailrace.schedules import SCHEDULES

VERL = Path(__file__).with_name("fixtures") / "verl"
CLUSTER = ["--device", "H100", "--model", "Qwen3-0.6B", "--group-size", "4"]


def advised(name: str, folder: Path, **given: float) -> Advice:
    return Advice.of(read_peer(written(name, folder), **UNSAID), 8)


def test_the_answer_has_the_tail_two_orders_with_keys_of_the_framework_and_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "answer.json", tmp_path / "answer.html"]
    assert main(["advise", str(VERL), *CLUSTER, "--json", str(files[0]), "--html", str(files[1])]) == 0
    out = capsys.readouterr().out
    assert "it waits most for generation." in out
    assert "are the longest 5% of the responses alone." in out
    assert "    trainer.v1.trainer_mode=separate_async\n" in out
    assert "    trainer.v1.trainer_mode=colocate_async\n" in out
    assert "Error: half of the steps that others printed were predicted within 18% where" in out
    assert "within 89%, too slow, from their synchronous run alone; this run's own" in out
    answer, page = json.loads(files[0].read_text()), files[1].read_text()
    assert [order["devices"] for order in answer["orders"]] != ["in turn"]
    assert all(order["step_s"] < 0.82 * answer["step_s"] for order in answer["orders"])
    assert answer["full_s"] < answer["step_s"] and answer["framework"] == "verl"
    assert "trainer.v1.trainer_mode=separate_async" in page
    assert "/" + VERL.name not in page and str(tmp_path) not in page


def test_what_only_the_longest_responses_take_is_told_exactly() -> None:
    """Of 16 responses one is the tail. While it runs alone, a token takes 20.5 ms."""
    advice = Advice.of(read_peer(VERL), 4)
    steps = [advice.load.groups[first : first + 4] for first in range(0, len(advice.load.groups), 4)]
    lengths = [sorted(chain.from_iterable(step)) for step in steps]
    assert advice.tail_s == pytest.approx(0.0205 * fmean(each[-1] - each[-2] for each in lengths), rel=1e-3)


def test_a_log_without_a_card_is_answered_and_says_what_the_rest_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", str(written("verl separate_async", tmp_path))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "training sets the pace; its tokens are up to 3 steps old" in out
    assert "No step waits for its longest responses" in out
    assert "a step would take 62 s: 1.05x as fast" in out
    assert "add --device, --model, --rollout-devices. Devices: A100-40G" in out
    assert "groups of 8 are assumed: --group-size N" in out


def test_a_run_that_training_bounds_has_nothing_to_gain(tmp_path: Path) -> None:
    advice = advised("verl sync", tmp_path)
    order = advise.BestOrder(ORDERS["verl"][0], _measured(110.0), 110.0, "in turn", ["a=b"], "")
    assert advice.order_words([order], None)[-1].startswith("Nothing to gain for certain")
    order = advise.BestOrder(ORDERS["verl"][0], _measured(60.0), 60.0, "in turn", ["a=b"], "")
    assert not any("Nothing" in words for words in advice.order_words([order], 0.02))
    assert advise.SCALING not in advice.order_words([order], None)
    assert advise.SCALING in advice.order_words([replace(order, where="8 + 16")], None)
    assert "no other order of work" in advice.order_words([], None)[0]


def _measured(step_s: float) -> advise.Measured:
    figures = {"step_s": step_s, "lag_mean": 1.0, "lag_max": 2.0, "ess_mean": 0.9, "length_bias": -0.1}
    return advise.Measured(None, None, 16, figures)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODES)
def test_each_mode_has_a_first_answer(name: str, tmp_path: Path) -> None:
    advice = advised(name, tmp_path)
    assert advice.samples == SAMPLES
    assert 0 <= advice.tail_s < advice.step_s and 0 < advice.full_s <= advice.step_s
    assert (advice.tail_s == 0) == MODES[name].overlaps or name == "verl sync"
    assert in_turn(advice.log, 0).in_turn == MODES[name].overlaps


def test_every_framework_has_orders_whose_schedules_and_words_exist() -> None:
    assert {*ORDERS} == {*advise.SOURCES} == {form.name for form in FORMATS} - {"tailrace"}
    assert all(
        re.search(r" \((August|November) 2026\): .+\.(py|yaml)\b", text) for text in advise.SOURCES.values()
    )
    names = re.compile(r"{(\w+)}")
    known = {"devices", "rollout", "train", "parallel", "engines", "lag", "versions", "groups", "alive"}
    for mode in [mode for modes in ORDERS.values() for mode in modes]:
        assert {*mode.schedules} <= SCHEDULES.keys()
        assert {*mode.placements} <= {"colocated", "disaggregated"}
        assert {*names.findall(" ".join([mode.say, *mode.keys.values()]))} <= known | {"samples", "ahead"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--device", "H99", "--model", "Qwen3-0.6B"],
            "--device = 'H99': there is no profile of this name",
        ),
        (
            ["--device", "H100", "--model", "gpt"],
            "--model = 'gpt': it is neither the name of a known model",
        ),
        (["--group-size", "-4"], "--group-size = -4: it is not above 0; give a number above 0"),
        (["--max-tokens", "0"], "--max-tokens = 0: it is not above 0"),
        (["--drift", "-1"], r"--drift = -1.0: it is not above 0"),
        (["--group-size", "7"], "--group-size = 7: a step has 16 samples, which are no whole number"),
        (["--device", "RTX 4090", "--model", "Qwen2.5-32B"], "--model = 'Qwen2.5-32B': "),
    ],
)
def test_a_card_a_model_and_groups_that_do_not_fit_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", str(VERL), *words]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_a_source_that_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("nothing to see\n")
    assert main(["advise", str(tmp_path / "notes.txt")]) == 2
    assert "no log with the time of steps; name one with figures of" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="there is no such file"):
        read_peer(tmp_path / "none")
