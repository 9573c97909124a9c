"""Every error that a user can meet, and `say` for anything else. A ConfigError ends a command with code 2,
before anything starts."""

import difflib
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from errno import EFBIG, ENOENT, EROFS
from typing import ClassVar, Self


def say(line: str) -> None:
    """Tell the user something beside the results. An output that is closed or full ends no run."""
    with suppress(OSError, ValueError):
        print(f"tailrace: {line}", file=sys.stderr)


class TailraceError(Exception):
    """The base class of all errors of this package.

    Attributes:
        arguments: with which it was made, by position; with `named`, those by name, it can be made again.
    """

    def __new__(cls, *arguments: object, **named: object) -> Self:
        error = super().__new__(cls, *arguments)
        error.arguments, error.named = arguments, named
        return error

    arguments: tuple[object, ...]
    named: dict[str, object]


class ConfigError(TailraceError):
    """A setting that cannot work: key, value, problem and remedy.

    Example:
        >>> print(ConfigError("run.rounds", 0, "a run has at least one round", "raise it"))
        run.rounds = 0: a run has at least one round; raise it
    """

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}; {remedy}")
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy


class ScheduleError(TailraceError):
    """A schedule did what it must not do."""


class StalenessError(ScheduleError):
    """A schedule trained tokens older than it declared."""


class NeverComes(ScheduleError):
    """A schedule waits for more groups than are in flight."""


class GroupsLost(ScheduleError):
    """A schedule took groups and neither trained, dropped nor parked them."""


class LedgerError(TailraceError):
    """Tokens are unaccounted for (a defect of this package), or the ledger is missing, damaged, of another
    config, or cannot be written. The message names the ledger and the remedy."""


class Stuck(TailraceError):
    """Every task waits. The message names which task waits for what."""


class WorkerDied(TailraceError):
    """A worker process ended before it was asked to. The message carries the end of its log."""


class NotFinite(TailraceError):
    """Optimizer steps had no finite loss or gradient. The message names the first of them."""


class CheckpointError(TailraceError):
    """A checkpoint is damaged or of another config. The message names the file and the remedy."""


class DiskFull(TailraceError):
    """A file of the run could not be written completely. The message names the file and the remedy."""


class FolderLost(TailraceError):
    """The folder of the run, or a part of it, was removed while it was written, or is read-only now."""


class Interrupted(TailraceError):
    """A signal ended the run in order. The message says what was saved and how to resume."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class Evicted(TailraceError):
    """An engine gives a request back. Its tokens are kept; another engine continues it."""


class VersionGone(Evicted):
    """The engine, or every engine, does not have the version that a pinned sample began with."""


class EngineDied(Evicted):
    """The engine has ended."""


class TransferFailed(TailraceError):
    """Weights did not reach an engine, which keeps the old ones. The message names the peer. Sending again,
    over a new link, may succeed."""


class NotJoined(TransferFailed):
    """Engines did not come to the process group of a transfer. `ranks`: theirs; none: those of the engine
    that raised it."""

    def __init__(self, message: str, *ranks: int) -> None:
        super().__init__(message)
        self.ranks = ranks


class NotArrived(TransferFailed):
    """An engine loaded a publication, and answers the probe otherwise than it. The message says why."""


class WeightsRefused(TailraceError):
    """The published tensors are not those of the served model. The message names them. The engine was not
    touched. Sending again does not help."""


class NotWoken(TailraceError):
    """An engine or the trainer could not take the memory of its device back."""


class ServerRefused(TailraceError):
    """An inference server answered with an error.

    Args:
        request: method and address.
        status: HTTP status.
        reply: the body, as text.
    """

    def __init__(self, request: str, status: int, reply: str) -> None:
        super().__init__(f"{request} was answered with {status}: {reply[:500]}")
        self.request, self.status, self.reply = request, status, reply


class EnginesLost(TailraceError):
    """All engines are dead and none came back in time. The message says how each ended."""


class SandboxFailed(TailraceError):
    """A sandbox did not start its program. Starting it again may succeed."""


class _TooManyFailures(TailraceError):
    """Too many failures in succession; the run ends. `first`: reason and traceback of the first of them."""

    words: ClassVar[str]

    def __init__(self, num_failures: int, first: str) -> None:
        super().__init__(f"the last {num_failures} {self.words}; the first failure: {first}")


class RewardBroken(_TooManyFailures):
    """The reward function failed for so many samples in sequence that the run ends."""

    words = "samples in sequence could not be rewarded (reward.max_failures)"


class EnvironmentBroken(_TooManyFailures):
    """Too many episodes in succession failed; the run ends."""

    words = "episodes in sequence failed (environment.max_failures)"


class AllFiltered(TailraceError):
    """Too many groups in succession were filtered; the run ends."""


class AllDropped(TailraceError):
    """Too many groups in succession had no sample with a reward; the run ends."""


class AllLate(TailraceError):
    """Too many groups in succession had no member before their deadline; the run ends."""


class _CountedFailure(TailraceError):
    """Data, not a crash: one sample or row fails.

    Args:
        reason: what the metrics count it under, a few words.
        detail: what is known of the cause, such as the traceback of the user's function.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class RewardFailed(_CountedFailure):
    """A sample has no reward. `is_defect`: the exception is of a kind that shows a defect of the function,
    whatever the completion is."""

    def __init__(self, reason: str, detail: str = "", *, is_defect: bool = False) -> None:
        super().__init__(reason, detail)
        self.is_defect = is_defect


class EnvironmentFailed(_CountedFailure):
    """An environment cannot play an episode to its end: the sample fails."""


class BadRow(_CountedFailure):
    """A row of the data has no usable prompt."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the remedy for an unknown name: the most similar names, or all."""
    close = difflib.get_close_matches(name, known)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"it has: {', '.join(known)}" if known else "remove it"


def disk_remedy(why: BaseException) -> str:
    """Return the remedy for an error of writing a file, whose text has its number."""
    remedies = {ENOENT: "put it back", EROFS: "mount it for writing", EFBIG: "raise ulimit -f"}
    number = re.search(r"(?:Errno|os error) (\d+)", str(why))
    return remedies.get(int(number[1]) if number else 0, "make room on the disk")


def first_cause(error: BaseException) -> BaseException:
    """The first error that is not a group of errors. The other tasks were cancelled because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
