"""How a race is held against its bars."""

from race import interval, ratios, report


def test_ratios_are_of_the_same_seed() -> None:
    assert ratios([{"x": 2.0}, {"x": 9.0}], [{"x": 1.0}, {"x": 3.0}], "x") == [2.0, 3.0]


def test_an_interval_is_student_s_over_the_seeds() -> None:
    assert interval([2.0]) == "2.00"
    assert interval([1.0, 2.0, 3.0]) == "2.00 +- 2.48"


def test_bars_are_met_or_missed(capsys) -> None:  # type: ignore[no-untyped-def]
    lap = {"samples_per_s": 1.0, "tokens_per_s": 9.0, "rollout_tokens_per_s": 1.0}
    lap |= {"length_bias": 0.01, "reward": 0.5}
    faster = {"samples_per_s": 1.3, "tokens_per_s": 18.0, "length_bias": -0.03}
    report({"serial": [lap], "tailbatch": [lap | faster], "april": [lap]})
    printed = capsys.readouterr().out.splitlines()
    bars = [line.split("bar")[1].split() for line in printed if "bar" in line]
    assert [words[1] for words in bars] == ["MISSED", "met"]
    assert [words[-1] for words in bars] == ["1.00", "2.00"]
    assert [line.split()[-1] for line in printed if "length bias" in line] == ["met", "MISSED"]
