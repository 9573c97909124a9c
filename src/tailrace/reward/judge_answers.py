"""Answers of a judge: the score in them, and those that were given before."""

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, SupportsFloat

from tailrace.reward.judge_settings import EndpointJudgeSettings

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_DECODER = json.JSONDecoder()


def score_reader(settings: EndpointJudgeSettings) -> Callable[[str], float | None]:
    """Return a function from an answer to its score, 0 to 1; None where the answer cannot be read."""
    values = {word.lower(): value for word, value in settings.values.items()}
    worst, best = settings.scale

    def read(answer: str) -> float | None:
        found = _find(settings, answer)
        word = str(found).strip().lower()
        try:
            number = values[word] if word in values else float(found)
        except (TypeError, ValueError, OverflowError):
            return None
        score = (number - worst) / (best - worst)
        return score if 0 <= score <= 1 else None

    return read


def _find(settings: EndpointJudgeSettings, answer: str) -> Any:
    """Return what the answer gives as the score, as text or JSON; None: nothing."""
    if settings.field is None:
        matches: list[str] = re.findall(settings.pattern or _NUMBER, answer)
        return matches[-1] if matches else None
    for match in reversed(list(re.finditer(r"\{", answer))):
        with suppress(ValueError, RecursionError):
            found, _ = _DECODER.raw_decode(answer, match.start())
            value = found.get(settings.field)
            if isinstance(value, str | SupportsFloat):
                return value
    return None


class AnswerCache:
    """Answers by question: the ones used last in memory, and all in a folder where one is named."""

    def __init__(self, size: int, folder: Path | None) -> None:
        self._size, self._folder = size, folder
        self._answers: OrderedDict[str, str] = OrderedDict()

    @staticmethod
    def key(*question: object) -> str:
        """Return the key of a question, which is plain data."""
        return blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=16).hexdigest()

    def get(self, key: str) -> str | None:
        """Return the answer to a question, or None."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        answer = None
        if self._folder:
            with suppress(OSError, ValueError):
                answer = self._file(self._folder, key).read_text()
                self._remember(key, answer)
        return answer

    def put(self, key: str, answer: str) -> None:
        """Keep an answer."""
        self._remember(key, answer)
        if self._folder:
            with suppress(OSError):  # the run goes on without the cache
                file = self._file(self._folder, key)
                file.parent.mkdir(parents=True, exist_ok=True)
                new = file.with_suffix(".new")
                new.write_text(answer)
                new.replace(file)

    def _remember(self, key: str, answer: str) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key[2:]}.txt"
