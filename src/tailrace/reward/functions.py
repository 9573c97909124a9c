"""Reward functions: any Python function of a known signature (signatures.py), or several with weights.

The calls are made in a worker process, which is killed when a call exceeds its time limit.
"""

import asyncio
import inspect
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tailrace.data.base import DataSettings, MixedSettings, ProceduralSettings, sources_of
from tailrace.data.procedural import Task
from tailrace.errors import ConfigError, RewardFailed
from tailrace.importing import import_function
from tailrace.reward.base import Call, FunctionSettings, RewardSettings, Scores
from tailrace.reward.checkers import import_checker
from tailrace.reward.judge_settings import JudgeSettings
from tailrace.reward.signatures import SIGNATURES, Report, recognise

MAX_DETAIL = 4000
"""Characters of a traceback that are kept; the end tells most."""
DEFECTS = (TypeError, NameError, ImportError, AttributeError, KeyError)
"""Exceptions that show a defect of the function, whatever the completion is."""
UNUSABLE = "name one: 'package.module:name', 'path/to/file.py:name', or a checker"


class RewardFunction:
    """One reward function, sync or async, called by the names of its parameters.

    Args:
        function: the function. `*args` and parameters with a default may stay without an argument; `**kwargs`
            takes the columns that no parameter names.
        settings: how it is called.
        key: the config key that names it, for messages.

    Raises:
        TypeError, ValueError: its parameters cannot be known.
    """

    def __init__(self, function: Callable[..., Any], settings: FunctionSettings, key: str) -> None:
        self.settings, self._function, self._key = settings, function, key
        self.name = settings.name or str(getattr(function, "__name__", type(function).__name__))
        described = inspect.signature(function)
        kind = recognise(described) if settings.signature == "auto" else settings.signature
        self._signature = SIGNATURES[kind]()
        parameters = described.parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name: None for p in named}
        self._required = [p.name for p in named if p.default is p.empty and p.name not in settings.arguments]
        self._by_position = [
            p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
        ]
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def describe(self) -> str:
        """Return how the function is understood, for messages."""
        rest = ["all columns"] if self._takes_rest and self._signature.gives_rest else []
        given = ", ".join([*self._names, *rest]) or "nothing"
        return f"{self.name} (weight {self.settings.weight:g}): {self._signature.title}, given {given}"

    def check_columns(self, columns: Collection[str]) -> None:
        """Match the parameters to the data before anything starts.

        Args:
            columns: names of the columns of the data.

        Raises:
            ConfigError: the function needs an argument that nothing gives, or is given one that it does not
                take.
        """
        spec = self.settings.function
        if self._by_position:
            problem = f"its parameter {self._by_position[0]!r} cannot be given by name"
            raise ConfigError(self._key, spec, problem, "remove the '/' from its signature")
        for name in self.settings.arguments:
            if name not in self._names and not self._takes_rest:
                key, remedy = f"{self._key}.arguments", f"choose from {_listed(self._names)}"
                raise ConfigError(key, name, "the function has no such parameter", remedy)
        given = self._signature.names(columns)
        missing = [name for name in self._required if name not in given]
        if missing:
            problem = f"its parameter {missing[0]!r} is no column of the data (columns: {_listed(columns)})"
            remedy = (
                f"it was taken for {self._signature.title}: name a column or one of "
                f"{_listed(self._signature.own)}, give the parameter a default or a value in `arguments`, "
                "or set `signature`"
            )
            raise ConfigError(self._key, spec, problem, remedy)

    def applies_to(self, source: str) -> bool:
        """Return whether it scores samples of a data source."""
        return self.settings.sources is None or source in self.settings.sources

    def call(self, call: Call, wait: Callable[[Awaitable[Any]], Any]) -> tuple[float | None, Report]:
        """Return the value of one completion, None where the function does not apply, and what it reports.

        Args:
            wait: returns the result of an awaitable.

        Raises:
            RewardFailed: reason "raised", "not a number", "nan", "infinite" or "not a list of one".
        """
        report = Report()
        try:
            arguments = self._signature.arguments(call, report)
            takes_all = self._takes_rest and self._signature.gives_rest
            given = {n: v for n, v in arguments.items() if takes_all or n in self._names}
            result = self._function(**given | self.settings.arguments)
            if inspect.isawaitable(result):
                result = wait(result)
        except BaseException as why:  # SystemExit, too, fails this sample alone
            raise RewardFailed("raised", _user_traceback(why), is_defect=_is_defect(why)) from why
        return self._signature.value(result, report), report


class Scorer:
    """All reward functions of a run. The reward is the weighted sum of their values."""

    def __init__(self, functions: Sequence[RewardFunction], *, has_judges: bool = False) -> None:
        self.functions, self._has_judges = functions, has_judges
        self._runner: asyncio.Runner | None = None

    @classmethod
    def load(cls, settings: RewardSettings, data: DataSettings) -> "Scorer":
        """Import the functions that the config names, or else take the scorer that the data bring.

        Raises:
            ConfigError: one cannot be imported or called, two have one name, or the data bring none.
        """
        key = "reward.function"
        if settings.function is not None:
            loaded = [_load(FunctionSettings(function=settings.function), key)]
            return cls(loaded, has_judges=bool(settings.judges))
        if settings.functions:
            loaded = [_load(each, f"{key}s[{i}].function") for i, each in enumerate(settings.functions)]
            for name, number in Counter(each.name for each in loaded).items():
                if number > 1:
                    problem = f"{number} functions have this name"
                    raise ConfigError("reward.functions.name", name, problem, "give each a name of its own")
            mixed = [each.name for each in sources_of(data) if isinstance(each, MixedSettings)]
            _check_sources(loaded, mixed, settings.judges)
            return cls(loaded, has_judges=bool(settings.judges))
        sources = sources_of(data)
        tasks = [_task_scorer(source) for source in sources if isinstance(source, ProceduralSettings)]
        if len(tasks) < len(sources):
            raise ConfigError(key, None, "rows bring no scorer of their own", UNUSABLE)
        return cls(tasks)

    def describe(self) -> str:
        """Return how the functions are understood, for messages."""
        return "; ".join(each.describe() for each in self.functions)

    def check_columns(self, columns: Collection[str]) -> None:
        """As RewardFunction.check_columns, of each function."""
        for each in self.functions:
            each.check_columns(columns)

    def __call__(self, call: Call) -> Scores:
        """Score one completion.

        Raises:
            RewardFailed: a function failed, or none applies (reason "not applicable").
        """
        scores = Scores(0.0)
        applied = 0
        for function in self.functions:
            if not function.applies_to(call.source):
                continue
            value, report = function.call(call, self._wait)
            scores.metrics |= {f"{function.name}/{name}": each for name, each in report.metrics.items()}
            scores.columns |= {f"{function.name}/{name}": each for name, each in report.columns.items()}
            if value is None:
                continue
            applied += 1
            scores.reward += function.settings.weight * value
            if len(self.functions) > 1 or self._has_judges:
                scores.metrics[function.name] = value
        if not applied:
            raise RewardFailed("not applicable", "no reward function applies to this sample")
        return scores

    def close(self) -> None:
        """End the event loop of async functions."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        # One loop for all calls: a client that the function keeps open belongs to the loop it was made in.
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())


def _load(settings: FunctionSettings, key: str) -> RewardFunction:
    spec = settings.function
    function = import_checker(spec, key) or import_function(spec, key)
    try:
        return RewardFunction(function, settings, key)
    except (TypeError, ValueError) as why:
        problem = f"its parameters cannot be known ({why})"
        raise ConfigError(key, spec, problem, "wrap it in a Python function") from why


def _check_sources(
    functions: Sequence[RewardFunction], sources: Sequence[str], judges: Sequence[JudgeSettings]
) -> None:
    """Check the names of the sources of a mixture; those of rows are known only when they are read."""
    key = "reward.functions.sources"
    for named in [name for each in functions for name in each.settings.sources or () if sources]:
        if named not in sources:
            raise ConfigError(key, named, "the data have no such source", f"choose from {_listed(sources)}")
    for source in sources:
        if not any(each.applies_to(source) for each in (*functions, *judges)):
            raise ConfigError(key, source, "no function scores this source", "add a function for it")


def _task_scorer(data: ProceduralSettings) -> RewardFunction:
    task = Task(data)

    def score(completion: str, **row: object) -> float:
        return task.score(completion, row)

    source = (data.name,) if isinstance(data, MixedSettings) else None
    settings = FunctionSettings(function=data.task, name=source[0] if source else "task", sources=source)
    return RewardFunction(score, settings, "data.task")


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"


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
