"""Any function as a reward: arguments by name, async, and everything that is no finite number."""

import asyncio
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.data.base import ProceduralSettings, RowsSettings
from tailrace.errors import ConfigError, RewardFailed
from tailrace.reward.base import RewardSettings
from tailrace.reward.functions import Scorer

ROWS = RowsSettings(path=Path("rows.jsonl"))
CHAIN = ProceduralSettings(task="chain_sum", answer=r"(-?\d+)$")


def test_arguments_are_given_by_name():
    def reward(answer, completion, bonus=0.5):
        return float(completion == answer) + bonus

    assert Scorer(reward)("q", "4", {"answer": "4", "unused": 1}) == 1.5
    assert Scorer(reward)("q", "4", {"answer": "4", "bonus": 2.0}) == 3.0


def test_the_rest_of_the_row_goes_to_kwargs():
    seen = {}

    def reward(prompt, **kwargs):
        seen.update(kwargs)
        return 0

    Scorer(reward)("q", "c", {"a": 1, "b": [2]})
    assert seen == {"completion": "c", "a": 1, "b": [2]}


def test_the_texts_win_over_columns_of_their_names():
    def reward(prompt, completion):
        return float((prompt, completion) == ("q", "c"))

    assert Scorer(reward)("q", "c", {"prompt": [{"role": "user"}], "completion": "gold"}) == 1.0


def test_async_functions_share_one_loop():
    loops = []

    async def reward(completion):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return len(completion)

    scorer = Scorer(reward)
    assert [scorer("", "ab", {}), scorer("", "abc", {})] == [2.0, 3.0]
    assert loops[0] is loops[1]
    scorer.close()


def test_a_callable_object_is_a_function():
    class Judge:
        async def __call__(self, completion):
            return 1

    scorer = Scorer(Judge())
    assert scorer("", "", {}) == 1.0
    scorer.close()


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9) | st.booleans())
def test_finite_numbers_come_back_as_floats(number):
    assert Scorer(lambda: number)("", "", {}) == float(number)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), Fraction(1, 2)])
def test_numbers_of_other_libraries_count(number):
    assert Scorer(lambda: number)("", "", {}) == 0.5


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "nan"),
        (np.float32("nan"), "nan"),
        (math.inf, "infinite"),
        ("1.0", "not a number"),
        (None, "not a number"),
        ([1.0], "not a number"),
        (np.zeros(2), "not a number"),
    ],
)
def test_what_is_no_finite_number_fails_with_a_reason_to_count(value, reason):
    with pytest.raises(RewardFailed) as failed:
        Scorer(lambda: value)("", "", {})
    assert failed.value.reason == reason


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), AssertionError()])
def test_a_function_that_raises_fails_the_sample_alone(error):
    def reward():
        raise error

    with pytest.raises(RewardFailed, match=type(error).__name__) as failed:
        Scorer(reward)("", "", {})
    assert failed.value.reason == "raised"


def test_a_column_that_a_row_lacks_fails_that_sample():
    with pytest.raises(RewardFailed, match="missing 1 required positional argument: 'answer'"):
        Scorer(lambda answer: 1.0)("", "", {})


def test_a_function_is_loaded_from_a_file_or_a_module(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def reward(completion): return len(completion)")
    assert Scorer.load(RewardSettings(function=f"{file}:reward"), ROWS)("", "abc", {}) == 3.0
    assert Scorer.load(RewardSettings(function="math:fsum"), ROWS)


def test_without_a_function_the_task_scores():
    scorer = Scorer.load(RewardSettings(), CHAIN)
    assert scorer("1 + 2 =", "1 + 2 = 3", {"question": "", "answer": "3", "metadata": {}}) == 1.0
    assert scorer("1 + 2 =", "1 + 2 = 4", {"question": "", "answer": "3", "metadata": {}}) == 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no.such.module:reward", "reward.function = 'no.such.module:reward': it cannot be imported"),
        ("math:pi", "reward.function = 'math:pi'"),
        ("math", "reward.function = 'math'"),
        ("none.py:reward", "reward.function = 'none.py:reward'"),
        (None, "reward.function = None: rows bring no scorer of their own"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(function, message):
    with pytest.raises(ConfigError) as raised:
        Scorer.load(RewardSettings(function=function), ROWS)
    assert str(raised.value).startswith(message)
