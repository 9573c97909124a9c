"""What errors say, and what they carry."""

from tailrace.errors import BadRow, ConfigError, RewardFailed


def test_a_config_error_says_key_value_problem_and_remedy() -> None:
    error = ConfigError("run.rounds", 0, "it is less than one", "set it to 1 or more")
    assert str(error) == "run.rounds = 0: it is less than one; set it to 1 or more"


def test_a_config_error_can_be_told_again_from_its_parts() -> None:
    """As it is when it comes from another process."""
    error = ConfigError("model.path", "nowhere", "there is no such folder", "name another")
    assert str(ConfigError(error.key, error.value, error.problem, error.remedy)) == str(error)


def test_data_errors_carry_the_reason_under_which_they_are_counted() -> None:
    assert (str(RewardFailed("timeout")), RewardFailed("timeout").reason) == ("timeout", "timeout")
    assert str(RewardFailed("raised", "KeyError('x')")) == "raised: KeyError('x')"
    assert (str(BadRow("no prompt", "row 3")), BadRow("no prompt").reason) == (
        "no prompt: row 3",
        "no prompt",
    )
