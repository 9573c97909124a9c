"""The signatures of reward functions: which arguments a function gets, and how its result is read.

- verl's: it names `solution_str` or `solution_strs`, or `ground_truth` with `model_output` or `predict_str`.
  It returns a number, or a dict with "score".
- TRL's: it names `completions` or `prompts`, or its result is annotated as a list. It returns a list of a
  number or None for each completion.
- tailrace's: any other. It returns a number.

A function of TRL's signature, which takes a batch, is called for one completion at a time. A reward can then
start when its sample ends, and a call that hangs costs one sample.
"""

import inspect
import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

from tailrace.errors import RewardFailed
from tailrace.reward.base import OWN_ARGUMENTS, Call

Parameters = Mapping[str, inspect.Parameter]
Plain = str | float | int | None

TRL_BATCH = ("prompts", "completions", "completion_ids")
TRL_EXTRAS = ("trainer_state", "log_extra", "log_metric")
VERL_TEXT = ("solution_str", "model_output", "predict_str")
"""What verl and its scorers call the text of the completion."""
VERL_PLURALS = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}
"""Parameters of verl's batch reward manager."""


@dataclass(slots=True)
class Report:
    """What a function reports beside its value."""

    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Plain] = field(default_factory=dict)

    def log_metric(self, name: str, value: SupportsFloat) -> None:
        """TRL's `log_metric`."""
        self.metrics[name] = finite(value)

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """TRL's `log_extra`, of a batch of one."""
        (value,) = values
        self.columns[column] = value if isinstance(value, Plain) else str(value)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of TRL's `trainer_state` that exists here."""

    global_step: int
    """Version of the policy that finished the completion: publications since the start of the run."""


class Signature(Protocol):
    """One way to call a reward function."""

    title: str
    """For messages."""
    own: Collection[str]
    """Names of the arguments that do not come from the data."""
    gives_rest: bool
    """Whether `**kwargs` takes the columns that no parameter names."""

    def names(self, columns: Collection[str]) -> set[str]:
        """Return the names of all arguments that can be given."""

    def arguments(self, call: Call, report: Report) -> dict[str, object]:
        """Return these arguments."""

    def value(self, result: Any, report: Report) -> float | None:
        """Read a result. None: the function does not apply to this completion.

        Raises:
            RewardFailed: it is not what the signature promises.
        """


class OwnSignature:
    title = "tailrace's signature"
    own: Collection[str] = OWN_ARGUMENTS
    gives_rest = True

    def names(self, columns: Collection[str]) -> set[str]:
        return {*OWN_ARGUMENTS, *columns}

    def arguments(self, call: Call, report: Report) -> dict[str, object]:
        return call.arguments()

    def value(self, result: Any, report: Report) -> float:
        if isinstance(result, list):
            detail = f"{reprlib.repr(result)}: for a function that returns lists set signature = 'trl'"
            raise RewardFailed("not a number", detail, is_defect=True)
        return finite(result)


class TrlSignature:
    title = "TRL's signature, called with lists of one"
    own: Collection[str] = (*TRL_BATCH, *TRL_EXTRAS)
    gives_rest = True

    def names(self, columns: Collection[str]) -> set[str]:
        return {*self.own, *columns} - {"prompt", "completion"}

    def arguments(self, call: Call, report: Report) -> dict[str, object]:
        is_chat = isinstance(call.given, list)
        completion = call.messages or [{"role": "assistant", "content": call.completion}]
        columns: dict[str, object] = {
            name: [value] for name, value in call.row.items() if name not in ("prompt", "completion")
        }
        return columns | {
            "prompts": [call.prompt if call.given is None else call.given],
            "completions": [list(completion) if is_chat else call.completion],
            "completion_ids": [list(call.completion_ids)],
            "trainer_state": TrainerState(call.version),
            "log_extra": report.log_extra,
            "log_metric": report.log_metric,
        }

    def value(self, result: Any, report: Report) -> float | None:
        try:
            (value,) = result
        except (TypeError, ValueError) as why:
            raise RewardFailed("not a list of one", reprlib.repr(result), is_defect=True) from why
        return None if value is None else finite(value)


class VerlSignature:
    title = "verl's signature"
    own: Collection[str] = (*VERL_TEXT, "solution_strs", "extra_info", "extra_infos")
    gives_rest = False

    def names(self, columns: Collection[str]) -> set[str]:
        names = {*VERL_TEXT, "extra_info", *({"data_source"} & {*columns})}
        if {"reward_model", "ground_truth"} & {*columns}:
            names.add("ground_truth")
        return names | {many for many, one in VERL_PLURALS.items() if one in names}

    def arguments(self, call: Call, report: Report) -> dict[str, object]:
        row = call.row
        arguments: dict[str, object] = dict.fromkeys(VERL_TEXT, call.completion)
        arguments |= {name: row[name] for name in ("data_source", "ground_truth") if name in row}
        if isinstance(model := row.get("reward_model"), Mapping) and "ground_truth" in model:
            arguments["ground_truth"] = model["ground_truth"]
        extra = row.get("extra_info")
        arguments["extra_info"] = dict(extra) if isinstance(extra, Mapping) else {}
        return arguments | {many: [arguments[one]] for many, one in VERL_PLURALS.items() if one in arguments}

    def value(self, result: Any, report: Report) -> float:
        if isinstance(result, list | tuple) and result:  # as verl: the first is the score
            result = result[0]
        if not isinstance(result, Mapping):
            return finite(result)
        if "score" not in result:
            raise RewardFailed("not a number", f"no 'score' in {reprlib.repr(result)}", is_defect=True)
        for name, value in result.items():
            if name != "score" and isinstance(value, SupportsFloat):
                report.log_metric(name, value)
            elif isinstance(value, str):
                report.columns[name] = value
        return finite(result["score"])


SIGNATURES: Mapping[str, Callable[[], Signature]] = {
    "tailrace": OwnSignature,
    "trl": TrlSignature,
    "verl": VerlSignature,
}


def recognise(signature: inspect.Signature) -> str:
    """Return the name of the signature that the parameters show, a key of SIGNATURES."""
    names = signature.parameters.keys()
    if {"solution_str", "solution_strs"} & names or ("ground_truth" in names and {*VERL_TEXT} & names):
        return "verl"
    returns_list = "list" in str(signature.return_annotation).lower()
    return "trl" if {"prompts", "completions"} & names or returns_list else "tailrace"


def finite(number: Any) -> float:
    """Return a number as a float.

    Raises:
        RewardFailed: it is no number, or not finite.
    """
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
