"""Evaluations: which samples are drawn, and avg@n and pass@k of each data source."""

import asyncio
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest

from tailrace.controller.base import RunSettings
from tailrace.errors import BadRow
from tailrace.record.events import EvaluatedSample, RowSkipped
from tailrace.rollout.evaluation import held_out_samples, metrics_of_sets, pass_at, solved_share
from tailrace.types import Prompt, Sample, SampleId


class OddPrompts:
    """Every even index has no usable prompt."""

    def __getitem__(self, index: int) -> Prompt:
        if index % 2 == 0:
            raise BadRow("no prompt")
        return Prompt(index, [index], source="odd")


def samples_of(**settings: Any) -> list[Sample]:
    async def drawn() -> list[Sample]:
        return held_out_samples(OddPrompts(), 2, seed=0, **settings)

    return asyncio.run(drawn())


def test_each_usable_prompt_has_as_many_samples_as_asked_with_noise_of_their_own() -> None:
    samples = samples_of(attempt=3, per_prompt=3)
    assert [str(sample.id) for sample in samples] == [
        *("-2.3/0", "-2.3/1", "-2.3/2"),
        *("-4.3/0", "-4.3/1", "-4.3/2"),
    ]
    assert len({sample.seed for sample in samples}) == 6
    assert [sample.prompt.index for sample in samples] == [1, 1, 1, 3, 3, 3]


class FewRows:
    """Two rows in epochs, and between them prompts that have no rows."""

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, [index], row_number=None if index % 3 == 2 else index % 3)


def test_a_row_of_the_data_is_evaluated_once_and_what_has_no_rows_has_no_end() -> None:
    async def drawn(n: int) -> list[Sample]:
        return held_out_samples(FewRows(), n, seed=0, attempt=0, per_prompt=2)

    assert [sample.prompt.index for sample in asyncio.run(drawn(9))] == [0, 0, 1, 1, 2, 2, 5, 5, 8, 8]
    assert len(asyncio.run(drawn(2))) == 4


def test_rows_without_a_usable_prompt_are_told() -> None:
    skipped: list[RowSkipped] = []
    samples_of(attempt=0, skipped=skipped.append)
    assert [(each.prompt, each.reason) for each in skipped] == [(-1, "no prompt"), (-3, "no prompt")]


def test_each_evaluation_has_other_noise_and_the_same_one_again_after_a_resume() -> None:
    def seeds(attempt: int, greedy: bool = False) -> list[int]:
        samples = samples_of(attempt=attempt, per_prompt=2, greedy=greedy)
        return [sample.seed for sample in samples]

    assert seeds(3) == seeds(3)
    assert len({*seeds(0), *seeds(1), *seeds(2)}) == 12
    assert seeds(2, greedy=True) == seeds(0)


def rewarded(prompt: int, number: int, reward: float, source: str = "") -> EvaluatedSample:
    id = SampleId(-prompt, 0, number)
    return EvaluatedSample(id, "", "", reward, None, "stop", 1, source)


@pytest.mark.parametrize(("n", "solved"), [(4, 0), (4, 1), (4, 3), (4, 4), (6, 2)])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(n: int, solved: int) -> None:
    outcomes = [index < solved for index in range(n)]
    for k in range(1, n + 1):
        assert pass_at(k, n, solved) == pytest.approx(fmean(map(any, combinations(outcomes, k))))


def test_each_source_has_its_own_figures() -> None:
    samples = [
        *(rewarded(1, number, reward, "a") for number, reward in enumerate((1.0, 0.0, 0.0))),
        *(rewarded(2, number, reward, "a") for number, reward in enumerate((0.5, 0.0, 0.0))),
        *(rewarded(3, number, reward, "b") for number, reward in enumerate((1.0, 1.0, 2.0))),
    ]
    assert metrics_of_sets(samples, 1.0) == pytest.approx(
        {
            **{"a/avg@3": 0.25, "a/pass@1": 1 / 6, "a/pass@2": 1 / 3, "a/pass@3": 0.5},
            **{"all/avg@3": 5.5 / 9, "all/pass@1": 4 / 9, "all/pass@2": 5 / 9, "all/pass@3": 2 / 3},
            **{"b/avg@3": 4 / 3, "b/pass@1": 1.0, "b/pass@2": 1.0, "b/pass@3": 1.0},
        }
    )


def test_one_sample_of_each_prompt_has_figures_of_named_sources_alone() -> None:
    assert solved_share(
        [rewarded(1, 0, 0.25), rewarded(2, 0, 0.5), rewarded(3, 0, 1.0)], 0.5
    ) == pytest.approx(2 / 3)
    assert metrics_of_sets([rewarded(1, 0, 1.0), rewarded(2, 0, 0.0)], 1.0) == {}
    named = [rewarded(1, 0, 1.0, "a"), rewarded(2, 0, 0.0)]
    assert metrics_of_sets(named, 1.0) == {"a/avg@1": 1.0, "a/pass@1": 1.0}


@pytest.mark.parametrize("setting", [{"eval_samples": 4}, {"eval_temperature": 0.6}, {"eval_top_p": 0.7}])
def test_what_needs_sampling_is_refused_for_greedy_evaluations(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"needs eval_greedy = false"):
        RunSettings.model_validate({"rounds": 1, "group_size": 2, **setting})
    RunSettings.model_validate({"rounds": 1, "group_size": 2, "eval_greedy": False, **setting})
