"""How a race is held against its bars."""

from race import interval, ratios, report


def test_ratios_are_of_the_same_seed() -> None:
    assert ratios([{"x": 2.0}, {"x": 9.0}], [{"x": 1.0}, {"x": 3.0}], "x") == [2.0, 3.0]


def test_an_interval_is_student_s_over_the_seeds() -> None:
    assert interval([2.0]) == "2.00"
    assert interval([1.0, 2.0, 3.0]) == "2.00 +- 2.48"


def test_bars_are_met_or_missed(capsys) -> None:  # type: ignore[no-untyped-def]
    lap = {"samples_per_s": 1.0, "rollout_tokens_per_s": 1.0, "length_bias": 0.01, "reward": 0.5}
    report(
        {"serial": [lap], "tailbatch": [lap | {"samples_per_s": 1.3, "length_bias": -0.03}], "april": [lap]}
    )
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in printed if "bar" in line] == ["MISSED", "met"]
    assert [line.split()[-1] for line in printed if "length bias" in line] == ["met", "MISSED"]
