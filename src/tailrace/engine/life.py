"""The contract of one life of an engine: what `engine/supervised.py` restarts."""

from typing import Protocol

from tailrace.engine.base import Capabilities, Usage
from tailrace.engine.counter import TokenCounter
from tailrace.types import KV, Sample
from tailrace.weights.base import Weights


class EngineLife(Protocol):
    """One life of an engine: a process, or a connection to a server. Raises EngineDied once it has ended."""

    capabilities: Capabilities
    counter: TokenCounter
    """Counts the tokens that samples gain; the owner sets it."""

    async def ready(self) -> None:
        """Wait until it can serve.

        Raises:
            TailraceError: it cannot.
        """

    async def generate(self, sample: Sample) -> None:
        """As Engine.generate."""

    async def load(self, weights: Weights, *, kv: KV) -> None:
        """As Engine.load.

        Raises:
            TransferFailed: the engine has its old weights and goes on with them; the load may be repeated.
        """

    async def sleep(self) -> None:
        """Give the device's memory free. Nothing runs."""

    async def wake(self) -> None:
        """Take the memory back. The weights are the model's own until the next load, which the owner sends if
        there was a publication."""

    def usage(self) -> Usage:
        """As Engine.usage, since the start of this life."""

    async def died(self) -> str:
        """Wait until it has ended or does not answer any more, and return how, in words."""

    async def close(self) -> None:
        """End it, or leave the server. No sample grows afterwards."""
