"""Advisories on small records; each names its cause."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.page.advisories import advisories
from tailrace.page.life import Life, Request, State, Wait, Work

GOOD = {
    "loss": 0.1,
    "reward": 0.5,
    "reward_std": 0.4,
    "frac_reward_zero_std": 0.2,
    "completions/clipped_ratio": 0.1,
    "completions/max_length": 900.0,
    "samples/trained": 8.0,
    "groups/trained": 2.0,
}


def life_with(**parts: Any) -> Life:
    life = Life(Path("trace.json"), 0.0)
    for each in parts.pop("requests", ()):
        life.take_request(each)
    for name, value in parts.items():
        setattr(life, name, value)
    return life


def request(number: int, outcome: str, gained: int, *, end_s: float = 1.0) -> Request:
    return Request("engine-0", 1, 0.0, end_s, outcome, f"{number}.0/0", 100 + gained, 100)


def test_a_good_run_has_none() -> None:
    requests = [request(n, "cancelled" if n % 2 else "stop", 300) for n in range(50)]
    assert advisories([GOOD] * 9, life_with(requests=requests)) == []
    assert advisories([], None) == []


def test_a_stalled_phase_says_what_waits_for_what() -> None:
    wait = Wait(400.0, "no optimizer step for 300 s", "pool: a reward\nschedule: 8 groups")
    steps = [Work("step 3", 90.0, 100.0)]
    oldest = [
        request(7, "unfinished", 0)._replace(start_s=95.0),
        request(8, "unfinished", 0)._replace(start_s=99.0),
    ]
    (found,) = advisories([GOOD], life_with(waits=[wait], trainer=steps, unfinished=oldest))
    assert found == (
        "stalled",
        "At 400 s: no optimizer step for 300 s. What waits for what:\npool: a reward\nschedule: 8 groups\n"
        "The oldest request is sample 7.0/0 on engine-0, begun at 95 s; 2 are open.",
    )
    later = [*steps, Work("step 4", 405.0, 410.0)]
    assert advisories([GOOD], life_with(waits=[wait], trainer=later)) == []


def test_a_dead_engine_is_named_until_it_is_open_again() -> None:
    died = State("engine-1", 12.0, "dead", "signal SIGKILL")
    assert advisories([GOOD], life_with(states=[died])) == [
        ("engine dead", "engine-1 is dead since 12 s: signal SIGKILL")
    ]
    assert advisories([GOOD], life_with(states=[died, State("engine-1", 14.0, "open", "restarted")])) == []


@pytest.mark.parametrize(
    ("outcome", "parts", "cause"),
    [
        ("cancelled", {}, "the schedule stopped them: it parks or discards what it launched"),
        (
            "cancelled",
            {"publications": [Work("publish 1", 1.05, 2.0)]},
            "publications of weights stopped 30 of them",
        ),
        (
            "evicted",
            {"states": [State("engine-0", 0.5, "dead", "out of memory")]},
            "engine-0 gave 30 of them back (out of memory)",
        ),
    ],
)
def test_an_abort_storm_names_who_aborts(outcome: str, parts: dict[str, object], cause: str) -> None:
    """30 of 40 requests are aborted after 5 tokens, of 350 in a response."""
    requests = [request(n, "stop", 250) for n in range(10)] + [request(n, outcome, 5) for n in range(30)]
    found = advisories([GOOD], life_with(requests=requests, **parts))
    assert (
        "abort storm",
        f"30 of the last 40 requests were aborted, after 5 tokens in the mean of 350 in a response: {cause}",
    ) in found


def test_a_full_kv_cache_is_named_in_an_abort_storm() -> None:
    requests = [request(n, "evicted", 0) for n in range(30)]
    (found,) = advisories([GOOD | {"engines/preempted/engine-0": 12.0}], life_with(requests=requests))
    assert found.text.endswith("; the KV cache of engine-0 was full for 12 requests in the last step")


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"reward": 0.0, "reward_std": 0.0}, "no sample is right. The prompts are too hard, or the reward"),
        ({"reward": 0.95, "reward_std": 0.1}, "most groups are all right or all wrong. Use prompts of"),
        ({"reward": -1.0, "reward_std": 0.1}, "most groups get the same reward. Look at the reward function"),
    ],
)
def test_groups_without_variance_are_explained_by_their_rewards(row: dict[str, float], cause: str) -> None:
    (found,) = advisories([GOOD] * 3 + [GOOD | row | {"frac_reward_zero_std": 0.9}] * 5, None)
    assert found.kind == "groups without variance"
    assert found.text.startswith("In 90% of the groups of the last 5 steps all rewards are equal")
    assert cause in found.text


def test_filtered_groups_count_among_those_without_variance() -> None:
    """2 of 18 groups are trained, and a fifth of these has equal rewards: (0.4 + 16) / 18."""
    (found,) = advisories([GOOD | {"groups/filtered/zero_variance": 16.0}], None)
    assert found.text.startswith("In 91% of the groups")


def test_truncation_names_the_limit() -> None:
    (found,) = advisories([GOOD | {"completions/clipped_ratio": 0.5}], None)
    assert found == (
        "truncation",
        "50% of the samples of the last step end at the length limit (900 tokens): their rewards are those "
        "of unfinished answers. Raise sampling.max_completion_tokens, or shorten the answers.",
    )


def test_rewards_that_fail_are_named_by_their_reason() -> None:
    row = GOOD | {"completions/failed/ValueError": 6.0, "completions/failed/reward_timeout": 2.0}
    assert advisories([row], None) == [
        ("rewards fail", "8 samples of the last step have no reward, most by: ValueError")
    ]


def test_steps_without_a_call_of_a_tool_are_named() -> None:
    (found,) = advisories([GOOD | {"rewards/environment/calls": 0.0}] * 3, None)
    assert found.kind == "no calls" and found.text.startswith("No sample of the last 3 steps calls a tool.")
    called = [GOOD | {"rewards/environment/calls": calls} for calls in (0.0, 0.5, 0.0)]
    assert advisories(called, None) == []
