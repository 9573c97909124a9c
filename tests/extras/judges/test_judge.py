"""Templates, and the sum of judges and reward functions."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.episodes import answer
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.kinds import NoFunctions, Verdict, WithJudges
from tailrace.drivers.reward.settings import RewardSettings, check_sources
from tailrace.errors import ConfigError, RewardFailed
from tailrace.extras.judges.endpoint import check_template, messages_of, render
from tailrace.extras.judges.settings import EndpointJudgeSettings, LocalJudgeSettings
from tailrace.types import Group, Prompt, Sample, SampleId


def endpoint(**changes: object) -> EndpointJudgeSettings:
    given = {"kind": "endpoint", "url": "http://127.0.0.1:1/v1", "model": "m", "template": "{completion}"}
    return EndpointJudgeSettings.model_validate(given | changes)


def called(row: Mapping[str, Any] | None = None, given: object = None) -> Call:
    return Call("1 + 1 =", "2", [2], "stop", row or {}, given)


def make_sample(source: str = "") -> Sample:
    sample = Sample(SampleId(0, 0, 0), Group(Prompt(0, [1], text="1 + 1 =", source=source), 1, []))
    sample.extend([50], [0.0], version=0)
    return sample


class Fixed:
    """A judge that always says the same."""

    def __init__(self, outcome: Verdict | Exception, **changes: object) -> None:
        self.settings, self._outcome = endpoint(**changes), outcome

    async def judge(self, call: Call) -> Verdict:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Functions:
    """Reward functions that give a number and a metric."""

    async def score(self, sample: Sample) -> float:
        sample.reward_metrics = {"exact": 1.0}
        return 1.0


def scored(sample: Sample, *judges: Fixed, functions: Any = None, drop: bool = False) -> float:
    rewards = WithJudges(functions or NoFunctions(), judges, lambda ids: "2", drop_timeouts=drop)
    return asyncio.run(rewards.score(sample))


def test_a_template_names_prompt_completion_and_columns() -> None:
    row = {"gold": 2, "reward_model": {"ground_truth": "two"}}
    template = (
        'Q: {prompt} A: {completion} {gold} {reward_model.ground_truth} {"score": 1} {{gold}} \\frac{1}{2}'
    )
    expected = 'Q: 1 + 1 = A: 2 2 two {"score": 1} {gold} \\frac{1}{2}'
    assert render(template, called(row)) == expected


def test_a_completion_that_looks_like_a_template_stays_as_it_is() -> None:
    call = Call("", "{gold}", [], "stop", {"gold": "secret"})
    assert render("{completion}", call) == "{gold}"


def test_chat_messages_have_their_roles_unless_there_is_one() -> None:
    question = {"role": "user", "content": "1 + 1?"}
    assert render("{prompt}", called(given=[question])) == "1 + 1?"
    system = {"role": "system", "content": "Be brief."}
    assert render("{prompt}", called(given=[system, question])) == "system: Be brief.\n\nuser: 1 + 1?"


def test_a_row_without_the_column_fails_its_sample() -> None:
    with pytest.raises(RewardFailed, match="judge template: the row has no column 'gold'"):
        render("{gold}", called())


def test_a_row_whose_text_is_not_unicode_fails_its_sample() -> None:
    with pytest.raises(RewardFailed, match="judge template: the text is not valid Unicode"):
        messages_of(endpoint(template="{gold}"), called({"gold": "\ud800"}))


def test_a_template_that_names_no_column_of_the_data_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        check_template(endpoint(template="{gold} {completion}"), [{"answer": 1}])
    assert str(refused.value) == (
        "reward.judges.template = '{gold} {completion}': {gold} is no column of the data (columns: answer); "
        "name a column, or write {{gold}} for the text {gold}"
    )


def test_a_reward_model_without_a_template_reads_the_conversation() -> None:
    settings = LocalJudgeSettings.model_validate({"kind": "local", "path": "m", "system": "Be fair."})
    assert messages_of(settings, called()) == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "2"},
    ]


def test_a_judge_reads_what_the_prompt_has_of_the_answer() -> None:
    call = Call("1 + 1 =", "2", [], "stop", {}, given="1 + 1 =", completion_prefix="It is ")
    assert render("{prompt} {completion}", call) == "1 + 1 = It is 2"
    reward_model = LocalJudgeSettings(path=Path("m"))
    assert messages_of(reward_model, call)[-1] == {"role": "assistant", "content": "It is 2"}


def test_scores_are_added_with_their_weights_and_are_metrics() -> None:
    sample = make_sample()
    good, poor = Fixed(Verdict(0.5, "so so"), weight=2.0), Fixed(Verdict(0.25), name="poor", weight=-1.0)
    assert scored(sample, good, poor, functions=Functions()) == 1.0 + 2 * 0.5 - 0.25
    assert sample.reward_metrics == {"exact": 1.0, "judge": 0.5, "poor": 0.25}
    assert sample.reward_columns == {"judge/answer": "so so"}
    assert not sample.timed_out


def test_a_judge_reads_the_environment_s_tokens_of_an_episode_too() -> None:
    sample = make_sample()
    sample.finish_reason = "stop"
    answer(sample, [60, 61])
    sample.extend([51], [0.0], version=0)
    judge = Fixed(Verdict(1.0))
    asyncio.run(WithJudges(NoFunctions(), [judge], lambda ids: f"{ids}", drop_timeouts=False).score(sample))
    assert sample.text == "[50, 60, 61, 51]"


def test_judges_alone_give_the_reward() -> None:
    assert scored(make_sample(), Fixed(Verdict(0.5))) == 0.5


def test_a_judge_scores_its_sources_only() -> None:
    judge = Fixed(Verdict(0.5), sources=("chat",))
    assert scored(make_sample("chat"), judge, functions=Functions()) == 1.5
    assert scored(make_sample("sums"), judge, functions=Functions()) == 1.0
    with pytest.raises(RewardFailed, match="not applicable"):
        scored(make_sample("sums"), judge)


def test_a_timeout_gives_zero_and_is_marked() -> None:
    sample = make_sample()
    assert scored(sample, Fixed(TimeoutError()), functions=Functions()) == 1.0
    assert sample.timed_out
    with pytest.raises(RewardFailed, match="timeout: judge did not answer in time"):
        scored(make_sample(), Fixed(TimeoutError()), drop=True)


def test_a_failure_of_a_judge_is_no_score() -> None:
    with pytest.raises(RewardFailed, match="judge unavailable"):
        scored(make_sample(), Fixed(RewardFailed("judge unavailable")), functions=Functions())


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (("chats",), "'chats': the data have no such source; choose from chat, sums"),
        (("chat",), "'sums': no judge scores this source; add a judge or a function for it"),
    ],
)
def test_sources_that_do_not_exist_or_that_nothing_scores_are_refused(
    sources: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sources("judge", [endpoint(sources=sources)], ["chat", "sums"])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pattern": "("}, "this is no regular expression"),
        ({"pattern": "score"}, "it has 0 groups"),
        ({"pattern": "(a)", "field": "score"}, "pattern and field are both set"),
        ({"scale": (1, 1)}, "has no width"),
        ({"parameters": {"n": 2}}, "parameters.n is set by the judge"),
        ({"url": "http://user:secret@host/v1"}, "should match pattern"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        endpoint(**changes)


def test_two_judges_need_two_names() -> None:
    with pytest.raises(ValueError, match="2 judges or functions have the name 'judge'"):
        RewardSettings(judges=(endpoint(), endpoint()))
