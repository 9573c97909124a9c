"""The tree of errors, as the module draws it."""

from tailrace import errors
from tailrace.errors import BadRow, ConfigError, RewardFailed, TailraceError


def test_the_drawing_shows_every_error_once_under_its_parent() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if "|--" not in line and "`--" not in line:
            path = [line] if line == "TailraceError" else path
            continue
        depth = line.index("--") // 4 + 1
        name = line.split("-- ")[1].split()[0]
        path[depth:] = [name]
        drawn[name] = path[depth - 1]
    ours = {
        name: value.__base__.__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, TailraceError) and value is not TailraceError
    }
    assert drawn == ours


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
