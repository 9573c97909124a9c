import pytest
from record_story import Story, make_group, pipelined_round, play

from tailrace.record.events import Published, RequestEnded, RequestStarted, RoundEnded, RoundStarted
from tailrace.record.moments import LengthStats
from tailrace.record.rows import RoundBound, RoundRow
from tailrace.record.steps import RoundMeter


def test_a_round_is_measured_as_in_the_paper() -> None:
    meter = RoundMeter()
    play(pipelined_round().events, meter)
    assert meter.reports == [
        RoundRow(
            round=0,
            end_s=25.0,
            duration_s=15.0,
            main_time_s=14.0,
            bound_s=pytest.approx(9.0),
            bound=RoundBound(
                "round 0: 14.0 s, bound 9.0 s (its longest response); "
                "the trainer waited 4.0 s for sample 0.0/1 on engine-0",
                run_time_s=14.0,
                run_bound_s=pytest.approx(8.5),
            ),
            rollout_time_s=10.0,
            first_dispatch_s=4.0,
            trainer_compute_s=6.0,
            wait_s=8.0,
            waiting_ratio=8 / 14,
            start_ratio=4 / 14,
            publish_s=1.0,
            num_steps=2,
            num_groups=2,
            num_samples=4,
            num_tokens=40,
            num_generated=40,
            generated_tokens_per_s=4.0,
            reward=0.75,
            lengths=LengthStats(mean=10.0, min=4, p50=6, p90=20, p99=20, max=20),
            first_step_length=5.0,
            last_step_length=15.0,
        )
    ]


def test_waits_between_two_dispatches_count_in_the_headline_and_not_in_equation_4() -> None:
    report = _only_report(pipelined_round())
    mid_round_wait_s = report.wait_s - report.first_dispatch_s
    assert mid_round_wait_s == 4.0


def test_what_happens_between_two_rounds_is_in_neither() -> None:
    story = pipelined_round()
    evaluated = make_group(-1, [1000], [1.0])
    story.request(evaluated.samples[0], 26, 90)
    pipelined_round(story, round=1, start_s=100.0)
    meter = RoundMeter()
    play(story.events, meter)
    first, second = meter.reports
    assert (first.round, second.round) == (0, 1)
    assert (first.main_time_s, second.main_time_s) == (14.0, 14.0)
    assert (first.num_generated, second.num_generated) == (40, 40)


def test_a_request_that_outlives_its_round_leaves_the_rollout_time_open() -> None:
    story = pipelined_round()
    straggler = make_group(9, [7], [0.0]).samples[0]
    story.request(straggler, 13, 99, outcome="cancelled")
    report = _only_report(story)
    assert report.rollout_time_s is None
    assert report.generated_tokens_per_s == 40 / 15  # over the whole round, publishing included


def test_a_request_of_an_earlier_round_gives_tokens_but_does_not_lengthen_the_rollout() -> None:
    story = pipelined_round()
    carried = make_group(9, [7], [0.0]).samples[0]
    story.tell(
        RequestStarted(5, carried.id, "engine-0", 3), RequestEnded(23, carried.id, "engine-0", 7, 4, "stop")
    )
    report = _only_report(story)
    assert report.rollout_time_s == 10.0
    assert report.num_generated == 44


def test_a_round_that_trained_nothing_is_not_reported() -> None:
    meter = RoundMeter()
    play([RoundStarted(0.0, 0, 0), RoundEnded(5.0, 0)], meter)
    assert meter.reports == []


def test_percentiles_are_lengths_that_occurred() -> None:
    lengths = list(range(100, 0, -1))
    assert LengthStats.of(lengths) == LengthStats(mean=50.5, min=1, p50=50, p90=90, p99=99, max=100)
    assert LengthStats.of([7]) == LengthStats(mean=7.0, min=7, p50=7, p90=7, p99=7, max=7)


def _only_report(story: Story) -> RoundRow:
    meter = RoundMeter()
    play(story.events, meter)
    (report,) = meter.reports
    return report


def test_the_share_of_changed_weights_is_a_mean_over_publications() -> None:
    *events, last = pipelined_round().events
    assert isinstance(last, RoundEnded)
    meter = RoundMeter()
    published = [Published(20.0, 21.0, version, share) for version, share in enumerate((0.25, None, 0.75))]
    play([*events, *published, last], meter)
    assert [report.changed_weights for report in meter.reports] == [0.5]
