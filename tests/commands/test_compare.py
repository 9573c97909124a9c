"""What a race's laps come to."""

from dataclasses import MISSING, fields
from io import StringIO

import pytest
from rich.console import Console

from tailrace.commands.compare import FIRST_GROUPS, Results
from tailrace.commands.laps import Lap


def lap(main_s: float, *, first_s: float = 1.0, **figures: float) -> Lap:
    given = {field.name: 0.5 for field in fields(Lap) if field.default is MISSING}
    given |= {
        "trainer_compute_s": 3.0,
        "rollout_time_s": 4.0,
        "main_time_s": main_s,
        "first_dispatch_s": first_s,
    }
    return Lap(**(given | figures))


RESULTS = Results(
    {
        "serial": [lap(9.0), lap(8.0), lap(7.0)],
        "rolloutpipe": [lap(6.0), lap(4.9), lap(5.0)],
        FIRST_GROUPS: [lap(1.0, first_s=0.5), lap(1.0, first_s=1.5), lap(1.0, first_s=2.0)],
    }
)


def test_the_bound_is_the_rollout_alone_or_the_first_groups_and_all_the_training() -> None:
    assert RESULTS.bound_s == max(4.0, 1.5 + 3.0)


def test_without_serial_there_is_no_bound() -> None:
    assert Results({"rolloutpipe": [lap(5.0)]}).bound_s is None


def test_numbers_are_medians_with_their_spread() -> None:
    numbers = RESULTS.numbers()
    assert numbers["bound_s"] == 4.5
    schedules = numbers["schedules"]
    assert isinstance(schedules, dict) and list(schedules) == ["serial", "rolloutpipe"]
    assert schedules["serial"]["main_time_s"] == 8.0
    assert schedules["serial"]["main_time_s_spread"] == [7.0, 9.0]


def test_ages_are_nested_and_what_no_lap_has_is_null() -> None:
    laps = [lap(9.0, staleness_mean=2.0, staleness_max=3.0), lap(8.0, staleness_mean=1.0, length_bias=0.25)]
    numbers = Results({"april": laps}).numbers()["schedules"]
    assert isinstance(numbers, dict)
    april = numbers["april"]
    assert april["staleness"] == {"mean": 1.5, "max": 1.75}
    assert (april["length_bias"], april["time_to_reward_s"]) == (0.25, None)
    assert [each["main_time_s"] for each in april["laps"]] == [9.0, 8.0]


def test_the_typical_repetition_is_the_one_nearest_to_the_median() -> None:
    assert RESULTS.typical("serial") == 1
    assert RESULTS.typical("rolloutpipe") == 2


@pytest.mark.parametrize("cell", ["8.00 s [7.00 - 9.00]", "-37.5%", "86%", "+11.1%"])
def test_the_table_says_how_much_of_the_gap_is_closed(cell: str) -> None:
    console = Console(file=StringIO(), width=120)
    console.print(RESULTS.table())
    assert cell in console.file.getvalue()  # type: ignore[attr-defined]
