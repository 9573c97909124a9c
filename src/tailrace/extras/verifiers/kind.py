"""The environment "verifiers", and the data of its tasks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from typing_extensions import override

from tailrace.contracts.data import Split
from tailrace.contracts.environments import Environment
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.environments.history import RequestEncoder
from tailrace.extras.agents.kind import Programs, serving
from tailrace.extras.verifiers.taskset import TaskPrompts, TasksetSettings, VerifiersSettings


class TasksetData:
    """`DataKind` (drivers/data/open.py) of a taskset."""

    settings = TasksetSettings

    def open(self, data: TasksetSettings, encoders: object, seed: int, split: Split) -> TaskPrompts:
        return TaskPrompts(data, seed, split)


class TasksetEnvironments(Programs):
    """The environment of a taskset."""

    settings = VerifiersSettings

    @override
    @asynccontextmanager
    async def open(
        self, settings: VerifiersSettings, tokenizer: Tokenizer, encoder: RequestEncoder
    ) -> AsyncIterator[Environment]:
        # Not at the top: verifiers takes seconds to import, and may not be installed.
        from tailrace.extras.verifiers.environment import open_verifiers

        async with (
            serving(settings.kind, tokenizer) as (server, thread),
            open_verifiers(settings, encoder, server, thread) as environment,
        ):
            yield environment
