"""RollPacker's planner under memory pressure."""

from reproductions.rollpacker_planner import figure_6, rollouts


def test_short_rounds_preempt_more_than_long_ones_and_a_larger_size_has_fewer_preemptions() -> None:
    ours = {(figure.row, figure.what): figure.ours for figure in figure_6().figures}
    assert 1.5 < ours["TP 1", "preemptions, short over long rounds"] < 2
    assert abs(ours["TP 1", "rollout, short over long rounds"] - 87) < 5
    for kind in ("short", "long"):
        assert ours[f"TP 2, {kind}", "preemptions, reduction"] > 3
        assert ours[f"TP 2, {kind}", "rollout, reduction"] > 10


def test_short_rounds_grow_before_long_ones_and_are_then_faster_than_at_the_start() -> None:
    short, long = rollouts("Qwen2.5-14B", 16, 2, 0, 10, planned=True)
    assert [one.size for one in short] == [2, 2, 2, 4, 4, 4, 4, 4]
    assert [one.size for one in long] == [2, 2]
    fixed, _ = rollouts("Qwen2.5-14B", 16, 2, 0, 10)
    assert [one.preemptions for one in fixed[:3]] == [one.preemptions for one in short[:3]]
    for before, after in zip(fixed[4:], short[4:], strict=True):
        assert after.preemptions < before.preemptions and after.seconds < before.seconds
