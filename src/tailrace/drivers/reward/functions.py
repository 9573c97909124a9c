"""Reward functions: any Python function of a known signature, or several with weights.

The calls are made in a worker process, which is killed when a call exceeds its time limit.

The signature says which arguments a function gets, and how its result is read:

- verl's: it names `solution_str` or `solution_strs`, or `ground_truth` with `model_output` or `predict_str`.
  It returns a number, or a dict with "score".
- TRL's: it names `completions` or `prompts`, or its result is annotated as a list. It returns a list of a
  number or None for each completion.
- tailrace's: any other. It returns a number.

A function of TRL's signature, which takes a batch, is called for one completion at a time. A reward can then
start when its sample ends, and a call that hangs costs one sample. With `reward.batch = "group"` it is called
once for all members of a group.
"""

import asyncio
import inspect
import math
import reprlib
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from typing_extensions import override

from tailrace.drivers.data.open import data_kind
from tailrace.drivers.data.settings import DataSettings, PromptSettings
from tailrace.drivers.reward.calls import OWN_ARGUMENTS, Call, Scores
from tailrace.drivers.reward.settings import FunctionSettings, RewardSettings, check_sources
from tailrace.errors import ConfigError, RewardFailed
from tailrace.importing import import_function
from tailrace.kinds import kind_of

VERL_TEXT = ("solution_str", "model_output", "predict_str")
"""Names of the completion's text in verl and its scorers."""
VERL_PLURALS = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}
"""Parameters of verl's batch reward manager."""


@dataclass(slots=True)
class FunctionReport:
    """Report of a function besides its values. `columns`: of each completion of the call."""

    metrics: dict[str, float] = field(default_factory=dict)
    columns: list[dict[str, str | float | int | None]] = field(default_factory=lambda: [{}])

    def log_metric(self, name: str, value: SupportsFloat) -> None:
        """TRL's `log_metric`."""
        self.metrics[name] = finite(value)

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """TRL's `log_extra`, with a value of each completion."""
        for columns, value in zip(self.columns, values, strict=True):
            columns[column] = value if isinstance(value, str | float | int | None) else str(value)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of TRL's `trainer_state` that exists here."""

    global_step: int
    """Version of the policy that finished the completion: publications since the start of the run."""


class Signature:
    """One way to call a reward function: tailrace's."""

    title = "tailrace's signature"
    own: Collection[str] = OWN_ARGUMENTS
    """Names of the arguments that do not come from the data."""
    gives_rest = True
    """Whether `**kwargs` takes the columns that no parameter names."""
    takes_lists = False
    """Whether a call may be of several completions to one prompt."""

    def arguments(self, calls: Sequence[Call], report: FunctionReport) -> dict[str, object]:
        """Return all arguments that can be given, by name."""
        return calls[0].arguments()

    def values(self, result: Any, report: FunctionReport) -> list[float | None]:
        """Read a result, of each completion. None: the function does not apply to it. Raises a RewardFailed
        if it is not what the signature promises."""
        if isinstance(result, list):
            detail = f"{reprlib.repr(result)}: for a function that returns lists set signature = 'trl'"
            raise RewardFailed("not a number", detail, is_defect=True)
        return [finite(result)]


class TrlSignature(Signature):
    title = "TRL's signature, called with lists of one"
    own = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
    takes_lists = True

    @override
    def arguments(self, calls: Sequence[Call], report: FunctionReport) -> dict[str, object]:
        first = calls[0]  # all have one prompt and its row
        columns: dict[str, object] = {
            name: [value] * len(calls)
            for name, value in first.row.items()
            if name not in ("prompt", "completion")
        }
        return columns | {
            "prompts": [first.prompt if first.given is None else first.given] * len(calls),
            "completions": [self._completion(call) for call in calls],
            "completion_ids": [list(call.completion_ids) for call in calls],
            "trainer_state": TrainerState(max(call.version for call in calls)),
            "log_extra": report.log_extra,
            "log_metric": report.log_metric,
        }

    def _completion(self, call: Call) -> object:
        if not isinstance(call.given, list):
            return call.completion
        first, *rest = call.messages or [{"role": "assistant", "content": call.completion}]
        if first["role"] == "assistant":
            first = {**first, "content": f"{call.completion_prefix}{first['content']}"}
        return [first, *rest]

    @override
    def values(self, result: Any, report: FunctionReport) -> list[float | None]:
        num = len(report.columns)
        given: list[Any] = []
        with suppress(TypeError):
            given = [*result]
        if len(given) != num:
            wrong = "not a list of one" if num == 1 else f"not a list of one number for each of {num} members"
            raise RewardFailed(wrong, reprlib.repr(result), is_defect=True)
        return [None if value is None else finite(value) for value in given]


class VerlSignature(Signature):
    title = "verl's signature"
    own = (*VERL_TEXT, "solution_strs", "extra_info", "extra_infos")
    gives_rest = False

    @override
    def arguments(self, calls: Sequence[Call], report: FunctionReport) -> dict[str, object]:
        row = calls[0].row
        arguments: dict[str, object] = dict.fromkeys(VERL_TEXT, calls[0].completion)
        arguments |= {name: row[name] for name in ("data_source", "ground_truth") if name in row}
        if isinstance(model := row.get("reward_model"), Mapping) and "ground_truth" in model:
            arguments["ground_truth"] = model["ground_truth"]
        extra = row.get("extra_info")
        arguments["extra_info"] = dict(extra) if isinstance(extra, Mapping) else {}
        return arguments | {many: [arguments[one]] for many, one in VERL_PLURALS.items() if one in arguments}

    @override
    def values(self, result: Any, report: FunctionReport) -> list[float | None]:
        if isinstance(result, list | tuple) and result:  # as verl: the first is the score
            result = result[0]
        if not isinstance(result, Mapping):
            return [finite(result)]
        if "score" not in result:
            raise RewardFailed("not a number", f"no 'score' in {reprlib.repr(result)}", is_defect=True)
        for name, value in result.items():
            if name != "score" and isinstance(value, SupportsFloat):
                report.log_metric(name, value)
            elif isinstance(value, str):
                report.columns[0][name] = value
        return [finite(result["score"])]


SIGNATURES = {"tailrace": Signature, "trl": TrlSignature, "verl": VerlSignature}


def recognise(signature: inspect.Signature) -> str:
    """Return the name of the signature that the parameters show, a key of SIGNATURES."""
    names = signature.parameters.keys()
    if {"solution_str", "solution_strs"} & names or ("ground_truth" in names and {*VERL_TEXT} & names):
        return "verl"
    returns_list = "list" in str(signature.return_annotation).lower()
    return "trl" if {"prompts", "completions"} & names or returns_list else "tailrace"


def finite(number: Any) -> float:
    """Return a number as a float. Raises a RewardFailed if it is no number, or not finite."""
    if not isinstance(number, SupportsFloat):
        raise RewardFailed("not a number", reprlib.repr(number))
    try:
        converted = float(number)
    except OverflowError as why:
        raise RewardFailed("infinite", "an integer beyond the range of a float") from why
    except Exception as why:  # for instance arrays and tensors of more than one element
        raise RewardFailed("not a number", reprlib.repr(number)) from why
    if math.isnan(converted):
        raise RewardFailed("nan")
    if math.isinf(converted):
        raise RewardFailed("infinite", str(converted))
    return converted


MAX_DETAIL = 4000
"""Characters of a traceback that are kept; the end tells most."""
DEFECTS = (TypeError, NameError, ImportError, AttributeError, KeyError)
"""Exceptions that show a defect of the function, whatever the completion is."""
UNUSABLE = "name one: 'package.module:name', 'path/to/file.py:name', or a checker"


class NamedCheckers(Protocol):
    """Hook reward.checkers: functions of this package, which a config names without a module."""

    def load(self, name: str, key: str) -> Callable[..., Any]:
        """Return the checker of a name, which `key` of the config has. Raises a ConfigError if the package
        that it needs is not installed, or there is none of that name."""


Reported = tuple[float | None, dict[str, float], dict[str, str | float | int | None]]
"""Value, metrics and columns of one completion by one function."""


class RewardFunction:
    """One reward function, sync or async, called by the names of its parameters.

    Args:
        function: the function. `*args` and parameters with a default may stay without an argument; `**kwargs`
            takes the columns that no parameter names.
        settings: how it is called.
        key: the config key that names it, for messages.
        batch: as `RewardSettings.batch`.

    Raises:
        TypeError, ValueError: its parameters cannot be known.
    """

    def __init__(
        self, function: Callable[..., Any], settings: FunctionSettings, key: str, batch: str = "sample"
    ) -> None:
        self.settings, self._function, self._key, self._batch = settings, function, key, batch
        self.completed_only = False  # a completion that was cut off gets 0, without a call
        self.name = settings.name or str(getattr(function, "__name__", type(function).__name__))
        described = inspect.signature(function)
        kind = recognise(described) if settings.signature == "auto" else settings.signature
        self._signature = SIGNATURES[kind]()
        parameters = described.parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.parameters = {p.name: None for p in named}
        self._required = [p.name for p in named if p.default is p.empty and p.name not in settings.arguments]
        self._by_position = [
            p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
        ]
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def describe(self) -> str:
        """Return how the function is understood, for messages."""
        rest = ["all columns"] if self._takes_rest and self._signature.gives_rest else []
        given = ", ".join([*self.parameters, *rest]) or "nothing"
        title = self._signature.title.replace("of one", "of one" if self._batch == "sample" else "of a group")
        return f"{self.name} (weight {self.settings.weight:g}): {title}, given {given}"

    @property
    def takes_lists(self) -> bool:
        """Whether it is called with lists."""
        return self._signature.takes_lists

    def check_columns(self, columns: Collection[str]) -> None:
        """Match the parameters to the data before anything starts. Raises a ConfigError if the function needs
        an argument that nothing gives, or is given one that it does not take. `columns`: names of the columns
        of the data."""
        spec = self.settings.function
        if self._by_position:
            problem = f"its parameter {self._by_position[0]!r} cannot be given by name"
            raise ConfigError(self._key, spec, problem, "remove the '/' from its signature")
        for name in self.settings.arguments:
            if name not in self.parameters and not self._takes_rest:
                key, remedy = f"{self._key}.arguments", f"choose from {_listed(self.parameters)}"
                raise ConfigError(key, name, "the function has no such parameter", remedy)
        row = {name: {"ground_truth": ""} for name in columns}  # verl's signature looks into a column
        given = self._signature.arguments([Call("", "", [], "stop", row)], FunctionReport())
        missing = [name for name in self._required if name not in given]
        if missing:
            problem = f"its parameter {missing[0]!r} is no column of the data (columns: {_listed(columns)})"
            remedy = (
                f"it was taken for {self._signature.title}: name a column or one of "
                f"{_listed(self._signature.own)}, give the parameter a default or a value in `arguments`, "
                "or set `signature`"
            )
            raise ConfigError(self._key, spec, problem, remedy)

    def call(self, calls: Sequence[Call], wait: Callable[[Awaitable[Any]], Any]) -> list[Reported]:
        """Return the value of each completion, None where the function does not apply, and its report. One
        call of a function that takes lists is of all these completions, which have one prompt. `wait` returns
        the result of an awaitable. Raises a RewardFailed ("raised", "not a number", "nan", "infinite" or "not
        a list of one")."""
        if self.takes_lists:
            return self._called(calls, wait)
        return [each for call in calls for each in self._called([call], wait)]

    def _called(self, calls: Sequence[Call], wait: Callable[[Awaitable[Any]], Any]) -> list[Reported]:
        report = FunctionReport(columns=[{} for _ in calls])
        if self.completed_only and calls[0].finish_reason == "length":
            return [(0.0, {}, {})]
        try:
            arguments = self._signature.arguments(calls, report)
            takes_all = self._takes_rest and self._signature.gives_rest
            given = {n: v for n, v in arguments.items() if takes_all or n in self.parameters}
            result = self._function(**given | self.settings.arguments)
            if inspect.isawaitable(result):
                result = wait(result)
        except BaseException as why:  # SystemExit, too, fails this sample alone
            # A search without a match gives None, and to use that raises: the function may work elsewhere.
            is_defect = isinstance(why, DEFECTS) and "'NoneType'" not in str(why)
            raise RewardFailed("raised", _user_traceback(why), is_defect=is_defect) from why
        values = self._signature.values(result, report)
        return [
            (value, report.metrics, columns) for value, columns in zip(values, report.columns, strict=True)
        ]


class Scorer:
    """All reward functions of a run. The reward is the weighted sum of their values."""

    def __init__(self, functions: Sequence[RewardFunction], *, has_judges: bool = False) -> None:
        self.functions, self._has_judges = functions, has_judges
        self._runner: asyncio.Runner | None = None

    @classmethod
    def load(cls, settings: RewardSettings, data: DataSettings) -> "Scorer":
        """Import the functions that the config names, or else take the scorer that the data bring. Raises a
        ConfigError if one cannot be imported or called, two have one name, or the data bring none."""
        key, completed_only = "reward.function", settings.completed_only
        if settings.function is not None:
            loaded = [_load(FunctionSettings(function=settings.function), key, settings)]
            _check_batch(settings, loaded)
            return cls(loaded, has_judges=bool(settings.judges))
        if settings.functions:
            named = enumerate(settings.functions)
            loaded = [_load(each, f"{key}s[{i}].function", settings) for i, each in named]
            for name, number in Counter(each.name for each in loaded).items():
                if number > 1:
                    problem = f"{number} functions have this name"
                    raise ConfigError("reward.functions.name", name, problem, "give each a name of its own")
            mixed = [each.source_name for each in data.sources if each.source_name]
            check_sources("function", settings.functions, mixed, others=settings.judges)
            _check_batch(settings, loaded)
            return cls(loaded, has_judges=bool(settings.judges))
        scorers = [_scorer_of(source, completed_only) for source in data.sources if source.brings_scorer]
        if len(scorers) < len(data.sources):
            raise ConfigError(key, None, "rows bring no scorer of their own", UNUSABLE)
        _check_batch(settings, scorers)
        return cls(scorers)

    def describe(self) -> str:
        return "; ".join(each.describe() for each in self.functions)

    def check_columns(self, columns: Collection[str]) -> None:
        """Check each function, as `RewardFunction.check_columns`."""
        for each in self.functions:
            each.check_columns(columns)

    def columns(self, row: Collection[str]) -> list[str]:
        """Return the columns of a row that a parameter of a function names."""
        return [name for name in row if any(name in each.parameters for each in self.functions)]

    def __call__(self, call: Call) -> Scores:
        """Score one completion, as `score`."""
        return self.score([call])[0]

    def score(self, calls: Sequence[Call]) -> list[Scores]:
        """Score completions to one prompt. Raises a RewardFailed if a function failed or none applies to one
        of them ("not applicable")."""
        scores = [Scores(0.0, {}, {}) for _ in calls]
        applied = [0] * len(calls)
        for function in self.functions:
            if not function.settings.applies_to(calls[0].source):
                continue
            for place, (value, metrics, columns) in enumerate(function.call(calls, self._wait)):
                mine = scores[place]
                mine.metrics |= {f"{function.name}/{name}": each for name, each in metrics.items()}
                mine.columns |= {f"{function.name}/{name}": each for name, each in columns.items()}
                if value is None:
                    continue
                applied[place] += 1
                mine.reward += function.settings.weight * value
                if len(self.functions) > 1 or self._has_judges:
                    mine.metrics[function.name] = value
        if not all(applied):
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


def _load(settings: FunctionSettings, key: str, reward: RewardSettings) -> RewardFunction:
    spec = settings.function
    checkers: NamedCheckers | None = None if ":" in spec else kind_of("reward", "checkers")
    try:
        function = checkers.load(spec, key) if checkers else import_function(spec, key)
        loaded = RewardFunction(function, settings, key, reward.batch)
    except (TypeError, ValueError) as why:
        problem = f"its parameters cannot be known ({why})"
        raise ConfigError(key, spec, problem, "wrap it in a Python function") from why
    loaded.completed_only = reward.completed_only and checkers is not None
    return loaded


def _check_batch(settings: RewardSettings, functions: Sequence[RewardFunction]) -> None:
    """Raises a ConfigError if functions are to be called with groups, and none of them takes lists."""
    if settings.batch == "group" and not any(each.takes_lists for each in functions):
        named = ", ".join(each.name for each in functions)
        problem = f"no reward function takes lists ({named})"
        remedy = 'name a parameter prompts or completions, set signature = "trl", or write "sample"'
        raise ConfigError("reward.batch", settings.batch, problem, remedy)


def _scorer_of(data: PromptSettings, completed_only: bool) -> RewardFunction:
    task, score = data_kind(data).scorer(data)
    source = (data.source_name,) if data.source_name else None
    settings = FunctionSettings(function=task, name=source[0] if source else "task", sources=source)
    loaded = RewardFunction(score, settings, "data.task")
    loaded.completed_only = completed_only
    return loaded


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"


def _user_traceback(why: BaseException) -> str:
    """Format an exception, without the frames of this file and of asyncio that come before the user's
    function, in at most MAX_DETAIL characters."""
    ours = (Path(__file__), Path(asyncio.__file__).parent)
    frames = why.__traceback__
    while frames and any(Path(frames.tb_frame.f_code.co_filename).is_relative_to(each) for each in ours):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(why), why, frames)).strip()
    return text if len(text) <= MAX_DETAIL else f"... {text[-MAX_DETAIL:]}"
