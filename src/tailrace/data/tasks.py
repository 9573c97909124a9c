"""Prompts from the tasks of a taskset of verifiers, in an endless seeded order."""

from zlib import crc32

from tailrace.data.base import Epochs, Split, TasksetSettings
from tailrace.data.encoding import PromptEncoder
from tailrace.data.rows import hold_out
from tailrace.data.taskset import Taskset
from tailrace.errors import BadRow, ConfigError
from tailrace.types import Prompt


class TaskPrompts:
    """The endless prompts of one split of the tasks, shuffled anew in each epoch."""

    def __init__(self, settings: TasksetSettings, encoder: PromptEncoder, seed: int, split: Split) -> None:
        """
        Raises:
            ConfigError: the taskset cannot be loaded or played, no prompt of it fits, or the model has no
                chat template.
        """
        if not encoder.has_template or settings.chat_template == "never":
            problem = "the tasks of a taskset are chat messages, and the model has no chat template in use"
            remedy = "add a template to the model folder, and leave data.chat_template out"
            raise ConfigError("data.kind", "verifiers", problem, remedy)
        self._taskset, self._encoder = Taskset(settings), encoder
        tasks = self._taskset.load()
        digests = [crc32(task.key.encode()) for task in tasks]
        kept = hold_out("environment.taskset", settings.taskset, list(digests))
        pairs = zip(tasks, digests, strict=True)
        self._tasks = [task for task, digest in pairs if (digest in kept) == (split == "eval")]
        self._epochs = Epochs(len(self._tasks), seed)
        try:
            self._taskset.opening(self._tasks[0])
        except BadRow as why:
            problem = f"its first task gives no prompt ({why})"
            remedy = "name another agent in environment.agent, or another taskset"
            raise ConfigError("environment.taskset", settings.taskset, problem, remedy) from why
        messages = (self._taskset.opening(task).messages for task in self._tasks)
        encoder.check_that_one_fits("environment.taskset", settings.taskset, messages)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index)
        task = self._tasks[row_number]
        messages, tools = self._taskset.opening(task)
        text, ids = self._encoder.encode(messages, tools)
        row = {"task": self._taskset.row(task), "tools": tools}
        return Prompt(index, ids, text, row, row_number, messages)
