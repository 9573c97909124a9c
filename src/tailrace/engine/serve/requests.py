"""The samples of HTTP requests on their way through the engine."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tailrace.engine.base import GenerationOutput, GenerationRequest, SamplingParams
from tailrace.engine.serve.base import ComputingEngine
from tailrace.types import Span

Finish = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Tokens:
    """The tokens of one sample since its last ones were handed out.

    Args:
        top_logprobs: as in GenerationOutput.
        spans: versions that generated them, in order.
        finish: None while the sample is unfinished.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, output: GenerationOutput) -> None:
        """Append what the engine has generated."""
        self.ids += output.ids
        self.logprobs += output.behavior_logprobs
        self.top_logprobs += output.top_logprobs
        self.spans.append(Span(output.version, len(output.ids)))
        self.finish = output.finish_reason

    def join(self, later: "Tokens") -> None:
        """Append later tokens of the same sample."""
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.top_logprobs += later.top_logprobs
        self.spans += later.spans
        self.finish = later.finish


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks for.

    Args:
        id: the client's name for it.
        prefix: what the route puts before the id in its replies.
        prompts: token ids of each.
        num_samples: of each prompt. Sample j of prompt i has the number i * num_samples + j.
        seed: of the first sample; the seeds of the others follow it.
    """

    id: str
    prefix: str
    prompts: Sequence[Sequence[int]]
    num_samples: int
    seed: int
    greedy: bool
    sampling: SamplingParams

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.prompts) * self.num_samples

    @property
    def names(self) -> tuple[str, ...]:
        """The ids by which clients of vLLM may abort it."""
        return self.id, f"{self.prefix}{self.id}", f"{self.prefix}{self.id}-0"


class _Batch:
    """The samples of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.open: dict[str, int] = {}
        """Numbers of the unfinished samples, by the engine's request id."""
        self.new: dict[int, Tokens] = {}
        """What has arrived and has not been handed out, by sample number."""
        self.arrived = asyncio.Event()
        self.error: Exception | None = None

    def of(self, id: str) -> Tokens:
        self.arrived.set()
        return self.new.setdefault(self.open[id], Tokens())


class Requests:
    """All jobs that the engine works on.

    Args:
        engine: this object sets its callbacks.
    """

    def __init__(self, engine: ComputingEngine) -> None:
        self._engine = engine
        engine.on_output, engine.on_aborted = self._on_output, self._on_aborted
        self._batches: dict[str, _Batch] = {}
        """By the engine's request id."""
        self._numbers = itertools.count()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._drained = asyncio.Event()
        self._drained.set()
        self.num_prompt_tokens = 0
        """Of all prompts since the start."""

    async def generate(self, job: Job) -> AsyncGenerator[tuple[int, Tokens]]:
        """Yield the new tokens of samples, by their numbers, until all have ended. Closing the generator
        aborts the others.

        Raises:
            Exception: that `fail` was given.
        """
        while not self._admitting.is_set():  # it may be cleared again before this task runs
            await self._admitting.wait()
        batch = _Batch(job)
        try:
            for number in range(job.size):
                self._submit(batch, number)
            while batch.open or batch.new:
                await batch.arrived.wait()
                batch.arrived.clear()
                if batch.error is not None:
                    raise batch.error
                new, batch.new = batch.new, {}
                for each in new.items():
                    yield each
        finally:
            for id in list(batch.open):
                self._end(id)
                if batch.error is None:
                    self._engine.abort(id)

    def abort(self, names: Sequence[str] | None) -> int:
        """End jobs by their names; None: all. Their iterators yield the last tokens, with the finish reason
        "abort". Returns the number of jobs."""
        wanted = None if names is None else frozenset(names)
        found = [
            (id, batch)
            for id, batch in self._batches.items()
            if wanted is None or not wanted.isdisjoint(batch.job.names)
        ]
        for id, _ in found:
            self._engine.abort(id)
        return len({batch for _, batch in found})

    def admit(self, admitting: bool) -> None:
        """Let new jobs begin, or wait."""
        if admitting:
            self._admitting.set()
        else:
            self._admitting.clear()

    async def drained(self) -> None:
        """Wait until no job is under way."""
        await self._drained.wait()

    def fail(self, error: Exception) -> None:
        """End all jobs with an error."""
        for batch in set(self._batches.values()):
            batch.error = error
            batch.arrived.set()

    def _submit(self, batch: _Batch, number: int) -> None:
        job, id = batch.job, str(next(self._numbers))
        prompt = job.prompts[number // job.num_samples]
        self._engine.submit(GenerationRequest(id, prompt, (), job.seed + number, job.greedy, job.sampling))
        batch.open[id] = number
        self._batches[id] = batch
        self._drained.clear()
        self.num_prompt_tokens += len(prompt)

    def _end(self, id: str) -> None:
        del self._batches.pop(id).open[id]
        if not self._batches:
            self._drained.set()

    def _on_output(self, output: GenerationOutput) -> None:
        batch = self._batches.get(output.id)
        if batch is None:  # its client has gone
            return
        batch.of(output.id).add(output)
        if output.finish_reason is not None:
            self._end(output.id)

    def _on_aborted(self, id: str) -> None:
        batch = self._batches.get(id)
        if batch is not None:
            batch.of(id).finish = "abort"
            self._end(id)
