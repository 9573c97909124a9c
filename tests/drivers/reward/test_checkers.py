"""Checkers that a config names: mathematics, exact match, JSON with a schema."""

import json
from pathlib import Path

import pytest

from tailrace.drivers.data.settings import ProceduralSettings, RowsSettings
from tailrace.drivers.reward import checkers
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.reward.settings import FunctionSettings, RewardSettings
from tailrace.errors import ConfigError, RewardFailed
from tailrace.importing import install

ROWS = RowsSettings(path=Path("rows.jsonl"))
CHAIN = ProceduralSettings(task="chain_sum", answer=r"(-?\d+)$")


def checked(name, completion, row, **arguments):
    settings = RewardSettings(functions=(FunctionSettings(function=name, arguments=arguments),))
    return Scorer.load(settings, ROWS)(Call("", completion, [], "stop", row)).reward


@pytest.mark.parametrize(
    ("function", "completion", "row"),
    [
        ("math", r"\boxed{72}", {"answer": "72"}),
        ("exact_match", "72", {"answer": "72"}),
        ("json_schema", "[72]", {"schema": {"type": "array"}}),
        (None, "1 + 2 = 3", {"question": "", "answer": "3", "metadata": {}}),
    ],
)
def test_a_response_that_was_cut_off_gets_nothing_unless_a_setting_asks_for_it(function, completion, row):
    for completed_only, finish_reason, reward in (
        (True, "stop", 1.0),
        (True, "length", 0.0),
        (False, "length", 1.0),
    ):
        settings = RewardSettings(function=function, completed_only=completed_only)
        scorer = Scorer.load(settings, CHAIN if function is None else ROWS)
        assert scorer(Call("", completion, [], finish_reason, row)).reward == reward


def test_a_function_of_the_users_decides_itself_about_a_response_that_was_cut_off(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def half(completion, finish_reason): return 0.5 if finish_reason == 'length' else 1.0")
    scorer = Scorer.load(RewardSettings(function=f"{file}:half"), ROWS)
    assert scorer(Call("", "72", [], "length", {})).reward == 0.5


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        ("The answer is 72.", "72", 1.0),
        ("The answer is 71.", "72", 0.0),
        (r"\boxed{\frac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", "1/2", 1.0),
        (r"so $x^2+1$", "1 + x^2", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"First 3, then \boxed{4}", r"We see that it is $\boxed{4}$.", 1.0),
        ("48 + 24 = 72", "Natalia sold 48/2 = 24 clips.\n#### 72", 1.0),
        ("", "72", 0.0),
        (r"\boxed{5}. Wait, \boxed{", "5", 0.0),
        (r"\boxed{5}. Wait, \boxed{7", "7", 0.0),
        (r"\boxed{5}. Wait, \boxed{6}", "6", 1.0),
        (r"\boxed{5}. Wait, \boxed{6}", "5", 0.0),
        (r"so \boxed{\frac{1}{2}}, as said", "0.5", 1.0),
    ],
)
def test_math_compares_expressions(completion, truth, reward):
    assert checked("math", completion, {"answer": truth}) == reward


def test_a_ground_truth_that_is_no_mathematics_fails_the_sample():
    with pytest.raises(RewardFailed, match="the ground truth '' is not mathematics"):
        checked("math", "72", {"answer": " "})


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        ({"reward_model": {"ground_truth": "7"}, "answer": "8"}, {}),
        ({"ground_truth": "7", "answer": "8"}, {}),
        ({"solution": "7", "answer": "8"}, {}),
        ({"answer": "7"}, {}),
        ({"answer": "8", "gold": "7"}, {"column": "gold"}),
    ],
)
def test_the_ground_truth_is_found_in_the_columns_of_peers(row, arguments):
    assert checked("exact_match", " 7\n", row, **arguments) == 1.0


@pytest.mark.parametrize("name", ["exact_match", "math"])
@pytest.mark.parametrize("truth", [None, "", []])
@pytest.mark.parametrize("completion", ["None", "", "null"])
def test_a_ground_truth_that_is_missing_fails_the_sample_by_name(name, truth, completion):
    with pytest.raises(RewardFailed, match="the ground truth is null or empty: answer") as failed:
        checked(name, completion, {"answer": truth}, column="answer")
    assert not failed.value.is_defect  # other rows may have one


def test_a_column_that_arrow_filled_with_null_does_not_hide_the_ground_truth():
    row = {"reward_model": {"ground_truth": None}, "solution": None, "answer": "7"}
    assert checked("exact_match", "7", row) == 1.0


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        ("4", 4.0, 1.0),
        ("4.0", 4, 1.0),
        ("4.5", 4, 0.0),
        ("9007199254740993", 9007199254740993, 1.0),
        ("9007199254740992", 9007199254740993, 0.0),
        ("four", 4, 0.0),
        ("true", True, 1.0),
        ("True", True, 1.0),
        ("1", True, 0.0),
        ("false", True, 0.0),
        ("4.0", "4", 0.0),  # texts are texts
        ("None", [None, "4"], 0.0),
        ("4", [None, 4.0], 1.0),
    ],
)
def test_numbers_and_booleans_compare_as_what_they_are(completion, truth, reward):
    assert checked("exact_match", completion, {"answer": truth}) == reward


def test_a_boolean_is_no_mathematics():
    with pytest.raises(RewardFailed, match="the ground truth 'True' is not mathematics"):
        checked("math", "True", {"answer": True})


def test_a_row_without_a_ground_truth_is_a_defect():
    with pytest.raises(RewardFailed, match=r"\(columns: label, .*; set the argument `column`") as failed:
        checked("exact_match", "7", {"label": "7"})
    assert failed.value.is_defect


def test_an_exact_match_may_extract_the_answer_and_know_several():
    pattern = r"<answer>(.*?)</answer>"
    row = {"answer": ["Paris", "paris"]}
    assert checked("exact_match", "<answer>Rome</answer> no, <answer> paris</answer>", row, pattern=pattern)
    assert not checked("exact_match", "paris", row, pattern=pattern)
    assert checked("exact_match", "7", {"answer": 7})


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"n": 1}', 1.0),
        ('Here it is:\n```json\n{"n": 1}\n```\nDone.', 1.0),
        ('{"n": "1"}', 0.0),
        ("{", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_is_checked_against_the_schema_of_its_row(schema, completion, reward):
    assert checked("json_schema", completion, {"schema": schema}) == reward


def test_a_schema_fetches_nothing():
    remote = {"$ref": "http://127.0.0.1:1/schema.json"}
    with pytest.raises(RewardFailed, match=r"Unresolvable: http://127\.0\.0\.1:1/schema\.json"):
        checked("json_schema", "{}", {"schema": remote})


def test_a_checker_whose_package_is_missing_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(checkers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        Scorer.load(RewardSettings(function="math"), ROWS)
    assert str(refused.value) == (
        f"reward.function = 'math': this checker needs the package math_verify; {install('math')}"
    )
