"""PipelineRL's runs, scaled down."""

from reproductions.pipelinerl import PAPER
from reproductions.pipelinerl_runs import SetUp, generation, in_turn


def test_the_lag_of_conventional_rl_grows_by_one_a_step() -> None:
    run = in_turn(SetUp(devices=8), steps=4, slots=16, batch=8)
    assert [row["lag/mean"] for row in run.steps] == [0.0, 1.0, 2.0, 3.0]
    assert run.figures["staleness_max"] == 0


def test_throughput_of_one_device_grows_less_than_the_batch_and_never_falls() -> None:
    table = generation(0)
    gains = [figure for figure in table.figures if figure.what == "of that at half the size"]
    assert [figure.printed for figure in table.figures] == [None] * len(table.figures)
    assert sorted((figure.ours for figure in gains), reverse=True) == [figure.ours for figure in gains]
    assert all(1.5 < figure.ours < 2.0 for figure in gains)
    assert any("prints curves" in note for note in table.notes)
    assert PAPER.contradictions
