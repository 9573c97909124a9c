"""Teachers of on-policy distillation: what a run asks of a kind, and several teachers as one.

A teacher is a `Reference` (contracts/trainer.py): finished samples get log-probs under it in the stage in
which they are scored, and `algorithm.distill_coef` makes advantages of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from tailrace.config import LiveConfig, PolicyConfig
from tailrace.contracts.memory import ProcessMemory
from tailrace.contracts.trainer import Reference
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.kinds.base import Opening
from tailrace.drivers.reward.settings import TeacherSettings
from tailrace.errors import ConfigError, RewardFailed
from tailrace.kinds import kind_of
from tailrace.types import Sample


class TeacherKind:
    """A kind of teacher. The settings are always those of this kind."""

    def check(self, teacher: Any, config: LiveConfig) -> None:
        """Check a teacher before anything starts. Raises a ConfigError."""

    def memory(self, teacher: Any, config: PolicyConfig) -> Iterable[ProcessMemory]:
        """Estimate the memory of its processes on this machine, after `check`."""
        return ()

    async def begin(self, teacher: Any, name: str, opening: Opening) -> Reference:
        """Begin a teacher. `name`: of its process. Raises a ConfigError if it cannot teach this model."""
        raise NotImplementedError


def check_vocabulary(key: str, teacher: Path, model: Path) -> None:
    """Check that the teacher's tokenizer has each token of the model with the same id; it may have more.
    Raises a ConfigError with the first token that it has not."""
    theirs, words = (load_tokenizer(path).backend_tokenizer.get_vocab() for path in (teacher, model))
    for word, id in sorted(words.items(), key=itemgetter(1)):
        if theirs.get(word) != id:
            problem = f"token {id} of {model} is {word!r}, whose id is {theirs.get(word)} there"
            raise ConfigError(key, str(teacher), problem, SAME_TOKENIZER)


SAME_TOKENIZER = "name a model with the same tokenizer, or one with more tokens after the same ones"


def check_context(key: str, teacher: str, context: float, longest: int) -> None:
    """Check that a teacher reads the longest sample. Raises a ConfigError if its context is too short."""
    if context < longest:
        problem = f"it reads {context} tokens, and samples may have {longest}"
        remedy = "lower sampling.max_completion_tokens or data.max_prompt_tokens"
        raise ConfigError(key, teacher, problem, remedy)


def teacher_kind(teacher: TeacherSettings) -> TeacherKind:
    """Return the kind of a teacher."""
    kind: TeacherKind = kind_of("teacher", teacher.kind)
    return kind


def check_teachers(config: LiveConfig, rows: Sequence[Mapping[str, object]]) -> None:
    """Check the teachers before anything starts. Raises a ConfigError, also if a row has none."""
    for teacher in config.teacher:
        teacher_kind(teacher).check(teacher, config)
    for row in rows if config.teacher else ():
        if not any(teacher.teaches(row) for teacher in config.teacher):
            found = {name: row.get(name) for teacher in config.teacher for name in teacher.rows}
            problem = "no teacher has a row of the data with these values"
            raise ConfigError("teacher.rows", found, problem, "add a [[teacher]] without `rows` at the end")


async def begin_teachers(opening: Opening) -> Reference:
    """Begin the teachers of a run. Raises as `TeacherKind.begin`."""
    teachers = opening.config.teacher
    begun = [
        await teacher_kind(each).begin(each, f"teacher-{number}", opening)
        for number, each in enumerate(teachers)
    ]
    return Teachers([*zip(teachers, begun, strict=True)])


class Teachers:
    """A `Reference` that asks the first teacher of a sample's row."""

    def __init__(self, teachers: Sequence[tuple[TeacherSettings, Reference]]) -> None:
        self._teachers = teachers

    async def logprobs(self, sample: Sample) -> list[float]:
        """Return log-probs as `Reference.logprobs`. Raises a RewardFailed if no teacher has the row."""
        for settings, teacher in self._teachers:
            if settings.teaches(sample.prompt.row):
                return await teacher.logprobs(sample)
        raise RewardFailed("no teacher", "no [[teacher]] has the row of this sample", is_defect=True)
