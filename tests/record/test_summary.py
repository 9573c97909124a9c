import json
from dataclasses import replace
from pathlib import Path

import pytest
from record_story import Story, pipelined_round, play

from tailrace.record.events import Evaluated, GroupEnded, RowSkipped, SampleScored, TokensWasted
from tailrace.record.metrics import MetricsWriter, read_rows
from tailrace.record.rewind import rewind_records
from tailrace.record.summary import (
    BoundSummary,
    FirstLast,
    GroupCounts,
    RunSummary,
    Summary,
    TokenCounts,
)
from tailrace.types import SampleId


def told() -> Story:
    story, lost = Story(), SampleId(9, 0, 0)
    story.tell(Evaluated(9.0, 0, 8, accuracy=0.25, mean_tokens=5.0))
    pipelined_round(story)
    story.tell(
        Evaluated(30.0, 1, 8, accuracy=0.75, mean_tokens=5.0),
        SampleScored(12.0, lost, None, "timeout", 5),
        TokensWasted(12.0, lost, 5, "no reward"),
        GroupEnded(12.0, 9, "dropped", "no reward"),
        GroupEnded(13.0, 8, "filtered", "zero variance"),
        RowSkipped(13.0, 7, "no prompt"),
    )
    return story


EXPECTED = RunSummary(
    eval=FirstLast(0.25, 0.75),
    reward=FirstLast(0.5, 1.0),
    rounds=1,
    steps=2,
    groups=GroupCounts(
        trained=2,
        filtered=1,
        dropped=1,
        reasons={"filtered/zero_variance": 1, "dropped/no_reward": 1},
        parked=0,
    ),
    tokens=TokenCounts(generated=40, trained=40, parked=0, wasted={"no_reward": 5}),
    failures={"timeout": 1},
    rows_skipped={"no_prompt": 1},
    ages=dict(
        staleness_mean=0.0,
        staleness_max=0.0,
        lag_mean=0.0,
        lag_max=0.0,
        carried_tokens=0.0,
        versions_max=1.0,
        deferrals_max=0.0,
        rounds_max=0.0,
    ),
    mismatch_kl=0.01,
    round=dict(
        main_time_s=14.0,
        rollout_time_s=10.0,
        first_dispatch_s=4.0,
        trainer_compute_s=6.0,
        wait_s=8.0,
        waiting_ratio=8 / 14,
        start_ratio=4 / 14,
        publish_s=1.0,
        generated_tokens_per_s=4.0,
    ),
    bound=BoundSummary(
        bound_s=pytest.approx(9.0),
        share=pytest.approx(9 / 14),
        run_share=pytest.approx(8.5 / 14),
        worst="round 0: 14.0 s, bound 9.0 s (its longest response); "
        "the trainer waited 4.0 s for sample 0.0/1 on engine-0",
    ),
)


def test_a_run_is_added_up() -> None:
    play(told().events, summary := Summary())
    assert summary.summary() == EXPECTED


def test_the_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "out" / "summary.json"
    play(told().events, Summary(path))
    written = json.loads(path.read_text())
    assert written["eval"] == {"first": 0.25, "last": 0.75}
    assert written["groups"]["trained"] == 2
    assert written["tokens"] == {"generated": 40, "trained": 40, "parked": 0, "wasted": {"no_reward": 5}}
    assert written["round"]["waiting_ratio"] == 8 / 14


def test_a_resumed_run_counts_its_earlier_life(tmp_path: Path) -> None:
    whole = told()
    pipelined_round(whole, round=1, start_s=100.0)
    play(whole.events, expected := Summary())

    path = tmp_path / "metrics.jsonl"
    play(whole.events, MetricsWriter(path))  # killed after round 1, whose checkpoint was never written
    again = Story(num_steps=2)
    again.tell(Evaluated(30.0, 1, 8, accuracy=0.75, mean_tokens=5.0))
    pipelined_round(again, round=1, start_s=100.0)
    rewind_records(path, tmp_path, round=1, step=2)
    earlier = read_rows(path)
    play(again.events, resumed := Summary(earlier=earlier), earlier=earlier)
    assert replace(resumed.summary(), bound=None) == replace(expected.summary(), bound=None)


def test_a_resumed_run_has_the_bounds_of_all_rounds_and_the_words_of_its_last_process(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    play(pipelined_round().events, MetricsWriter(path))
    play(pipelined_round(round=1, start_s=0.0).events, resumed := Summary(earlier=read_rows(path)))
    bound = resumed.summary().bound
    assert bound and bound.worst.startswith("round 1: 14.0 s")
    assert (bound.bound_s, bound.run_share) == pytest.approx((9.0, 8.5 / 14))


def test_a_run_that_did_nothing_has_nothing_to_say() -> None:
    play([], summary := Summary())
    result = summary.summary()
    assert (result.eval, result.reward, result.rounds, result.steps) == (None, None, 0, 0)
    assert result.round["main_time_s"] is None
