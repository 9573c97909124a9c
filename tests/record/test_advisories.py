"""What optimizer steps show that a person should look at, on the page, in the terminal and in the summary."""

import io

import pytest
from rich.console import Console

from helpers.record_story import GOOD
from tailrace.drivers.assembly.display import Display
from tailrace.record.advisories import Advisor, advisories_of_steps
from tailrace.record.summary import Summary


def test_good_steps_have_none() -> None:
    assert advisories_of_steps([GOOD] * 9) == [] and advisories_of_steps([]) == []


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (
            {"reward": 0.0, "reward_std": 0.0},
            "no sample is right. The prompts ([data]) are too hard, or",
        ),
        (
            {"reward": 0.02, "reward_std": 0.1},
            "all wrong: the prompts ([data]) are too hard",
        ),
        (
            {"reward": 0.95, "reward_std": 0.1},
            "all right: the prompts ([data]) are too easy",
        ),
        ({"reward": 0.5, "reward_std": 0.1}, "most groups are all right or all wrong. Use prompts of"),
        ({"reward": 4.0, "reward_std": 0.1}, "most groups are all right or all wrong. Use prompts of"),
        ({"reward": -1.0, "reward_std": 0.1}, "most groups get the same reward. Look at reward.function and"),
    ],
)
def test_groups_without_variance_are_explained_by_their_rewards(row: dict[str, float], cause: str) -> None:
    (found,) = advisories_of_steps([GOOD] * 3 + [GOOD | row | {"frac_reward_zero_std": 0.9}] * 5)
    assert found.kind == "groups without variance"
    assert found.text.startswith("In 90% of the groups of the last 5 steps all rewards are equal")
    assert cause in found.text


def test_filtered_groups_count_among_those_without_variance() -> None:
    """2 of 18 groups are trained, and a fifth of these has equal rewards: (0.4 + 16) / 18."""
    (found,) = advisories_of_steps([GOOD | {"groups/filtered/zero_variance": 16.0}])
    assert found.text.startswith("In 91% of the groups")


def test_rewards_that_fail_are_named_by_their_reason() -> None:
    row = GOOD | {"completions/failed/ValueError": 6.0, "completions/failed/reward_timeout": 2.0}
    assert advisories_of_steps([row]) == [
        (
            "rewards fail",
            "8 samples of the last step have no reward, most by: ValueError. See reward.function, "
            "reward.timeout_s and reward.workers.",
        )
    ]


def test_steps_without_a_call_of_a_tool_are_named() -> None:
    (found,) = advisories_of_steps([GOOD | {"rewards/environment/calls": 0.0}] * 3)
    assert found.kind == "no calls" and found.text.startswith("No sample of the last 3 steps calls a tool.")
    called = [GOOD | {"rewards/environment/calls": calls} for calls in (0.0, 0.5, 0.0)]
    assert advisories_of_steps(called) == []


def test_entropy_that_is_gone_while_rewards_have_not_risen_is_a_collapse() -> None:
    early, gone = [GOOD | {"entropy": 2.0}] * 5, GOOD | {"entropy": 0.1}
    (found,) = advisories_of_steps([*early, *[GOOD] * 9, *[gone] * 5])
    assert found.kind == "entropy collapse" and "from 2 to 0.1 nats a token" in found.text
    assert "trainer.learning_rate" in found.text
    assert advisories_of_steps([*early, *[gone | {"reward": 0.9}] * 5]) == [], "a policy that has learned"
    assert advisories_of_steps([*early, *[GOOD | {"entropy": 0.3}] * 5]) == []


def test_a_figure_that_is_not_a_number_or_is_missing_is_no_advisory() -> None:
    assert advisories_of_steps([GOOD | {"reward": float("nan"), "entropy": float("nan")}] * 5) == []
    assert advisories_of_steps([{"entropy": None, "reward": None}] * 5) == []


WORTHLESS = GOOD | {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}


def test_an_advisory_appears_once_and_not_after_a_single_step() -> None:
    advisor = Advisor()
    assert [len(advisor.add(WORTHLESS | {"step": n})) for n in range(1, 6)] == [0, 0, 1, 0, 0]
    for n in range(6, 12):
        assert advisor.add(GOOD | {"step": n}) == []
    assert [each.kind for each in advisor.add(GOOD | {"step": 12, "completions/clipped_ratio": 2.0})] == [
        "truncation"
    ]
    assert list(advisor.found) == ["groups without variance", "truncation"]
    assert advisor.found["groups without variance"].startswith("step 3: In 100% of the groups of the last 3")


def test_a_resumed_run_does_not_say_again_what_its_earlier_life_has_said() -> None:
    summary = Summary(earlier=[WORTHLESS | {"step": n} for n in range(1, 5)])
    assert summary._advisor.add(WORTHLESS | {"step": 5.0}) == []
    assert summary._advisor.found["groups without variance"].startswith("step 3: ")


def test_the_terminal_says_what_the_page_says_and_the_summary_keeps_it() -> None:
    out, summary = io.StringIO(), Summary()
    notices = Display(1, lambda: "", console=Console(file=out, width=40))._notices
    lines = []
    for n in range(1, 6):
        row = WORTHLESS | {"step": n, "lag/max": 1.0, "ess": 1.0}
        summary.on(row)
        lines += notices.of(row)
    (advisory,) = advisories_of_steps([WORTHLESS] * 3)
    assert lines == [f"Advice | groups without variance | {advisory.text}"]
    assert summary._advisor.found == {"groups without variance": f"step 3: {advisory.text}"}


def test_what_is_biased_in_each_of_the_last_steps_is_named_once_the_run_has_warmed_up() -> None:
    rows = [GOOD | {"bias/length": -0.1 - 0.01 * number, "bias/source/code": 0.12} for number in range(5)]
    assert advisories_of_steps([GOOD] * 4 + rows) == []
    length, source = advisories_of_steps([GOOD] * 5 + rows)
    assert length.text.startswith(
        "The trained responses are at least 10% shorter than all that were drawn. See "
    )
    assert source.kind == "bias of code"
    assert "The share of 'code' in what was trained differs by +12% from its share in what" in source.text


@pytest.mark.parametrize("odd", [0.3, -0.05])
def test_a_bias_that_changes_its_sign_or_comes_and_goes_is_none(odd: float) -> None:
    rows = [GOOD | {"bias/length": -0.3}] * 9
    assert advisories_of_steps([*rows, GOOD | {"bias/length": odd}]) == []
