"""Rewards of programs: a completion's code runs on the test cases of its row.

Each test case is a run of its own in the sandbox, with a time limit of its own (`rollout/reward_timeout.py`).

The formats of test cases are those of public data sets:

    {"inputs": [...], "outputs": [...]}                       verl, APPS, TACO; with "fn_name": a function
    {"test_cases": [{"type": ..., "input": ..., ...}]}        PRIME
    [{"input": ..., "output": ..., "testtype": ...}]          LiveCodeBench
    ["assert f(1) == 2", ...], or one such text               MBPP, KodCode

Each may also be its JSON text. Test functions are called, and may import the program as `solution`.
"""

import ast
import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import inf, isclose
from typing import Any, Literal

from tailrace.contracts.reward import Rewards, TimeoutSettings
from tailrace.drivers.kinds.hooks import ProgramRewards
from tailrace.drivers.reward.calls import column_of
from tailrace.drivers.reward.settings import CodeSettings, RewardSettings
from tailrace.errors import ConfigError, RewardFailed, SandboxFailed
from tailrace.extras.sandbox.sandbox import Execution, Sandbox, check_installed
from tailrace.rollout.reward_timeout import Anchors, TimeLimit
from tailrace.types import Sample


@dataclass(frozen=True, slots=True)
class StdinCase:
    """The program reads a text and prints another."""

    text: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """A function of the program is called and returns a value."""

    function: str
    arguments: Sequence[Any]
    expected: Sequence[Any]
    """Each of these values is right."""


@dataclass(frozen=True, slots=True)
class AssertCase:
    """Statements that raise if the program is wrong."""

    statements: str


Case = StdinCase | CallCase | AssertCase


def parse_cases(value: object, metadata: object = None) -> list[Case]:
    """Read the test cases of a row. `metadata`: the column of that name, in which LiveCodeBench names the
    function. Raises a RewardFailed ("test cases") if one has no known format."""
    try:
        cases = _parse(value, metadata)
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as why:
        raise RewardFailed("test cases", f"they have no known format ({why!r}): {value!r:.200}") from why
    if not cases:
        raise RewardFailed("test cases", "the row has none")
    return cases


def _parse(value: object, metadata: object) -> list[Case]:
    match value:
        case str() if value.lstrip()[:1] in ("{", "["):
            return _parse(json.loads(value), metadata)
        case str():
            return [_parse_one(value, metadata)] if value.strip() else []
        case {"inputs": list(inputs), "outputs": list(outputs), **shared}:
            pairs, name = zip(inputs, outputs, strict=True), shared.get("fn_name")
            return [_parse_one({"input": a, "output": b, "fn_name": name}, metadata) for a, b in pairs]
        case {"test_cases": list(cases)} | list(cases):
            return [_parse_one(case, metadata) for case in cases]
    raise ValueError("neither an object, a list nor a text")


def _parse_one(case: str | Mapping[str, Any], metadata: Any) -> Case:
    if isinstance(case, str):
        tests = re.findall(r"^def (test\w*)\(\)", case, re.MULTILINE)  # which pytest would call
        case = "\n".join([case, *(f"{name}()" for name in tests if case.count(f"{name}(") == 1)])
        run = [each for each in ast.parse(case).body if not hasattr(each, "name")]  # no function, no class
        can_fail = (isinstance(x, ast.Assert | ast.Raise | ast.Call) for each in run for x in ast.walk(each))
        if not re.search("assert|raise", case) or not any(can_fail):  # each program would pass, or none
            raise ValueError("a text without an assertion that runs")
        return AssertCase(case)
    given, expected, function = case["input"], case["output"], case.get("fn_name") or None
    if is_functional := not function and case.get("testtype") == "functional":
        about = json.loads(metadata) if isinstance(metadata, str) else metadata or {}
        if not (function := about.get("func_name")):
            raise ValueError('testtype is "functional", and the column `metadata` has no func_name')
    if function is None:
        return StdinCase(_text(given), _text(expected))
    if isinstance(given, str):  # one argument a line, as JSON
        given = [json.loads(line) for line in given.splitlines()]
        expected = json.loads(expected)
    is_wrapped = isinstance(expected, list) and len(expected) == 1 and not is_functional  # as APPS may do
    return CallCase(str(function), list(given), [expected, *(expected if is_wrapped else ())])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs have equal words line by line. Spaces, and empty lines at the end, do not
    count. A word with a decimal point may differ by 1e-6, relative or absolute."""
    left, right = ([line.split() for line in text.rstrip().splitlines()] for text in (printed, expected))
    if list(map(len, left)) != list(map(len, right)):
        return False
    return all(map(_same_word, chain.from_iterable(left), chain.from_iterable(right)))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected or "." not in expected:
        return printed == expected
    try:
        return isclose(float(printed), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def same_value(answer: bytes, expected: Sequence[Any]) -> bool:
    """Return whether a function's value, as JSON, is one of those expected."""
    try:
        return json.loads(answer) in json.loads(json.dumps(expected))
    except (ValueError, RecursionError):
        return False


RETRIES_S = (0.5, 1.0)
"""Seconds before a second and a third attempt with a sandbox that does not start its program."""
_BLOCK = re.compile(r"(?ms)^(?:(?:[^\n`]|`[^\n`]+`(?!`))*+(?=`)|[ \t]*)(`{3,}+|~{3,}+)[^\n`]*\n(.*?)(\1|\Z)")
"""A fenced block: its fence, its text, and the fence that closes it, or nothing."""

CaseResult = Literal["passed", "failed", "timeout"]


def extract_code(completion: str) -> str:
    """Return the last fenced block after the thinking, as LiveCodeBench does, or all of that text where there
    is none. Thinking or a last block without an end: nothing."""
    answer = completion.rpartition("</think>")[2]
    if "<think>" in answer:
        return ""
    *_, (_, block, end) = [("", answer, "all"), *_BLOCK.findall(answer)]
    return str(block) if end else ""


class CodeRewards:
    """`Rewards` of rows with test cases.

    Args:
        text_of: turns token ids into text.
        workers: test cases that run at a time. The runs of a sample that ended first come first.
        others: scores rows without test cases; None: they fail.
    """

    def __init__(
        self,
        settings: CodeSettings,
        sandbox: Sandbox,
        anchors: Anchors,
        text_of: Callable[[Sequence[int]], str],
        *,
        workers: int,
        others: Rewards | None = None,
    ) -> None:
        self._settings, self._sandbox, self._anchors = settings, sandbox, anchors
        self._text_of, self._others = text_of, others
        self.completed_only = True  # a completion that was cut off passes no test case, and is not run
        self._workers = asyncio.Semaphore(workers)

    async def score(self, sample: Sample) -> float:
        """Score as `Rewards.score`. A test case that exceeds its time limit has not passed, and sets
        `sample.timed_out`. A sandbox that starts no program after several attempts is a RewardFailed."""
        value = column_of(sample.prompt.row, self._settings.column)
        if value is None and self._others is not None:
            return await self._others.score(sample)
        sample.text = self._text_of(sample.scored_ids)
        cases = parse_cases(value, sample.prompt.row.get("metadata"))
        program = extract_code(sample.prompt.opened + self._text_of(sample.completion_ids))  # the policy's
        is_cut_off = self.completed_only and sample.finish_reason == "length"
        if is_cut_off or not program.strip():
            return self._reward(sample, Counter(), len(cases))
        verdicts, seconds = await self._run_all(sample, program, cases)
        if verdicts["passed"] == len(cases):
            self._anchors.observe(sample, seconds)
        sample.timed_out = verdicts["timeout"] > 0
        return self._reward(sample, verdicts, len(cases))

    def _reward(self, sample: Sample, verdicts: Mapping[CaseResult, int], num_cases: int) -> float:
        share = verdicts["passed"] / num_cases
        timed_out = verdicts["timeout"] / num_cases
        sample.reward_metrics = {"passed_cases": share, "timed_out_cases": timed_out}
        return share if self._settings.score == "share" else float(share == 1.0)

    async def _run_all(
        self, sample: Sample, program: str, cases: Sequence[Case]
    ) -> tuple[Counter[CaseResult], list[float]]:
        """Return the number of each result, and the seconds of each test case that ran."""
        verdicts: Counter[CaseResult] = Counter()
        jobs = (self._run(sample, program, case, number) for number, case in enumerate(cases))
        runs = list(map(asyncio.create_task, jobs))
        try:
            for next_run in asyncio.as_completed(runs):
                verdict, _ = await next_run
                verdicts[verdict] += 1
                if verdict != "passed" and self._settings.score == "all":
                    break
        finally:
            for run in runs:
                run.cancel()
            ended = await asyncio.gather(*runs, return_exceptions=True)
        return verdicts, [each[1] for each in ended if not isinstance(each, BaseException)]

    async def _run(self, sample: Sample, program: str, case: Case, number: int) -> tuple[CaseResult, float]:
        timeout = self._settings.timeout
        reference_s = reference_time(sample.prompt.row, timeout)
        secret = os.urandom(16).hex()
        stdin = case.text if isinstance(case, StdinCase) else ""
        async with self._workers:
            with self._anchors.limit(sample, number, timeout, reference_s) as limit:
                execution = await self._execute(_job(program, case, secret), stdin, limit)
        if execution.end == "timeout":
            return "timeout", execution.seconds
        return ("passed" if _passes(execution, case, secret) else "failed"), execution.seconds

    async def _execute(self, job: Mapping[str, object], stdin: str, limit: TimeLimit) -> Execution:
        for pause_s in RETRIES_S:
            with suppress(SandboxFailed):
                return await self._sandbox.run(job, stdin, limit)
            await asyncio.sleep(pause_s)
        try:
            return await self._sandbox.run(job, stdin, limit)
        except SandboxFailed as why:
            raise RewardFailed("sandbox", str(why)) from why


def _job(program: str, case: Case, secret: str) -> dict[str, object]:
    match case:
        case CallCase(function, arguments):
            return {"program": program, "function": function, "arguments": arguments}
        case AssertCase(statements):
            return {"program": program, "assertion": statements, "secret": secret}
    return {"program": program}


def _passes(execution: Execution, case: Case, secret: str) -> bool:
    if execution.end != "exited" or execution.exit_code != 0:
        return False
    match case:
        case StdinCase(expected=expected):
            return same_output(execution.output.decode(errors="replace"), expected)
        case CallCase(expected=expected):
            return same_value(execution.answer, expected)
        case AssertCase():
            return execution.answer == secret.encode()


def reference_time(row: Mapping[str, object], timeout: TimeoutSettings) -> float | None:
    """Return the seconds of a row's reference column; None: none is named. Raises a RewardFailed if the row
    has no number above 0 there."""
    if timeout.reference_column is None:
        return None
    value = column_of(row, timeout.reference_column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        found = f"{timeout.reference_column} = {value!r}"
        raise RewardFailed("reference_time", f"{found} is not a number of seconds above 0")
    return value


def check_cases(rows: Mapping[int, Mapping[str, object]], settings: CodeSettings, *, others: bool) -> None:
    """Check the test cases of the first rows, by number, before anything starts. Raises a ConfigError if no
    row has test cases, one lacks them and nothing else scores it, their format is unknown, or one has no
    reference time. `others`: rows without test cases are scored by reward functions."""
    key, column = "reward.code.column", settings.column
    values = [column_of(row, column) for row in rows.values()]
    if not any(value is not None for value in values) or (None in values and not others):
        columns = ", ".join(dict.fromkeys(name for row in rows.values() for name in row)) or "none"
        problem = f"a row has no such column (columns: {columns})"
        raise ConfigError(key, column, problem, "name the column of the test cases")
    for (number, row), value in zip(rows.items(), values, strict=True):
        if value is None:
            continue
        where: tuple[str, object] = key, column
        remedy = "docs/how-to/score-responses.md lists the formats"
        try:
            parse_cases(value, row.get("metadata"))
            where = "reward.code.timeout.reference_column", settings.timeout.reference_column
            remedy = "correct the row, or leave the setting out"
            reference_time(row, settings.timeout)
        except RewardFailed as why:
            raise ConfigError(*where, f"row {number} of the data: {why.detail}", remedy) from None


class CodeKind(ProgramRewards):
    """Rewards of programs in the sandbox."""

    def check(
        self, reward: RewardSettings, rows: Mapping[int, Mapping[str, object]], *, others: bool
    ) -> None:
        assert reward.code
        check_cases(rows, reward.code, others=others)
        if reward.sandbox == "bubblewrap":
            check_installed()

    async def open(
        self,
        reward: RewardSettings,
        anchors: Anchors,
        text_of: Callable[[Sequence[int]], str],
        others: Rewards | None,
    ) -> CodeRewards:
        assert reward.code
        sandbox = Sandbox(reward.sandbox, reward.code)
        await sandbox.check()
        rewards = CodeRewards(reward.code, sandbox, anchors, text_of, workers=reward.workers, others=others)
        rewards.completed_only = reward.completed_only
        return rewards
