"""The chat template of a served model in a process of its own. It is a program of whoever made the model: one
that takes too much time or memory takes them there."""

import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from tailrace.drivers.data.encoding import ChatTemplate, Then, load_tokenizer
from tailrace.drivers.workers.worker import Job, Worker, WorkerConnection
from tailrace.errors import BadRow

MAX_BYTES = 2**30
"""Memory that a template may take."""


class TemplateJob(Job):
    """Write the prompts of chats. `max_chars`: of a prompt."""

    model: Path
    max_chars: int


class TemplateWorker(Worker):
    """Writes prompts, one after another."""

    job_type = TemplateJob

    def __init__(self, template: ChatTemplate, max_chars: int) -> None:
        self._template, self._max_chars = template, max_chars

    @override
    @classmethod
    def load_job(cls, job: TemplateJob, connection: WorkerConnection) -> "TemplateWorker":
        tokenizer = load_tokenizer(job.model)
        with suppress(OSError):  # Linux only
            pages, *_ = Path("/proc/self/statm").read_text(encoding="utf-8").split()
            limit = int(pages) * resource.getpagesize() + MAX_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return cls(ChatTemplate(tokenizer), job.max_chars)

    def write(self, messages: list[dict[str, Any]], then: Then, arguments: dict[str, Any]) -> str:
        """Return the prompt for messages. Raises a BadRow. Arguments as of ChatTemplate.text."""
        text = self._template.text(messages, then, arguments)
        if len(text) > self._max_chars:
            problem = f"it writes {len(text)} characters, more than {self._max_chars}"
            raise BadRow("messages for which the chat template writes too much", problem)
        try:
            text.encode()  # JSON can spell halves of surrogate pairs
        except UnicodeEncodeError as why:
            raise BadRow("messages for which the chat template writes no Unicode", str(why)) from None
        return text
