"""Closed forms of the mean staleness: the simulator agrees in small cases."""

import pytest

from reproductions.staleness import Case, closed_forms

SMALL = (
    Case("pipelinerl", 16, 8, 0.5, "uniform", 32),
    Case("pipelinerl", 64, 8, 0.5, "uniform", 32),
    Case("pipelinerl", 16, 8, 0.5, "lognormal", 32),
    Case("pipelinerl", 16, 8, 2.0, "uniform", 16),
    Case("pipelinerl", 16, 8, 2.0, "uniform", 64),
    Case("windowed_fifo", 64, 8, 4.0, "uniform"),
)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_closed_form_is_within_five_percent_of_the_simulator(case: Case) -> None:
    assert case.simulated(0, steps=300) == pytest.approx(case.closed_form(), rel=0.05)


def test_one_step_off_trains_every_token_one_publication_late() -> None:
    assert Case("one_step_off", 16, 16, 0.5, "lognormal").simulated(0, steps=20) == 1.0


@pytest.mark.parametrize(
    ("more", "by"),
    [
        ({"alive": 32}, 8 * (4 / 3) / 8),  # (N (1 + c^2) / 2) / B
        ({"tail": "lognormal"}, (2.718281828 - 4 / 3)),  # the same, N / (2 B) = 1
        ({"load": 1.0}, 0.5),  # rho
        ({"room": 64}, 0.0),  # the trainer waits: the queue is never full
    ],
)
def test_staleness_grows_with_concurrency_tail_and_utilisation_as_derived(
    more: dict[str, object], by: float
) -> None:
    case = Case("pipelinerl", 16, 8, 0.5, "uniform", 32)
    assert case._replace(**more).closed_form() - case.closed_form() == pytest.approx(by)  # type: ignore[arg-type]


def test_a_full_queue_adds_its_capacity_over_the_batch_times_the_trained_share() -> None:
    small, large = (Case("pipelinerl", 16, 8, 2.0, "uniform", room) for room in (16, 64))
    assert large.closed_form() - small.closed_form() == pytest.approx(0.5 * 48 / 8)


def test_the_table_has_each_case_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reproductions.staleness.CASES", SMALL[:1])
    form, error = closed_forms(0).figures
    assert (form.printed, form.holds) == (pytest.approx(SMALL[0].closed_form()), True)
    assert error.ours == pytest.approx(100 * (form.ours / SMALL[0].closed_form() - 1))
