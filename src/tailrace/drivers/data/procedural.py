"""Procedural tasks of reasoning-gym: endless prompts with a scorer that knows the answer.

A prompt is a function of (settings, seed, split) and its index, or its row number where the data has a
`size`. The text of a question alone decides to which split it belongs. A draw that belongs to the other split
is drawn again, so training and evaluation share no prompt, whatever their seeds.
"""

import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from random import Random
from typing import Any

import msgspec

from tailrace.contracts.data import HELD_OUT_ONE_IN, Epochs, Prompts, Split
from tailrace.drivers.data.encoding import PromptEncoder
from tailrace.drivers.data.open import Encoders
from tailrace.drivers.data.settings import ProceduralSettings, TermsSettings
from tailrace.errors import BadRow, ConfigError, did_you_mean
from tailrace.importing import install
from tailrace.types import Prompt

MAX_DRAWS = 400
"""Draws for one prompt. All draws of an evaluation prompt fail by chance once in 10^11."""
PAGE = 256
"""Consecutive prompts that come from one dataset of the task. Some tasks need a second to make a dataset."""
MAX_DATASETS = 256
"""Datasets kept in memory for the next prompt of their page and difficulty."""
MAX_ROWS = 4096
"""Tokenised rows kept in memory for the next epoch."""


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to evaluation."""
    return zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0


def draw_length(terms: TermsSettings, random: Random) -> int:
    """Draw a lognormal number, rounded and clipped to [minimum, maximum]."""
    length = round(terms.median * math.exp(terms.sigma * random.gauss(0.0, 1.0)))
    return min(max(length, terms.minimum), terms.maximum)


class Task:
    """A task of reasoning-gym with its parameters. Raises a ConfigError if reasoning-gym is not installed, or
    the settings do not fit the task."""

    def __init__(self, settings: ProceduralSettings) -> None:
        self._settings = settings
        self._dataset_type, self._config_type = _find_task(settings.task)
        self._check_names()
        try:
            self._answer = None if settings.answer is None else re.compile(settings.answer)
        except re.error as why:
            problem = f"it is not a regular expression ({why})"
            raise ConfigError("data.answer", settings.answer, problem, "correct the expression") from why
        self._probe({name: terms.minimum for name, terms in settings.lengths.items()})
        self._probe({name: terms.maximum for name, terms in settings.lengths.items()})
        self._scorer = self.dataset(0, {})

    def dataset(self, seed: int, lengths: Mapping[str, int]) -> Any:
        """Make a dataset of PAGE entries. `lengths`: value of each difficulty parameter of `data.lengths`."""
        params = dict(self._settings.params)
        for name, length in lengths.items():
            params |= {f"min_{name}": length, f"max_{name}": length}
        return self._dataset_type(config=self._config_type(**params, seed=seed, size=PAGE))

    def question(self, entry: Mapping[str, Any]) -> str:
        """Return the text of the prompt: the question in `data.template`."""
        return self._settings.template.replace("{question}", entry["question"])

    def score(self, completion: str, row: Mapping[str, object]) -> float:
        """Return the task's own score of the extracted answer, or 0 where no answer can be extracted."""
        answer: str | None = completion
        if self._answer is not None:
            matches = list(self._answer.finditer(completion))
            answer = matches[-1].group(self._answer.groups) if matches else None
        return 0.0 if answer is None else float(self._scorer.score_answer(answer, row))

    def _check_names(self) -> None:
        """Check that the task has each parameter. The seed and the number of entries cannot be set."""
        task, template = self._settings.task, self._settings.template
        known = sorted({field.name for field in fields(self._config_type)} - {"seed", "size"})
        for name, value in self._settings.params.items():
            if name not in known:
                problem = f"{task} has no such parameter"
                raise ConfigError(f"data.params.{name}", value, problem, did_you_mean(name, known))
        ranges = [name[4:] for name in known if name.startswith("min_") and f"max_{name[4:]}" in known]
        for name, terms in self._settings.lengths.items():
            key = f"data.lengths.{name}"
            if name not in ranges:
                problem = f"{task} has no min_{name} and max_{name}"
                raise ConfigError(key, name, problem, did_you_mean(name, ranges))
            if terms.minimum > terms.maximum:
                remedy = f"choose at most {terms.maximum}"
                raise ConfigError(f"{key}.minimum", terms.minimum, "it is larger than the maximum", remedy)
        if "{question}" not in template:
            remedy = "write {question} where the task's question belongs"
            raise ConfigError("data.template", template, "the question is not in it", remedy)

    def _probe(self, lengths: Mapping[str, int]) -> None:
        """Draw one entry, encode it as for another process, and score its own answer."""
        try:
            dataset = self.dataset(0, lengths)
            entry = dataset[0]
            expected = dataset.score_answer(entry["answer"], entry)
        except Exception as why:
            # Tasks check their parameters with asserts and with errors of any type.
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
        self, task: Task, settings: ProceduralSettings, encoder: PromptEncoder, seed: int, split: Split
    ) -> None:
        self._task, self._lengths, self._encoder = task, settings.lengths, encoder
        self._seed, self._held_out = seed, split == "eval"
        self.num_rows = settings.size if split == "train" else None
        self._epochs = Epochs(settings.size, seed) if settings.size and split == "train" else None
        self._dataset = lru_cache(maxsize=MAX_DATASETS)(self._make_dataset)
        self._made = lru_cache(maxsize=MAX_ROWS)(self._make)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index) if self._epochs else None
        ids, text, row, question = self._made(index if row_number is None else row_number)
        opened = self._encoder.opened(question, text)
        return Prompt(index, ids, text, row, row_number, question, opened=opened)

    def _make(self, index: int) -> tuple[list[int], str, dict[str, object], str]:
        """Return the token ids, the text and the row of a prompt, and its question."""
        entry = self._entry_of_split(index)
        question = self._task.question(entry)
        text, ids = self._encoder.encode(question)
        return ids, text, row_of(entry), question

    def _entry_of_split(self, index: int) -> dict[str, Any]:
        """Draw until an entry belongs to the split."""
        for draw in range(MAX_DRAWS):
            entry = self._entry(index, draw)
            if is_held_out(entry["question"]) == self._held_out:
                return entry
        raise BadRow("no prompt in the split", f"{MAX_DRAWS} draws all belong to the other one")

    def _entry(self, index: int, draw: int) -> dict[str, Any]:
        random = Random(f"{self._seed}/{index}/{draw}")
        lengths = tuple((name, draw_length(terms, random)) for name, terms in self._lengths.items())
        page, place = divmod(index, PAGE)
        entry: dict[str, Any] = self._dataset(page, draw, lengths)[place]
        return entry

    def _make_dataset(self, page: int, draw: int, lengths: tuple[tuple[str, int], ...]) -> Any:
        # reasoning-gym adds the place to the seed, and some tasks want the sum below 2^32.
        seed = Random(f"{self._seed}/{page}/{draw}").randrange(2**32 - PAGE)
        return self._task.dataset(seed, dict(lengths))


def row_of(entry: Mapping[str, Any]) -> dict[str, object]:
    """Return an entry (question, answer, metadata) as values that msgpack can encode. Raises a TypeError if
    it holds a value that msgpack cannot encode."""
    row: dict[str, object] = msgspec.to_builtins(dict(entry), str_keys=False, enc_hook=_plain)
    return row


def _plain(value: object) -> object:
    """Convert subclasses of plain types, such as numpy's strings, to the plain type."""
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _find_task(name: str) -> tuple[Any, Any]:
    """Return the dataset class and the config class of a task."""
    try:
        import reasoning_gym
    except ImportError as why:
        remedy = install("quickstart")
        raise ConfigError(
            "data.kind", "reasoning_gym", f"the package reasoning-gym is not installed ({why})", remedy
        ) from why
    tasks: dict[str, tuple[Any, Any]] = reasoning_gym.factory.DATASETS
    if name not in tasks:
        raise ConfigError(
            "data.task", name, "reasoning-gym has no such task", did_you_mean(name, sorted(tasks))
        )
    return tasks[name]


class ProceduralData:
    """`DataKind` of the tasks of reasoning-gym."""

    def open(self, data: ProceduralSettings, encoders: Encoders, seed: int, split: Split) -> Prompts:
        encoder = encoders(data)
        return ProceduralPrompts(Task(data), data, encoder, seed, split)

    def scorer(self, data: ProceduralSettings) -> tuple[str, Callable[..., float]]:
        task = Task(data)
        return data.task, lambda completion, **row: task.score(completion, row)
