import pytest

from helpers.record_story import PIPELINED_FIGURES, Story, make_group, pipelined_round, play
from tailrace.record.bounds import RoundBound
from tailrace.record.events import Published, RequestEnded, RequestStarted, RoundEnded, RoundStarted, Row
from tailrace.record.figures import counts_of, rounds_of
from tailrace.record.summary import Summary


def own_figures(row: Row) -> Row:
    """Without what was counted since the last step."""
    return {name: value for name, value in row.items() if name not in counts_of([row])}


def test_a_round_is_measured_as_in_the_paper() -> None:
    summary = Summary()
    play(pipelined_round().events, summary)
    assert [own_figures(row) for row in rounds_of(summary.rows)] == [{"round": 0, **PIPELINED_FIGURES}]
    assert [summary.bound] == [
        RoundBound(
            time_s=24.0,
            gap="round 1 took 14.0 s, 9.0 s would do for its longest response; "
            "the trainer waited 4.0 s for sample 0.0/1 on engine-0",
            run_time_s=14.0,
            run_bound_s=pytest.approx(8.5),
        )
    ]


def test_waits_between_two_dispatches_count_in_the_headline_and_not_in_equation_4() -> None:
    report = _only_report(pipelined_round())
    mid_round_wait_s = report["round/wait_s"] - report["round/first_dispatch_s"]
    assert mid_round_wait_s == 4.0


def test_what_happens_between_two_rounds_is_in_neither() -> None:
    story = pipelined_round()
    evaluated = make_group(-1, [1000], [1.0])
    story.request(evaluated.samples[0], 26, 90)
    pipelined_round(story, round=1, start_s=100.0)
    summary = Summary()
    play(story.events, summary)
    first, second = rounds_of(summary.rows)
    assert (first["round"], second["round"]) == (0, 1)
    assert (first["round/main_time_s"], second["round/main_time_s"]) == (14.0, 14.0)
    assert (first["round/num_generated"], second["round/num_generated"]) == (40, 40)


def test_a_request_that_outlives_its_round_leaves_the_rollout_time_open() -> None:
    story = pipelined_round()
    straggler = make_group(9, [7], [0.0]).samples[0]
    story.request(straggler, 13, 99, outcome="cancelled")
    report = _only_report(story)
    assert "round/rollout_time_s" not in report
    assert report["round/generated_tokens_per_s"] == 40 / 15  # over the whole round, publishing included


def test_a_request_of_an_earlier_round_gives_tokens_but_does_not_lengthen_the_rollout() -> None:
    story = pipelined_round()
    carried = make_group(9, [7], [0.0]).samples[0]
    story.tell(
        RequestStarted(5, carried.id, "engine-0", 3), RequestEnded(23, carried.id, "engine-0", 7, 4, "stop")
    )
    report = _only_report(story)
    assert report["round/rollout_time_s"] == 10.0
    assert report["round/num_generated"] == 44


def test_a_round_that_trained_nothing_is_not_reported() -> None:
    summary = Summary()
    play([RoundStarted(0.0, 0, 0), RoundEnded(5.0, 0)], summary)
    assert rounds_of(summary.rows) == []


def _only_report(story: Story) -> Row:
    summary = Summary()
    play(story.events, summary)
    (report,) = rounds_of(summary.rows)
    return report


def test_the_share_of_changed_weights_is_a_mean_over_publications() -> None:
    *events, last = pipelined_round().events
    assert isinstance(last, RoundEnded)
    summary = Summary()
    published = [Published(20.0, 21.0, version, share) for version, share in enumerate((0.25, None, 0.75))]
    play([*events, *published, last], summary)
    assert [row["round/changed_weights"] for row in rounds_of(summary.rows)] == [0.5]


def test_publications_that_recompute_the_cache_are_counted() -> None:
    *events, last = pipelined_round().events
    summary = Summary()
    published = [
        Published(20.0, 21.0, 1, None, "recompute"),
        Published(21.0, 22.0, 2),
        Published(22.0, 23.0, 3, kv="recompute"),
    ]
    play([*events, *published, last], summary)
    assert sum(row.get("kv/recomputed", 0) for row in summary.rows) == 2
