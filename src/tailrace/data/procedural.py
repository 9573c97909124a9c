"""Procedural tasks of reasoning-gym: endless prompts, each with a scorer that knows its answer.

Random access: prompt `index` is a function of (settings, seed, split, index) alone; with a `size`, of its row
number. Draws whose text belongs
to the other split are drawn again, so training and evaluation share no prompt, whatever their seeds: the
text alone decides (`is_held_out`).
"""

import difflib
import math
import re
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from random import Random
from typing import Any

import msgspec

from tailrace.data.base import ProceduralSettings, Split, TermsSettings
from tailrace.data.epochs import Epochs
from tailrace.data.tokenizer import Tokenizer
from tailrace.errors import BadRow, ConfigError
from tailrace.types import Prompt

HELD_OUT_ONE_IN = 16
"""The share of a task's different prompts that is only evaluated on."""
MAX_DRAWS = 400
"""For one prompt. By chance alone, all draws of an evaluation prompt fail once in 10^11."""
PAGE = 256
"""Consecutive prompts that come from one dataset of the task: for some tasks, making one takes a second."""
MAX_DATASETS = 256
"""Kept for the next prompt of their page and difficulty."""
MAX_ROWS = 4096
"""Kept for the next epoch, tokenised."""


def is_held_out(question: str) -> bool:
    """Whether a prompt belongs to evaluation. Its text decides, so no seed can put it into training."""
    return zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0


def draw_length(terms: TermsSettings, random: Random) -> int:
    """A lognormal number, rounded and clipped to [minimum, maximum]."""
    length = round(terms.median * math.exp(terms.sigma * random.gauss(0.0, 1.0)))
    return min(max(length, terms.minimum), terms.maximum)


class Task:
    """A task of reasoning-gym with its parameters.

    Raises:
        ConfigError: reasoning-gym is not installed, or the settings do not fit the task.
    """

    def __init__(self, settings: ProceduralSettings) -> None:
        self._settings = settings
        self._dataset_type, self._config_type = _find_task(settings.task)
        self._check_names()
        self._answer = _compile(settings.answer)
        for shortest in (True, False):
            self._probe({k: t.minimum if shortest else t.maximum for k, t in settings.lengths.items()})
        self._scorer = self.dataset(0, {})

    def dataset(self, seed: int, lengths: Mapping[str, int]) -> Any:
        """A dataset of PAGE entries of one difficulty."""
        params = dict(self._settings.params)
        for name, length in lengths.items():
            params |= {f"min_{name}": length, f"max_{name}": length}
        return self._dataset_type(config=self._config_type(**params, seed=seed, size=PAGE))

    def question(self, entry: Mapping[str, Any]) -> str:
        """What the model reads."""
        return self._settings.template.replace("{question}", entry["question"])

    def score(self, completion: str, row: Mapping[str, object]) -> float:
        """The task's own score of the extracted answer; 0 where there is none to extract."""
        answer: str | None = completion
        if self._answer is not None:
            answer = None
            for match in self._answer.finditer(completion):
                answer = match.group(match.re.groups)
        return 0.0 if answer is None else float(self._scorer.score_answer(answer, row))

    def _check_names(self) -> None:
        """Every parameter exists, and the seed and the number of entries stay ours."""
        known = sorted({field.name for field in fields(self._config_type)} - {"seed", "size"})
        for name, value in self._settings.params.items():
            if name not in known:
                problem = f"{self._settings.task} has no such parameter"
                raise ConfigError(f"data.params.{name}", value, problem, _suggest(name, known))
        ranges = [name[4:] for name in known if name.startswith("min_") and f"max_{name[4:]}" in known]
        for name, terms in self._settings.lengths.items():
            key, task = f"data.lengths.{name}", self._settings.task
            if name not in ranges:
                problem = f"{task} has no min_{name} and max_{name}"
                raise ConfigError(key, name, problem, _suggest(name, ranges))
            if terms.minimum > terms.maximum:
                remedy = f"its maximum is {terms.maximum}: choose at most that"
                raise ConfigError(f"{key}.minimum", terms.minimum, "no number is that long", remedy)
        if "{question}" not in self._settings.template:
            remedy = "write {question} where the task's question belongs"
            raise ConfigError("data.template", self._settings.template, "the question is not in it", remedy)

    def _probe(self, lengths: Mapping[str, int]) -> None:
        """Draw one entry, send it through the process border, and score its own answer."""
        try:
            dataset = self.dataset(0, lengths)
            entry = dataset[0]
            expected = dataset.score_answer(entry["answer"], entry)
        except Exception as why:
            # A task checks its parameters with asserts and whatever else it meets.
            remedy = "change data.params or data.lengths"
            problem = f"the task refuses its parameters ({why!r})"
            raise ConfigError("data.task", self._settings.task, problem, remedy) from why
        try:
            carried = msgspec.msgpack.decode(msgspec.msgpack.encode(row_of(entry)))
            kept = dataset.score_answer(entry["answer"], carried) == expected
        except TypeError:
            kept = False
        if not kept:
            problem = "its scorer needs Python objects that cannot be sent to the process that scores"
            raise ConfigError("data.task", self._settings.task, problem, "choose another task")


class ProceduralPrompts:
    """The endless prompts of a task."""

    def __init__(
        self, task: Task, settings: ProceduralSettings, tokenizer: Tokenizer, seed: int, split: Split
    ):
        self._task = task
        self._lengths = settings.lengths
        self._tokenizer = tokenizer
        self._seed = seed
        self._held_out = split == "eval"
        self._epochs = Epochs(settings.size, seed) if settings.size and split == "train" else None
        self._datasets: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._made = lru_cache(maxsize=MAX_ROWS)(self._make)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index) if self._epochs else None
        return Prompt(index, *self._made(index if row_number is None else row_number), row_number)

    def _make(self, index: int) -> tuple[list[int], str, dict[str, object]]:
        """Its ids, its text and its row."""
        for draw in range(MAX_DRAWS):
            entry = self._entry(index, draw)
            if is_held_out(entry["question"]) == self._held_out:
                text = self._task.question(entry)
                return self._tokenizer.encode(text), text, row_of(entry)
        raise BadRow("no prompt in the split", f"{MAX_DRAWS} draws all belong to the other one")

    def _entry(self, index: int, draw: int) -> dict[str, Any]:
        random = Random(f"{self._seed}/{index}/{draw}")
        lengths = {name: draw_length(terms, random) for name, terms in self._lengths.items()}
        page, place = divmod(index, PAGE)
        key = (page, draw, *lengths.values())
        if key not in self._datasets:
            # reasoning-gym adds the place to the seed, and some tasks want the sum below 2^32.
            seed = Random(f"{self._seed}/{page}/{draw}").randrange(2**32 - PAGE)
            self._datasets[key] = self._task.dataset(seed, lengths)
        self._datasets.move_to_end(key)
        if len(self._datasets) > MAX_DATASETS:
            self._datasets.popitem(last=False)
        entry: dict[str, Any] = self._datasets[key][place]
        return entry


def row_of(entry: Mapping[str, Any]) -> dict[str, object]:
    """The entry (question, answer, metadata) in what msgpack can carry.

    Raises:
        TypeError: it holds something that msgpack cannot carry.
    """
    row: dict[str, object] = msgspec.to_builtins(dict(entry), str_keys=False, enc_hook=_plain)
    return row


def _plain(value: object) -> object:
    """Strings of numpy and the like: their base type says all there is to say."""
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _find_task(name: str) -> tuple[Any, Any]:
    """The dataset class and the config class of a task."""
    try:
        import reasoning_gym
    except ImportError as why:
        remedy = "pip install 'tailrace[quickstart]'"
        raise ConfigError("data.kind", "reasoning_gym", f"it is not installed ({why})", remedy) from why
    tasks: dict[str, tuple[Any, Any]] = reasoning_gym.factory.DATASETS
    if name not in tasks:
        raise ConfigError("data.task", name, "reasoning-gym has no such task", _suggest(name, sorted(tasks)))
    return tasks[name]


def _compile(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as why:
        problem = f"it is no regular expression ({why})"
        raise ConfigError("data.answer", pattern, problem, "mend the expression") from why


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"it has {', '.join(known)}" if known else "remove it"
