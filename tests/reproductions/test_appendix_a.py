"""PipelineRL's Appendix A: the printed case study, and its equations on small numbers."""

from dataclasses import replace

import pytest

from reproductions import appendix_a, pipelinerl
from reproductions.appendix_a import Cluster, Lengths, PowerLaw
from reproductions.pipelinerl import CLUSTER, LENGTHS, STEPS, case_study

LINEAR = Cluster(devices=4, batch=8, train_flashes=2.0, utilization=lambda h: h / 100)


def test_the_search_finds_the_printed_h_and_i_at_the_lag_that_they_have() -> None:
    found = appendix_a.fastest_pipeline(CLUSTER, LENGTHS, 132)
    assert (found.H, found.I) == (192, 44)
    assert appendix_a.max_lag(CLUSTER, LENGTHS, 192, 44) == 132
    assert (found.r_gen, found.r_train, found.r) == pytest.approx((16.9, 17.08, 16.9), abs=0.005)


def test_conventional_rl_has_the_printed_throughputs() -> None:
    conventional = appendix_a.conventional(CLUSTER, LENGTHS, STEPS)
    assert conventional.r_gen == pytest.approx(18.3, abs=0.05)
    assert conventional.r_train == pytest.approx(26.02, abs=0.005)
    assert conventional.r == pytest.approx(10.7, abs=0.05)


def test_every_bar_of_the_case_study_holds() -> None:
    table = case_study()
    assert [figure.what for figure in table.figures if figure.holds is False] == []
    assert sum(figure.holds is True for figure in table.figures) == 10
    assert {figure.kind for figure in table.figures} == {"fitted", "determined"}


@pytest.mark.parametrize("exponent", [0.85, 0.9, 1.0])
def test_any_exponent_of_the_utilization_gives_the_same_h_i_and_r(exponent: float) -> None:
    """So they are fitted: the utilization passes through the printed r_gen at the printed H and I."""
    u = pipelinerl.PRINTED_R_GEN / pipelinerl.PRINTED_I / pipelinerl.PRINTED_H**exponent
    cluster = replace(CLUSTER, utilization=PowerLaw(u, exponent, pipelinerl.SATURATION))
    found = appendix_a.fastest_pipeline(cluster, LENGTHS, 132)
    assert (found.H, found.I) == (192, 44)
    assert found.r == pytest.approx(16.9)
    fitted = [figure.what for figure in case_study().figures if figure.kind == "fitted"]
    assert fitted == ["H", "I", "r_gen", "r", "r_gen", "r_train"]


def test_generation_time_is_the_sum_over_decode_steps() -> None:
    """Two steps of B = 8 on N = 4 devices: S = 16. L = 4: h(l) = 16, 12, 8, 4, and h/N = 4, 3, 2, 1. Where U
    is h/100, every decode step takes 100 flashes. K = S * 2.5 = 40 tokens in 400 flashes."""
    assert list(Lengths(4).in_progress(16)) == [16, 12, 8, 4]
    conventional = appendix_a.conventional(LINEAR, Lengths(4), 2)
    assert conventional.r_gen == pytest.approx(40 / 400)
    assert conventional.r_train == 4 / 2.0
    assert conventional.r == pytest.approx(1 / (10 + 0.5))


def test_the_lag_counts_the_batches_generated_during_the_longest_sequence() -> None:
    """H I L / (mean B) = 6 * 3 * 4 / (2.5 * 8) = 3.6."""
    assert appendix_a.max_lag(LINEAR, Lengths(4), 6, 3) == 4


def test_a_lag_that_no_split_can_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="lag above 0"):
        appendix_a.fastest_pipeline(LINEAR, Lengths(4), 0)
