"""Rewards of programs, from the completion to the reward."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from helpers.bubblewrap import needs_bubblewrap
from helpers.episodes import two_turns
from tailrace.contracts.reward import Rewards, TimeoutSettings
from tailrace.drivers.reward.settings import CodeSettings, RewardSettings
from tailrace.errors import ConfigError, RewardFailed, SandboxFailed
from tailrace.extras.sandbox import code as module
from tailrace.extras.sandbox.code import CodeKind, CodeRewards, check_cases, extract_code
from tailrace.extras.sandbox.sandbox import Execution, Sandbox
from tailrace.rollout.reward_timeout import Anchors
from tailrace.types import Group, Prompt, Sample, SampleId

SQUARES = {"tests": {"inputs": ["2", "3", "4"], "outputs": ["4", "9", "16"]}}
RIGHT = "n = int(input())\nprint(n * n)"
HALF = "n = int(input())\nprint(4 if n == 2 else 16)"


def saying(text: str, row: Mapping[str, object] = SQUARES, index: int = 0, opened: str = "") -> Sample:
    group = Group(Prompt(index, [], row=row, row_number=index, opened=opened), 1, [])
    ids = list(text.encode())
    return Sample(SampleId(index, 0, 0), group, completion_ids=ids, num_tokens=len(ids))


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode()


def rewards_of(
    sandbox: Any, settings: CodeSettings, anchors: Anchors | None = None, others: Rewards | None = None
) -> CodeRewards:
    return CodeRewards(settings, sandbox, anchors or Anchors(), decode, workers=2, others=others)


def score(*texts: str, settings: CodeSettings, anchors: Anchors | None = None) -> list[Sample]:
    samples = [saying(text) for text in texts]

    async def main() -> None:
        rewards = rewards_of(Sandbox("bubblewrap", settings), settings, anchors)
        for sample in samples:
            sample.reward = await rewards.score(sample)

    asyncio.run(main())
    return samples


def test_the_last_block_of_a_completion_is_its_program() -> None:
    text = "First:\n```python\nprint(1)\n```\nBetter:\n```py\nprint(2)\n```\nDone."
    assert extract_code(text) == "print(2)\n"
    assert extract_code("print(3)") == "print(3)"
    assert extract_code("Code (`f`): ```python\nprint(2)\n```") == "print(2)\n"
    assert extract_code("~" * 60_000) == "~" * 60_000
    assert extract_code("So:\n~~~py\nprint(1)\n~~~\n") == extract_code("```\nprint(1)\n```") == "print(1)\n"


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)",
        "```python\nprint(1)\n```\nBetter:\n```python\nprint(2)",
        "<think>```python\nprint(1)\n```",
        "<think>```python\nprint(1)\n```</think>",
    ],
)
def test_a_block_without_an_end_and_thinking_are_no_program(text: str) -> None:
    assert extract_code(text) == ""


@needs_bubblewrap
def test_a_program_in_thinking_that_the_prompt_has_begun_is_not_run() -> None:
    rewards = rewards_of(Sandbox("bubblewrap", CodeSettings()), CodeSettings())
    assert asyncio.run(rewards.score(saying(RIGHT))) == 1.0
    assert asyncio.run(rewards.score(saying(RIGHT, opened="<think>\n"))) == 0.0


FUNCTIONAL = {
    "tests": [{"input": '["ab", "a"]\n1', "output": '["ab"]', "testtype": "functional"}],
    "metadata": '{"func_name": "longer"}',
}
"""In the form of livecodebench/code_generation_lite, release_v6: inputs are lines of JSON."""
METHOD = """class Solution:
    def longer(self, words: List[str], than: int) -> List[str]:
        return [word for word in words if len(word) > than]"""


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "function", "reward"),
    [
        (METHOD, "longer", 1.0),  # the starter code uses List without an import
        ("def longer(words, than):\n    return [word for word in words if len(word) > than]", "longer", 1.0),
        (f"def longer(words, than):\n    return None\n{METHOD}", "longer", 1.0),
        (METHOD.replace(">", "<="), "longer", 0.0),
        ("def longer(words, than):\n    return words[0]", "longer", 0.0),
        ("", "longer", 0.0),
        ("pass", "filterfalse", 0.0),  # a function of itertools
    ],
)
def test_functional_cases_of_livecodebench_are_called(program: str, function: str, reward: float) -> None:
    sample = saying(program, FUNCTIONAL | {"metadata": {"func_name": function}})
    rewards = rewards_of(Sandbox("bubblewrap", CodeSettings()), CodeSettings())
    assert asyncio.run(rewards.score(sample)) == reward


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"metadata": "{}"}, "testtype is .*functional.*, and the column `metadata` has no func_name"),
        ({"tests": "eJxrYJmqxgABqhFA+/9aq=="}, "SyntaxError"),  # private tests of lite
        ({"tests": "def check(f):\n    assert f(1) == 2"}, "a text without an assertion that runs"),
        ({"tests": "def test_f(f):\n    assert f(1) == 2"}, "a text without an assertion that runs"),
        ({"tests": ["import math", "assert f(1)"]}, "a text without an assertion"),
    ],
)
def test_cases_that_no_program_or_each_would_pass_are_refused_with_the_row(row: object, problem: str) -> None:
    rows = {4: FUNCTIONAL, 2: {**FUNCTIONAL, **row}}  # type: ignore[dict-item]
    with pytest.raises(
        ConfigError, match=rf"'tests': row 2 of the data: they have no known format .*{problem}"
    ):
        check_cases(rows, CodeSettings(), others=False)


@needs_bubblewrap
@pytest.mark.parametrize(("sign", "reward"), [("+", 1.0), ("-", 0.0)])
def test_test_functions_are_called_and_import_the_program(sign: str, reward: float) -> None:
    tests = "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3"
    rewards = rewards_of(Sandbox("bubblewrap", CodeSettings()), CodeSettings())
    sample = saying(f"def add(a, b):\n    return a {sign} b", {"tests": tests})
    assert asyncio.run(rewards.score(sample)) == reward


@needs_bubblewrap
def test_a_program_that_was_cut_off_passes_nothing_unless_a_setting_asks_for_it() -> None:
    for completed_only, finish_reason, reward in (
        (True, "stop", 1.0),
        (True, "length", 0.0),
        (False, "length", 1.0),
    ):
        settings = RewardSettings(code=CodeSettings(), completed_only=completed_only)
        sample = saying("print(int(input()) ** 2)")
        sample.finish_reason = finish_reason
        rewards = asyncio.run(CodeKind().open(settings, Anchors(), decode, None))
        assert asyncio.run(rewards.score(sample)) == sample.reward_metrics["passed_cases"] == reward


def test_the_program_is_the_policys_and_the_text_has_the_environments_too() -> None:
    """What a sandbox is asked to run, after the environment showed a program of its own."""
    first, observed, last = "```python\nprint(1)\n```", "```python\nprint(2)\n```", "So it is."
    sample = saying("")
    two_turns(sample, first.encode(), observed.encode(), last.encode())
    programs = []

    class Asked:
        async def run(self, job: Mapping[str, object], stdin: str, limit_s: float) -> Execution:
            programs.append(job["program"])
            raise SandboxFailed("enough")

    with pytest.raises(RewardFailed):
        asyncio.run(rewards_of(Asked(), CodeSettings()).score(sample))
    assert set(programs) == {"print(1)\n"}
    assert sample.text == first + observed + last


@needs_bubblewrap
def test_all_test_cases_must_pass_or_each_counts() -> None:
    fenced = f"Here:\n```python\n{RIGHT}\n```"
    right, half, empty = score(fenced, HALF, "", settings=CodeSettings(score="share"))
    assert [right.reward, half.reward, empty.reward] == [1.0, 2 / 3, 0.0]
    assert half.reward_metrics == {"passed_cases": 2 / 3, "timed_out_cases": 0.0}
    assert right.text == fenced
    right, half = score(RIGHT, HALF, settings=CodeSettings())
    assert [right.reward, half.reward] == [1.0, 0.0]


@needs_bubblewrap
def test_a_timeout_is_zero_and_only_correct_responses_set_the_anchor() -> None:
    timeout = TimeoutSettings(min_s=0.3, max_s=5.0)
    endless = "n = int(input())\nwhile n == 3: pass\nprint(n * n)"
    anchors = Anchors()
    right, stuck, wrong = score(
        RIGHT, endless, "print(4)", settings=CodeSettings(timeout=timeout), anchors=anchors
    )
    assert [right.reward, stuck.reward, wrong.reward] == [1.0, 0.0, 0.0]
    assert [right.timed_out, stuck.timed_out, wrong.timed_out] == [False, True, False]
    assert stuck.reward_metrics["timed_out_cases"] == 1 / 3
    assert list(anchors.longest_s) == [0]
    assert len(anchors.longest_s[0]) == 3 and all(0 < each < 5 for each in anchors.longest_s[0])


@needs_bubblewrap
async def test_a_program_that_runs_is_stopped_when_a_correct_response_to_its_prompt_has_ended() -> None:
    settings = CodeSettings(timeout=TimeoutSettings(min_s=0.3, max_s=600.0))
    stuck, right = saying("while True: pass"), saying(RIGHT)
    rewards = CodeRewards(settings, Sandbox("bubblewrap", settings), Anchors(), decode, workers=6)
    assert await asyncio.gather(rewards.score(stuck), rewards.score(right)) == [0.0, 1.0]
    assert [stuck.timed_out, right.timed_out] == [True, False]


class Unsteady:
    """A sandbox that fails before it works."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0

    async def run(self, job: Mapping[str, Any], stdin: str, limit_s: float) -> Execution:
        self.calls += 1
        if self.calls <= self.failures:
            raise SandboxFailed("no memory")
        return Execution("exited", 0, b"4", b"", 0.1)


def test_a_sandbox_that_fails_is_tried_again_and_is_never_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRIES_S", (0.0, 0.0))
    row = {"tests": {"inputs": ["2"], "outputs": ["4"]}}
    unsteady = Unsteady(failures=2)
    assert asyncio.run(rewards_of(unsteady, CodeSettings()).score(saying(RIGHT, row))) == 1.0
    assert unsteady.calls == 3
    broken = Unsteady(failures=99)
    with pytest.raises(RewardFailed, match=r"^sandbox: no memory$"):
        asyncio.run(rewards_of(broken, CodeSettings()).score(saying(RIGHT, row)))
    assert broken.calls == 3


def test_rows_without_test_cases_go_to_the_reward_functions() -> None:
    class Constant:
        async def score(self, sample: Sample) -> float:
            return 0.25

    code = rewards_of(Unsteady(0), CodeSettings(), others=Constant())
    assert asyncio.run(code.score(saying("", row={"answer": "x"}))) == 0.25
    alone = rewards_of(Unsteady(0), CodeSettings())
    with pytest.raises(RewardFailed, match=r"^test cases: "):
        asyncio.run(alone.score(saying("x", row={"answer": "x"})))


@needs_bubblewrap
def test_a_program_is_stopped_by_the_reference_time_of_its_row_before_any_response_is_correct() -> None:
    timeout = TimeoutSettings(reference_column="meta.seconds", factor=2.0, min_s=0.3)
    settings = CodeSettings(timeout=timeout)
    sample = saying("while True: pass", SQUARES | {"meta": {"seconds": 0.01}})
    limits = list[float]()

    class Asked(Anchors):
        def limit_s(self, *given: Any, **named: Any) -> float:
            limits.append(super().limit_s(*given, **named))
            return limits[-1]

    rewards = rewards_of(Sandbox("bubblewrap", settings), settings, Asked())
    assert asyncio.run(rewards.score(sample)) == 0.0
    assert sample.timed_out and set(limits) == {0.3}


@pytest.mark.parametrize("value", ["2", None, True, 0, -1.0, float("nan"), float("inf")])
def test_a_reference_time_that_is_no_number_is_refused_with_row_and_value(value: object) -> None:
    settings = CodeSettings(timeout=TimeoutSettings(reference_column="reference_time"))
    rows = {5: SQUARES | {"reference_time": 1}, 3: SQUARES | {"reference_time": value}}
    problem = rf"row 3 of the data: reference_time = {value!r} is not a number of seconds above 0"
    with pytest.raises(ConfigError, match=rf"reward.code.timeout.reference_column = .*{problem}"):
        check_cases(rows, settings, others=False)
    with pytest.raises(RewardFailed, match=rf"^reference_time: reference_time = {value!r} is not a number"):
        asyncio.run(rewards_of(Unsteady(0), settings).score(saying(RIGHT, rows[3])))


def test_columns_are_checked_before_the_start() -> None:
    settings, other = CodeSettings(), {"answer": "x"}
    check_cases({0: SQUARES}, settings, others=False)
    check_cases({0: other, 1: SQUARES}, settings, others=True)
    for rows, others in (([other], True), ([SQUARES, other], False)):
        with pytest.raises(ConfigError, match=r"reward.code.column = 'tests': a row has no such column"):
            check_cases(dict(enumerate(rows)), settings, others=others)
    with pytest.raises(
        ConfigError, match=r"^reward.code.column = 'tests': row 7 of the data: they have no known format"
    ):
        check_cases({7: {"tests": 7}}, settings, others=False)
