"""What the HTTP server needs of the process that runs the engine."""

from collections.abc import Callable
from typing import Protocol

from tailrace.engine.base import GenerationOutput, GenerationRequest, Usage
from tailrace.types import KV
from tailrace.weights.base import Link, Weights


class ComputingEngine(Protocol):
    """An engine in another process, so that it computes while the server writes. Its methods raise WorkerDied
    once it has ended."""

    on_output: Callable[[GenerationOutput], None]
    """Called with new tokens, in order, several times a second for each request. The server sets it."""
    on_aborted: Callable[[str], None]
    """Called with the id of an aborted request after its last output. The server sets it."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. It must be one that the model can serve."""

    def abort(self, id: str) -> None:
        """End a request now."""

    async def pause(self) -> None:
        """Stop between two decode steps. All tokens have been handed to `on_output` when this returns."""

    async def resume(self) -> None:
        """Go on."""

    async def load(self, weights: Weights, link: Link, *, kv: KV) -> None:
        """Take new weights between two decode steps.

        Raises:
            WeightsRefused: they are not those of the model. The old ones stay.
            TransferFailed: they did not arrive. The old ones stay.
        """

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache. No request is under way."""

    async def wake(self) -> None:
        """The reverse. The weights are those of the start, and so is their version."""

    def usage(self) -> Usage:
        """The load and the counters of the last output."""
