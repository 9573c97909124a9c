"""Scoring: any Python function, called with what its parameters name.

This runs in a worker process, which is killed when a call hangs; nothing here watches the time.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, SupportsFloat

from tailrace.data.base import DataSettings, ProceduralSettings
from tailrace.data.procedural import Task
from tailrace.errors import ConfigError, RewardFailed
from tailrace.importing import import_function
from tailrace.reward.base import RewardSettings

RewardFunction = Callable[..., float | Awaitable[float]]


class Scorer:
    """A reward function, sync or async, by the names of its parameters.

    `prompt` and `completion` are texts; any other parameter is the row's column of that name, and `**kwargs`
    takes the columns that nothing else names.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._parameters, self._takes_rest = _parameters(function)
        self._runner: asyncio.Runner | None = None

    @classmethod
    def load(cls, settings: RewardSettings, data: DataSettings) -> "Scorer":
        """The function that the config names, or else the scorer that the data bring.

        Raises:
            ConfigError: it cannot be imported or called, or the data bring none.
        """
        if settings.function is not None:
            return cls(import_function(settings.function, "reward.function"))
        if isinstance(data, ProceduralSettings):
            return cls(_score_by_task(Task(data)))
        remedy = "name one: 'package.module:name' or 'path/to/file.py:name'"
        raise ConfigError("reward.function", None, "rows bring no scorer of their own", remedy)

    def __call__(self, prompt: str, completion: str, row: Mapping[str, object]) -> float:
        """The reward of one completion.

        Raises:
            RewardFailed: reason "raised", "not a number", "nan" or "infinite".
        """
        columns = {**row, "prompt": prompt, "completion": completion}
        given = {n: v for n, v in columns.items() if self._takes_rest or n in self._parameters}
        try:
            reward = self._function(**given)
            if inspect.isawaitable(reward):
                reward = self._run(reward)
        except (Exception, SystemExit) as why:
            raise RewardFailed("raised", f"{type(why).__name__}: {why}") from why
        return _finite(reward)

    def close(self) -> None:
        """End the event loop of an async function."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _run(self, awaitable: Awaitable[float]) -> float:
        # One loop for all calls: a client that the function keeps open belongs to the loop it was made in.
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> float:
            return await awaitable

        return self._runner.run(wait())


def _parameters(function: RewardFunction) -> tuple[set[str], bool]:
    """The names it can be called with, and whether it takes any other."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _score_by_task(task: Task) -> RewardFunction:
    def score(completion: str, **row: object) -> float:
        return task.score(completion, row)

    return score


def _finite(reward: Any) -> float:
    if not isinstance(reward, SupportsFloat):
        raise RewardFailed("not a number", f"{reward!r:.80}")
    try:
        number = float(reward)
    except (TypeError, ValueError, RuntimeError) as why:
        # Arrays and tensors of more than one element.
        raise RewardFailed("not a number", f"{reward!r:.80}") from why
    if math.isnan(number):
        raise RewardFailed("nan")
    if math.isinf(number):
        raise RewardFailed("infinite", str(number))
    return number
