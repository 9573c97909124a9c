"""What can go wrong, drawn.

TailraceError
|-- ConfigError          the user's words: key, value, remedy; before anything starts; exit code 2
|-- ScheduleError        a schedule broke its word
|   |-- StalenessError   it trained tokens older than it promised
|   |-- NeverComes       it waits for groups that nothing in flight can become
|   `-- GroupsLost       it took groups and neither trained, dropped nor parked them
|-- LedgerError          the books do not close, or the ledger cannot be read or written
|-- Stuck                every task waits and nothing can wake them; names who waits for what
|-- WorkerDied           a worker process ended; carries its traceback
|-- CheckpointError      a checkpoint that cannot be read or belongs to another config
|-- DiskFull             a file of the run could not be written; names it
|-- Evicted              an engine gives a request back; its tokens are kept; ask another engine
|   `-- EngineDied
|-- RewardBroken         the reward function always fails; carries the first traceback
|-- RewardFailed         a sample cannot be rewarded: data, not a crash
`-- BadRow               a row of the data has no usable prompt: data, not a crash
"""


class TailraceError(Exception):
    """The root: catching it catches all of ours and nothing else."""


class ConfigError(TailraceError):
    """A setting that cannot work.

    Example:
        >>> print(ConfigError("schedule.U", 3, "R = 64 is not divisible by it", "choose 1, 2 or 4"))
        schedule.U = 3: R = 64 is not divisible by it; choose 1, 2 or 4
    """

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}; {remedy}")
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy


class ScheduleError(TailraceError):
    """A schedule broke its word."""


class StalenessError(ScheduleError):
    """A schedule trained tokens older than it promised."""


class NeverComes(ScheduleError):
    """A take that nothing in flight can ever satisfy: an error at once, not a silent hang."""


class GroupsLost(ScheduleError):
    """A schedule took groups and neither trained, dropped nor parked them."""


class LedgerError(TailraceError):
    """The books do not close: a defect of ours. Or the ledger is missing, damaged, of another config, or
    cannot be written; the message names it and the remedy."""


class Stuck(TailraceError):
    """Every task waits. The message names who waits for what."""


class WorkerDied(TailraceError):
    """A worker process ended before it was asked to. The message carries its last words."""


class CheckpointError(TailraceError):
    """A checkpoint that is torn, or of another config. The message names the file and the remedy."""


class DiskFull(TailraceError):
    """A file of the run could not be written to its end. The message names it and the remedy."""


class Evicted(TailraceError):
    """This engine will not go on with a request; its tokens are kept; ask another engine."""


class EngineDied(Evicted):
    """The engine is gone."""


class RewardBroken(TailraceError):
    """The reward function failed so often in sequence that the run ends.

    Args:
        num_failures: consecutive failures.
        first: reason and traceback of the first of them.
    """

    def __init__(self, num_failures: int, first: str) -> None:
        super().__init__(
            f"the last {num_failures} samples in sequence could not be rewarded (reward.max_failures); "
            f"the first failure: {first}"
        )


class RewardFailed(TailraceError):
    """A sample cannot be rewarded.

    Args:
        reason: what the metrics count it under.
        detail: the traceback of the user's function, or what is known of the cause.
        is_defect: the exception is of a kind that shows a defect of the function, whatever the completion is.
    """

    def __init__(self, reason: str, detail: str = "", *, is_defect: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.is_defect = reason, detail, is_defect


class BadRow(TailraceError):
    """A row of the data cannot become a prompt. `reason` is what the metrics count it under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def first_cause(error: BaseException) -> BaseException:
    """The first error that is no group of errors: what ended the tasks beside it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
