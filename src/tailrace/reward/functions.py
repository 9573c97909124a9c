"""Reward functions: any Python function, called with the arguments that its parameters name.

The calls are made in a worker process, which is killed when a call exceeds its time limit.
"""

import asyncio
import inspect
import math
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

from tailrace.data.base import DataSettings, ProceduralSettings
from tailrace.data.procedural import Task
from tailrace.errors import ConfigError, RewardFailed
from tailrace.importing import import_function
from tailrace.reward.base import OWN_ARGUMENTS, Call, RewardSettings

RewardFunction = Callable[..., float | Awaitable[float]]

MAX_DETAIL = 4000
"""Characters of a traceback that are kept; the end tells most."""
DEFECTS = (TypeError, NameError, ImportError, AttributeError, KeyError)
"""Exceptions that show a defect of the function, whatever the completion is."""


class Scorer:
    """A reward function, sync or async, called by the names of its parameters.

    `prompt` and `completion` are texts, `completion_ids` token ids, `finish_reason` "stop" or "length". Any
    other parameter is the column of that name in the row; `**kwargs` takes all columns that no parameter
    names.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in named}
        self._required = [p.name for p in named if p.default is p.empty]
        self._by_position = [
            p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
        ]
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._runner: asyncio.Runner | None = None

    @classmethod
    def load(cls, settings: RewardSettings, data: DataSettings) -> "Scorer":
        """Import the function that the config names, or else take the scorer that the data bring.

        Raises:
            ConfigError: it cannot be imported or called, or the data bring none.
        """
        key, spec = "reward.function", settings.function
        if spec is not None:
            function = import_function(spec, key)
            try:
                return cls(function)
            except (TypeError, ValueError) as why:
                problem = f"its parameters cannot be known ({why})"
                raise ConfigError(key, spec, problem, "wrap it in a Python function") from why
        if isinstance(data, ProceduralSettings):
            task = Task(data)
            return cls(lambda completion, **row: task.score(completion, row))
        remedy = "name one: 'package.module:name' or 'path/to/file.py:name'"
        raise ConfigError(key, None, "rows bring no scorer of their own", remedy)

    def check_columns(self, columns: Collection[str], spec: str | None) -> None:
        """Match the parameters to the data before anything starts.

        Args:
            columns: names of the columns of the data.
            spec: the setting reward.function, for the message.

        Raises:
            ConfigError: the function needs an argument that nothing gives.
        """
        if self._by_position:
            problem = f"its parameter {self._by_position[0]!r} cannot be given by name"
            raise ConfigError("reward.function", spec, problem, "remove the '/' from its signature")
        given = {*OWN_ARGUMENTS, *columns}
        missing = [name for name in self._required if name not in given]
        if missing:
            problem = f"its parameter {missing[0]!r} is no column of the data (columns: {_listed(columns)})"
            remedy = f"name a column or one of {_listed(OWN_ARGUMENTS)}, or give the parameter a default"
            raise ConfigError("reward.function", spec, problem, remedy)

    def __call__(self, call: Call) -> float:
        """Return the reward of one completion.

        Raises:
            RewardFailed: reason "raised", "not a number", "nan" or "infinite".
        """
        arguments = call.arguments()
        given = {n: v for n, v in arguments.items() if self._takes_rest or n in self._names}
        try:
            reward = self._function(**given)
            if inspect.isawaitable(reward):
                reward = self._run(reward)
        except BaseException as why:  # SystemExit, too, fails this sample alone
            raise RewardFailed("raised", _user_traceback(why), is_defect=_is_defect(why)) from why
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


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"


def _finite(reward: Any) -> float:
    if not isinstance(reward, SupportsFloat):
        raise RewardFailed("not a number", reprlib.repr(reward))
    try:
        number = float(reward)
    except OverflowError as why:
        raise RewardFailed("infinite", "an integer beyond the range of a float") from why
    except Exception as why:  # for instance arrays and tensors of more than one element
        raise RewardFailed("not a number", reprlib.repr(reward)) from why
    if math.isnan(number):
        raise RewardFailed("nan")
    if math.isinf(number):
        raise RewardFailed("infinite", str(number))
    return number


def _is_defect(why: BaseException) -> bool:
    # A search without a match gives None, and to use that raises: the function may work on other completions.
    return isinstance(why, DEFECTS) and "'NoneType'" not in str(why)


def _user_traceback(why: BaseException) -> str:
    """Format an exception with the frames of the user's code alone, in at most MAX_DETAIL characters."""
    text = "".join(traceback.format_exception(type(why), why, _user_frames(why.__traceback__))).strip()
    return text if len(text) <= MAX_DETAIL else f"... {text[-MAX_DETAIL:]}"


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of this file and of asyncio that come before the user's function."""
    ours = (Path(__file__), Path(asyncio.__file__).parent)
    while frames is not None:
        file = Path(frames.tb_frame.f_code.co_filename)
        if not any(file.is_relative_to(each) for each in ours):
            break
        frames = frames.tb_next
    return frames
