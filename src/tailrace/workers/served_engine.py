"""The HTTP server's side of its engine process: requests go in, outputs come back as they are generated."""

from collections.abc import Callable

from tailrace.engine.base import GenerationOutput, GenerationRequest, Usage
from tailrace.types import KV
from tailrace.weights.base import Link, Weights
from tailrace.workers.conversation import Conversation
from tailrace.workers.engine_process import EngineProcess
from tailrace.workers.messages import Abort, Done, EngineJob, Load, Pause, Report, Resume, Sleep, Wake


class ServedEngine(EngineProcess):
    """A `ComputingEngine` (engine/serve/generation.py).

    Once the process has ended, every method raises WorkerDied.
    """

    def __init__(self, process: Conversation, job: EngineJob) -> None:
        super().__init__(process, job)
        self.on_output: Callable[[GenerationOutput], None] = lambda output: None
        self.on_aborted: Callable[[str], None] = lambda id: None

    def submit(self, request: GenerationRequest) -> None:
        """As ComputingEngine.submit."""
        self.process.send(request)

    def abort(self, id: str) -> None:
        """As ComputingEngine.abort."""
        self.process.send(Abort(id))

    async def pause(self) -> None:
        """As ComputingEngine.pause."""
        await self.process.ask(Pause(), Done)

    async def resume(self) -> None:
        """As ComputingEngine.resume."""
        await self.process.ask(Resume(), Done)

    async def load(self, weights: Weights, link: Link, *, kv: KV) -> None:
        """As ComputingEngine.load."""
        await self.process.ask(Load(weights, link, kv), Done)

    async def sleep(self) -> None:
        """As ComputingEngine.sleep."""
        await self.process.ask(Sleep(), Done)

    async def wake(self) -> None:
        """As ComputingEngine.wake."""
        await self.process.ask(Wake(), Done)

    def usage(self) -> Usage:
        """As ComputingEngine.usage."""
        return self._usage

    def _on_report(self, report: Report) -> None:
        for output in report.outputs:
            self.on_output(output)
        for id in report.aborted:
            self.on_aborted(id)
