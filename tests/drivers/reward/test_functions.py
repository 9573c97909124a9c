"""Any function as a reward: arguments by name, async, and everything that is no finite number."""

import asyncio
import math
import re
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.drivers.data.settings import ProceduralSettings, RowsSettings
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.functions import MAX_DETAIL, RewardFunction, Scorer
from tailrace.drivers.reward.settings import FunctionSettings, RewardSettings
from tailrace.errors import ConfigError, RewardFailed


def one(function, **settings):
    return RewardFunction(function, FunctionSettings(function="mine.py:f", **settings), "reward.function")


def scored(function, completion="", row=None, *, prompt="q", ids=(), finish_reason="stop"):
    with closing(Scorer([one(function)])) as scorer:
        return scorer(Call(prompt, completion, list(ids), finish_reason, row or {})).reward


ROWS = RowsSettings(path=Path("rows.jsonl"))
CHAIN = ProceduralSettings(task="chain_sum", answer=r"(-?\d+)$")


def test_arguments_are_given_by_name():
    def reward(answer, completion, bonus=0.5):
        return float(completion == answer) + bonus

    assert scored(reward, "4", {"answer": "4", "unused": 1}) == 1.5
    assert scored(reward, "4", {"answer": "4", "bonus": 2.0}) == 3.0


def test_finish_reason_and_token_ids_are_given_by_name():
    def reward(completion_ids, finish_reason):
        return sum(completion_ids) if finish_reason == "length" else -1.0

    assert scored(reward, ids=[3, 4], finish_reason="length") == 7.0
    assert scored(reward, ids=[3, 4], finish_reason="stop") == -1.0


def test_the_rest_of_the_row_goes_to_kwargs():
    seen = {}

    def reward(prompt, **kwargs):
        seen.update(kwargs)
        return 0

    scored(reward, "c", {"a": 1, "b": [2]})
    own = {"completion": "c", "completion_ids": [], "finish_reason": "stop", "completion_prefix": ""}
    assert seen == {**own, "a": 1, "b": [2]}


def test_the_texts_win_over_columns_of_their_names():
    def reward(prompt, completion):
        return float((prompt, completion) == ("q", "c"))

    assert scored(reward, "c", {"prompt": [{"role": "user"}], "completion": "gold"}) == 1.0


def test_async_functions_share_one_loop():
    loops = []

    async def reward(completion):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return len(completion)

    scorer = Scorer([one(reward)])
    assert [scorer(Call("", word, [], "stop", {})).reward for word in ("ab", "abc")] == [2.0, 3.0]
    assert loops[0] is loops[1]
    scorer.close()


def test_a_callable_object_is_a_function():
    class Judge:
        async def __call__(self, completion):
            return 1

    scorer = Scorer([one(Judge())])
    assert scorer(Call("", "", [], "stop", {})).reward == 1.0
    scorer.close()


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9) | st.booleans())
def test_finite_numbers_come_back_as_floats(number):
    assert scored(lambda: number) == float(number)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), Fraction(1, 2), torch.tensor(0.5)])
def test_numbers_of_other_libraries_count(number):
    assert scored(lambda: number) == 0.5


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
        (torch.zeros(2), "not a number"),
        (10**400, "infinite"),
        (-math.inf, "infinite"),
    ],
)
def test_what_is_no_finite_number_fails_with_a_reason_to_count(value, reason):
    with pytest.raises(RewardFailed) as failed:
        scored(lambda: value)
    assert failed.value.reason == reason


def test_the_largest_float_is_a_reward():
    assert scored(lambda: 1e308) == 1e308


def test_bools_and_numpy_bools_are_zero_and_one():
    assert [scored(lambda completion_ids: completion_ids[0], ids=[v]) for v in (True, np.bool_(False))] == [
        1,
        0,
    ]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), AssertionError(), KeyboardInterrupt()])
def test_a_function_that_raises_fails_the_sample_alone(error):
    def reward():
        raise error

    with pytest.raises(RewardFailed, match=type(error).__name__) as failed:
        scored(reward)
    assert failed.value.reason == "raised"


def test_the_detail_of_a_failure_is_the_traceback_of_the_users_frames():
    def inner(answer):
        return {}[answer]

    async def reward(answer):
        await asyncio.sleep(0)
        return inner(answer)

    with pytest.raises(RewardFailed) as failed:
        scored(reward, row={"answer": "x"})
    lines = failed.value.detail.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.split(", in ")[1] for line in lines if line.startswith("  File")] == ["reward", "inner"]
    assert lines[-1] == "KeyError: 'x'"


def test_the_detail_of_a_failure_is_bounded():
    def reward():
        raise ValueError("x" * 100_000)

    with pytest.raises(RewardFailed) as failed:
        scored(reward)
    assert len(failed.value.detail) == MAX_DETAIL + len("... ")


def first_match(completion):
    return float(re.search("[0-9]+", completion).group())


@pytest.mark.parametrize(
    ("function", "is_defect"),
    [
        (lambda answer: 1.0, True),  # a TypeError: the row lacks it
        (lambda: undefined, True),  # noqa: F821
        (lambda completion: completion.no_such_method(), True),
        (first_match, False),  # None has no group: there is no match
        (lambda completion: completion.split()[0], False),
        (lambda completion: float(completion), False),
    ],
)
def test_exceptions_that_do_not_depend_on_the_completion_show_a_defect(function, is_defect):
    with pytest.raises(RewardFailed) as failed:
        scored(function)
    assert failed.value.is_defect == is_defect


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda anwser: 1.0, "its parameter 'anwser' is no column of the data (columns: question, answer)"),
        (lambda question, /: 1.0, "its parameter 'question' cannot be given by name"),
    ],
)
def test_parameters_that_nothing_gives_are_refused(function, message):
    with pytest.raises(ConfigError, match=re.escape(f"reward.function = 'mine.py:f': {message}")):
        one(function).check_columns(["question", "answer"])


def test_parameters_with_a_column_or_a_default_are_accepted():
    def reward(prompt, completion, completion_ids, finish_reason, answer, bonus=1.0, *rest, **columns):
        return 0.0

    one(reward).check_columns(["answer"])


def test_a_function_is_loaded_from_a_file_or_a_module(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def reward(completion): return len(completion)")
    scorer = Scorer.load(RewardSettings(function=f"{file}:reward"), ROWS)
    assert scorer(Call("", "abc", [], "stop", {})).reward == 3.0
    assert Scorer.load(RewardSettings(function="json:dumps"), ROWS)


def test_without_a_function_the_task_scores():
    scorer = Scorer.load(RewardSettings(), CHAIN)
    row = {"question": "", "answer": "3", "metadata": {}}
    answers = ("1 + 2 = 3", "1 + 2 = 4")
    assert [scorer(Call("1 + 2 =", answer, [], "stop", row)).reward for answer in answers] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no.such.module:reward", "reward.function = 'no.such.module:reward': it cannot be imported"),
        ("builtins:dict", "reward.function = 'builtins:dict': its parameters cannot be known"),
        ("math:pi", "reward.function = 'math:pi'"),
        ("maths", "reward.function = 'maths': this names no function; write 'package.module:name', "),
        ("none.py:reward", "reward.function = 'none.py:reward'"),
        (None, "reward.function = None: rows bring no scorer of their own"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(function, message):
    with pytest.raises(ConfigError) as raised:
        Scorer.load(RewardSettings(function=function), ROWS)
    assert str(raised.value).startswith(message)
