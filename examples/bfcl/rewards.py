"""The calls of a turn against those that BFCL accepts: names, arguments, and their values."""

from typing import Any

from tailrace.drivers.environments.tools import ToolCall, parse_hermes


def calls_match(completion: str, answer: list[dict[str, Any]]) -> float:
    """1 if the turn makes the accepted calls in any order, and no other; else 0.

    Args:
        completion: the turn; each call is JSON between <tool_call> and </tool_call>.
        answer: BFCL's ground truth: for each call {name: {argument: [accepted values]}}. An empty text
            among the values: the argument may be left out.
    """
    calls = parse_hermes(completion)
    if len(calls) != len(answer) or any(call.problem for call in calls):
        return 0.0
    return float(_match(calls, answer))


def _match(calls: list[ToolCall], answer: list[dict[str, Any]]) -> bool:
    """Whether each call has an accepted one of its own. Several may accept the same call."""
    if not calls:
        return True
    first, *others = calls
    return any(
        _fits(first.name, first.arguments, accepted) and _match(others, answer[:place] + answer[place + 1 :])
        for place, accepted in enumerate(answer)
    )


def _fits(name: str, arguments: Any, accepted: dict[str, Any]) -> bool:
    return name in accepted and _has(arguments, accepted[name])


def _has(given: Any, accepted: dict[str, list[Any]]) -> bool:
    """Whether each argument has an accepted value, and none is missing that may not be left out."""
    if not given.keys() <= accepted.keys():
        return False
    return all(
        any(_equal(given[key], value) for value in values) if key in given else not values or "" in values
        for key, values in accepted.items()
    )


def _equal(given: Any, value: Any) -> bool:
    """Whether a value is an accepted one. Texts are compared without case, spaces and punctuation."""
    match given, value:
        case str(), str():
            return _plain(given) == _plain(value)
        case dict(), dict():
            return _has(
                given, {key: each if isinstance(each, list) else [each] for key, each in value.items()}
            )
        case list(), list():
            return len(given) == len(value) and all(map(_equal, given, value))
        case bool(), _ if not isinstance(value, bool):
            return False
    return bool(given == value)


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter not in " ,./-_*^'\"")
