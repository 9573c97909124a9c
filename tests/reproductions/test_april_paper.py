"""APRIL's set-up: sampling under a filter by hand, and the command with a few settings of Table 1."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from helpers.virtual import EXACT, ZERO_VARIANCE, Outcome, simulate, worlds
from reproductions import april
from reproductions.__main__ import main
from reproductions.april import PAPER, Setting, oversample_and_discard
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.record.events import RequestStarted, Stepped
from tailrace.schedules import Schedule
from tailrace.schedules.april import april_dapo
from tailrace.types import Sample


class AllEqualForPrompt0:
    """Rewards: the responses to prompt 0 are equal, so it is filtered."""

    async def score(self, sample: Sample) -> float:
        return float(sample.id.number if sample.prompt.index else 1)


def run(schedule: Schedule, rounds: int) -> Outcome:
    """Two groups of two responses a round. Prompt i has responses of 10 (i + 1) tokens, one a second."""

    def parts() -> RunComponents:
        made = worlds(EXACT, lambda sample: 10 * (sample.prompt.index + 1))()
        return replace(made, rewards=AllEqualForPrompt0())

    settings = RunSettings(rounds=rounds, group_size=2)
    return simulate(schedule, settings, EXACT, parts=parts, algorithm=ZERO_VARIANCE)


def test_the_baseline_draws_a_batch_for_a_filtered_group_and_discards_what_is_left_over() -> None:
    """At 0 s prompts 0 and 1 start. At 10 s prompt 0 is filtered, one group is alive, and 2 and 3 start.
    Prompt 1 passes at 20 s and prompt 2 at 40 s, which ends the rollout. The two responses to prompt 3 have
    30 tokens each then."""
    outcome = run(partial(oversample_and_discard, groups_per_round=2, groups_per_draw=2), rounds=1)
    assert Counter((event.time_s, event.sample.prompt) for event in outcome.of(RequestStarted)) == {
        (0.0, 0): 2,
        (0.0, 1): 2,
        (10.0, 2): 2,
        (10.0, 3): 2,
    }
    assert outcome.trained == [1, 2]
    assert outcome.totals.trained_tokens == 40 + 60
    assert outcome.totals.wasted_tokens == {"zero variance": 20, "discarded": 60}


def test_april_dapo_resumes_what_is_left_over_first() -> None:
    """The second round starts with prompt 3, which lacks 10 tokens, and prompt 4, which takes 50 s."""
    outcome = run(partial(april_dapo, groups_per_round=2, groups_per_draw=2), rounds=2)
    assert outcome.trained == [1, 2, 3, 4]
    first, _ = outcome.of(Stepped)
    resumed = [event for event in outcome.of(RequestStarted) if event.time_s >= first.end_s]
    assert [(event.sample.prompt, event.num_tokens) for event in resumed] == [
        (3, 30),
        (3, 30),
        (4, 0),
        (4, 0),
    ]
    assert outcome.totals.wasted_tokens == {"zero variance": 20}


@pytest.mark.usefixtures("few")
def test_fig_4_sets_the_share_of_rollouts_and_fig_5_the_deviation_of_lengths_beside_the_paper() -> None:
    carried = april.figure_4(0).figures
    assert [figure.printed for figure in carried] == [40.0, 40.0, 40.0, (1.0, 5.0)]
    samples, tokens, resumed, versions = (figure.ours for figure in carried)
    assert tokens > samples > resumed > 0 and versions == 2
    whole, within = (figure.ours for figure in april.figure_5(0).figures)
    assert 3000 < whole < 5000 and 0 < within < whole / 2


def test_the_one_gain_that_its_throughputs_do_not_give_is_a_contradiction() -> None:
    differs = [
        f"{setting.model} with {setting.algorithm} on {setting.data}"
        for setting, (without, with_april, gain) in april.PRINTED.items()
        if abs(100 * (with_april / without - 1) - gain) > 0.06
    ]
    assert differs == ["Qwen3-4B with GRPO on DeepScaleR"]
    assert any(differs[0] in each for each in PAPER.contradictions)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two rounds of two settings."""
    wanted = [Setting("Qwen3-4B", "GRPO", "DeepMath"), Setting("Qwen3-8B", "DAPO", "DeepMath")]
    monkeypatch.setattr(april, "PRINTED", {setting: april.PRINTED[setting] for setting in wanted})
    pairs = [(setting.model, setting.algorithm) for setting in wanted]
    monkeypatch.setattr(april, "AVERAGES", {pair: april.AVERAGES[pair] for pair in pairs})
    monkeypatch.setattr(april, "ROUNDS", 2)
    monkeypatch.setattr(april, "WARM_UP_ROUNDS", 1)
    april.compare.cache_clear()
    yield
    april.compare.cache_clear()


@pytest.mark.usefixtures("few")
def test_a_setting_has_its_throughputs_and_its_gain_and_a_mean_has_the_bar(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert main(["april", "--table", "1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["contradictions"] == list(PAPER.contradictions) != []
    figures = written["tables"]["Table 1"]
    rows = {(figure["row"], figure["what"]): figure for figure in figures}
    baseline, with_april, gain = (
        rows["Qwen3-4B, GRPO, DeepMath", what]["ours"]
        for what in ("throughput, baseline", "throughput, APRIL", "gain")
    )
    assert gain == 100 * (with_april / baseline - 1)
    assert gain > 20
    assert {figure["tolerance"] for figure in figures} == {None, 5.0}
    assert rows["Qwen3-4B, GRPO, DeepMath", "gain"]["kind"] == "fitted"
    assert rows["Qwen3-8B, DAPO, DeepMath", "gain"]["kind"] == "predicted"


def test_fewer_than_half_as_many_parameters_are_fitted_as_gains_and_throughputs_are_predicted() -> None:
    predicted = 3 * sum(setting not in april.FITTED for setting in april.PRINTED)
    assert (PAPER.num_fitted, predicted) == (10, 24)
