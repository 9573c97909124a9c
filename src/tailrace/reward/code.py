"""Rewards of programs: a completion's code runs on the test cases of its row.

Each test case is a run of its own in the sandbox, with the time limit of its prompt (timeout.py).
"""

import asyncio
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from tailrace.errors import ConfigError, RewardFailed, SandboxFailed
from tailrace.reward.base import CodeSettings, Rewards
from tailrace.reward.cases import (
    AssertCase,
    CallCase,
    Case,
    StdinCase,
    column_of,
    parse_cases,
    same_output,
    same_value,
)
from tailrace.reward.sandbox import Execution, Sandbox
from tailrace.reward.timeout import Anchors, TimeLimit
from tailrace.types import Sample

ATTEMPTS = 3
"""How often a sandbox that does not start its program is tried."""
RETRY_S = 0.5
"""Seconds before the second attempt; doubled before the third."""
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)

Verdict = Literal["passed", "failed", "timeout"]


def extract_code(completion: str) -> str:
    """Return the last fenced block of a completion, or all of it where there is none."""
    blocks: list[str] = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


class CodeRewards:
    """Rewards (reward/base.py) of rows with test cases; other rows go to the reward functions.

    Args:
        others: scores rows without test cases; None: they fail.
        workers: test cases that run at a time. The runs of a sample that ended first come first.
        anchors: what is known of the time that correct responses take.
        text_of: turns token ids into text.
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
        self._workers = asyncio.Semaphore(workers)

    async def score(self, sample: Sample) -> float:
        """As Rewards.score. A test case that exceeds its time limit has not passed, and sets
        `sample.timed_out`.

        Raises:
            RewardFailed: also where the sandbox did not start a program after several attempts.
        """
        value = column_of(sample.prompt.row, self._settings.column)
        if value is None and self._others is not None:
            return await self._others.score(sample)
        sample.text = self._text_of(sample.scored_ids)
        cases = parse_cases(value)
        program = extract_code(self._text_of(sample.completion_ids))  # not the environment's
        if not program.strip():
            return self._reward(sample, Counter(), len(cases))
        verdicts, longest_s = await self._run_all(sample, program, cases)
        if verdicts["passed"] == len(cases):
            self._anchors.observe(sample, longest_s)
        sample.timed_out = verdicts["timeout"] > 0
        return self._reward(sample, verdicts, len(cases))

    def _reward(self, sample: Sample, verdicts: Mapping[Verdict, int], num_cases: int) -> float:
        share = verdicts["passed"] / num_cases
        sample.reward_metrics = {
            "passed_cases": share,
            "timed_out_cases": verdicts["timeout"] / num_cases,
        }
        return share if self._settings.score == "share" else float(share == 1.0)

    async def _run_all(
        self, sample: Sample, program: str, cases: Sequence[Case]
    ) -> tuple[Counter[Verdict], float]:
        """Return the number of each verdict, and the seconds of the longest test case."""
        verdicts: Counter[Verdict] = Counter()
        longest_s = 0.0
        runs = [asyncio.create_task(self._run(sample, program, case)) for case in cases]
        try:
            for next_run in asyncio.as_completed(runs):
                verdict, seconds = await next_run
                verdicts[verdict] += 1
                longest_s = max(longest_s, seconds)
                if verdict != "passed" and self._settings.score == "all":
                    break
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        return verdicts, longest_s

    async def _run(self, sample: Sample, program: str, case: Case) -> tuple[Verdict, float]:
        secret = os.urandom(16).hex()
        stdin = case.text if isinstance(case, StdinCase) else ""
        async with self._workers:
            with self._anchors.limit(sample, self._settings.timeout) as limit:
                execution = await self._execute(_job(program, case, secret), stdin, limit)
        if execution.end == "timeout":
            return "timeout", execution.seconds
        return ("passed" if _passes(execution, case, secret) else "failed"), execution.seconds

    async def _execute(self, job: Mapping[str, object], stdin: str, limit: TimeLimit) -> Execution:
        for attempt in range(ATTEMPTS - 1):
            try:
                return await self._sandbox.run(job, stdin, limit)
            except SandboxFailed:
                await asyncio.sleep(RETRY_S * 2**attempt)
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


def has_cases(row: Mapping[str, object], settings: CodeSettings) -> bool:
    """Return whether a row has test cases."""
    return column_of(row, settings.column) is not None


def check_cases(rows: Sequence[Mapping[str, object]], settings: CodeSettings, *, others: bool) -> None:
    """Check the test cases of the first rows before anything starts.

    Args:
        others: rows without test cases are scored by reward functions.

    Raises:
        ConfigError: no row has test cases, one lacks them and nothing else scores it, or their format is
            unknown.
    """
    key, column = "reward.code.column", settings.column
    values = [column_of(row, column) for row in rows]
    if not any(value is not None for value in values) or (None in values and not others):
        columns = ", ".join(dict.fromkeys(name for row in rows for name in row)) or "none"
        problem = f"a row has no such column (columns: {columns})"
        raise ConfigError(key, column, problem, "name the column of the test cases")
    for value in values:
        try:
            if value is not None:
                parse_cases(value)
        except RewardFailed as why:
            remedy = "docs/rewards-code.md lists the formats"
            raise ConfigError(key, column, why.detail, remedy) from None
