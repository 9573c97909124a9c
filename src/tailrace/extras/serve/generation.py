"""The routes that generate: /v1/completions, /v1/chat/completions and /inference/v1/generate, and the samples
of their requests on the way through the engine."""

import asyncio
import inspect
import itertools
import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from typing_extensions import override

from tailrace.contracts.engine import GenerationOutput, GenerationRequest, Usage
from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.data.encoding import TEMPLATE_TIMEOUT_S, Then, Tokenizer, encode_text, encode_up_to
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.engine import EngineClient, EngineJob, EngineWorker, Report
from tailrace.drivers.workers.template import TemplateWorker
from tailrace.errors import BadRow, WorkerDied
from tailrace.extras.serve.formats import (
    ChatCompletionRequest,
    ChatFormat,
    CompletionFormat,
    CompletionRequest,
    Delta,
    Format,
    GenerateFormat,
    GenerateRequest,
    Json,
    SamplingFields,
    ServingFields,
    Text,
    read,
    respond,
    token_strings,
)
from tailrace.types import Span

FIRST = "default"
"""The label of the weights that the server started with, as in vLLM."""
TEMPLATE_KILLED = "the chat template took too much time or memory and is used no more; use /v1/completions"
MAX_OPEN_TOKENS = 2**23
"""Tokens of the prompts of all samples under way, at most."""


def body_limit(context: int) -> int:
    """Return the bytes of the largest request to serve: 32 a token of the context, and a MiB for all else."""
    return 32 * context + 2**20


def labelled(spans: Iterable[tuple[int, int]], labels: Sequence[str]) -> list[Json]:
    """Turn (version, tokens) into vLLM's form: label, start and end of consecutive tokens.

    Args:
        labels: by version.

    Example:
        >>> labelled([(0, 2), (0, 3)], ["default"])
        [{'version': 'default', 'start': 0, 'end': 5}]
    """
    found: list[Json] = []
    start = 0
    for version, num_tokens in spans:
        label, end = labels[version], start + num_tokens
        if found and found[-1]["version"] == label:
            found[-1]["end"] = end
        elif num_tokens:
            found.append({"version": label, "start": start, "end": end})
        start = end
    return found


class ServedModel(NamedTuple):
    """Properties of the model of a server.

    Args:
        name: in requests and replies.
        context: tokens of a prompt and its completion together, at most.
        lora: of the trainer behind Tinker's API; None: it trains all weights, or there is none.
        template: the process that writes with its chat template; None: it has none, or nothing is written.
    """

    name: str
    path: Path
    vocabulary: int
    context: int
    lora: LoraSettings | None = None
    template: RemoteWorker | None = None


Output = GenerationOutput | None
"""New tokens of a sample; None: it was aborted."""


class _Open(NamedTuple):
    """An unfinished sample of an HTTP request.

    Args:
        names: by which clients of vLLM may abort the request.
        number: of the sample.
        arrived: the outputs of all samples of the request, with the samples' numbers.
    """

    names: frozenset[str]
    number: int
    arrived: "asyncio.Queue[tuple[int, Output]]"


class ServedEngine(EngineClient):
    """An engine in another process, so that it computes while the server writes, with all requests that it
    works on. Once the process has ended, every method raises WorkerDied."""

    def __init__(self, worker: RemoteWorker, job: EngineJob) -> None:
        super().__init__(worker, job)
        self._open: dict[str, _Open] = {}
        """Unfinished samples, by the engine's request id."""
        self._numbers = itertools.count()
        self.admitting, self._drained = asyncio.Event(), asyncio.Event()
        """While `admitting` is not set, new requests wait."""
        self.admitting.set()
        self._drained.set()
        self.num_prompt_tokens = self._num_open_tokens = 0
        """Prompt tokens of all samples since the start; tokens of those under way."""

    def usage(self) -> Usage:
        """Return the load and the counters in the last report."""
        return self._usage

    def check_room(self, num_tokens: int) -> None:
        """Raises HTTPException if the prompts of all samples would be too much."""
        if self._num_open_tokens and self._num_open_tokens + num_tokens > MAX_OPEN_TOKENS:
            raise HTTPException(429, "too many requests are under way; ask again when some have ended")

    async def generate(
        self, names: frozenset[str], samples: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, Output]]:
        """Yield the outputs of samples, by their numbers, until all have ended. Closing the generator aborts
        the others. The samples get ids of their own."""
        arrived: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        ids, num_tokens = list[str](), sum(len(sample.prompt_ids) for sample in samples)
        self._num_open_tokens += num_tokens
        try:
            while not self.admitting.is_set():  # it may be cleared again before this task runs
                await self.admitting.wait()
            for number, sample in enumerate(samples):
                id = str(next(self._numbers))
                self.worker.send(EngineWorker.submit, msgspec.structs.replace(sample, id=id))
                ids.append(id)
                self._open[id] = _Open(names, number, arrived)
                self._drained.clear()
                self.num_prompt_tokens += len(sample.prompt_ids)
            left = len(samples)
            while left:
                number, output = await arrived.get()
                left -= output is None or output.finish_reason is not None
                yield number, output
        finally:
            self._num_open_tokens -= num_tokens
            for id in ids:
                if id in self._open:
                    self._end(id)
                    with suppress(WorkerDied):
                        self.worker.send(EngineWorker.abort, id)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probs of a sequence's tokens from the second on."""
        return await self.worker.call(EngineWorker.score, list(ids), 1)

    def abort(self, names: Sequence[str] | None) -> int:
        """End requests by their names; None: all. Their iterators end with None. Returns their number."""
        every = self._open.items()
        found = {id: each for id, each in every if names is None or not each.names.isdisjoint(names)}
        for id in found:
            self.worker.send(EngineWorker.abort, id)
        return len({each.arrived for each in found.values()})

    async def drained(self) -> None:
        """Wait until no request is under way."""
        await self._drained.wait()

    @override
    def _on_report(self, report: Report) -> None:
        outputs = [(output.id, output) for output in report.outputs]
        for id, output in (*outputs, *((id, None) for id in report.aborted)):
            if (sample := self._open.get(id)) is not None:  # else its client has gone
                sample.arrived.put_nowait((sample.number, output))
                if output is None or output.finish_reason is not None:
                    self._end(id)

    def _end(self, id: str) -> None:
        del self._open[id]
        if not self._open:
            self._drained.set()


class _Sample:
    """Makes the deltas of a sample from the engine's outputs."""

    def __init__(self, sampling: SamplingFields, tokenizer: Any, labels: Sequence[str]) -> None:
        self._stop_ids, self._labels = sampling.stop_token_ids or (), labels
        self._spans: list[Span] = []
        self._text = Text(
            tokenizer,
            sampling.stops,
            include_stop=sampling.include_stop_str_in_output,
            skip_special=sampling.skip_special_tokens,
        )

    def delta(self, output: Output) -> Delta:
        new = Delta(finish="abort")
        if output is not None:
            new = Delta(output.ids, output.behavior_logprobs, finish=output.finish_reason)
            self._spans.append(Span(output.version, len(output.ids)))
        new.text = self._text.extend(new.ids, ended=new.finish is not None)
        is_stop_token = new.finish == "stop" and new.ids and new.ids[-1] in self._stop_ids
        new.stop_reason = new.ids[-1] if is_stop_token else self._text.stop
        new.versions = labelled(self._spans, self._labels) if new.finish else None
        return new


class Generation:
    """The routes over one engine."""

    def __init__(
        self, engine: ServedEngine, labels: Sequence[str], tokenizer: Tokenizer, model: ServedModel
    ) -> None:
        self._engine, self._labels, self._tokenizer, self._model = engine, labels, tokenizer, model
        self._strings = token_strings(tokenizer.backend_tokenizer)
        self._random, self._writing = random.Random(), asyncio.Lock()

    def add_to(self, router: APIRouter) -> None:
        """Add the routes."""
        router.post("/v1/completions")(self.complete)
        router.post("/v1/chat/completions")(self.chat)
        router.post("/inference/v1/generate")(self.generate)

    async def complete(self, request: Request) -> Response:
        body = await read(CompletionRequest, request)
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = await self._encode(prompt, special=body.add_special_tokens)
        return await self._respond(CompletionFormat, "cmpl-", body, body, prompt, request)

    async def chat(self, request: Request) -> Response:
        body = await read(ChatCompletionRequest, request)
        prompt = body.prompt_token_ids or await self._encode(await self._template(body), special=False)
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        return await self._respond(ChatFormat, "chatcmpl-", body, body, prompt, request)

    async def generate(self, request: Request) -> Response:
        body = await read(GenerateRequest, request)
        prefix, sampling = "generate-tokens-", body.sampling_params
        return await self._respond(GenerateFormat, prefix, body, sampling, body.token_ids, request)

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        text.encode()  # a chat template does not check that it is valid Unicode
        encode = partial(encode_text, self._tokenizer, begins=special)
        return await asyncio.to_thread(encode_up_to, self._model.context, text, encode)

    async def _template(self, body: ChatCompletionRequest) -> str:
        """The text of a chat. Raises HTTPException without a chat template, or if it refuses the messages."""
        if (template := self._model.template) is None:
            raise HTTPException(400, "the model's tokenizer has no chat template; use /v1/completions")
        arguments = body.chat_template_kwargs or {}
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if refused := [name for name in arguments if name in own]:
            raise HTTPException(400, f"chat_template_kwargs must not have {refused[0]!r}")
        try:
            then: Then = "turn" if body.add_generation_prompt else "nothing"
            async with self._writing, asyncio.timeout(TEMPLATE_TIMEOUT_S):
                return await template.call(TemplateWorker.write, body.messages, then, arguments)
        except BadRow as why:
            raise HTTPException(400, str(why)) from why
        except (WorkerDied, TimeoutError) as why:
            template.kill()
            raise HTTPException(400, TEMPLATE_KILLED) from why

    async def _respond(
        self,
        kind: type[Format[Any]],
        prefix: str,
        body: ServingFields,
        sampling: SamplingFields,
        prompt: Sequence[int],
        request: Request,
    ) -> Response:
        """Check what is asked for, generate, and reply."""
        self._check(prompt)
        self._engine.check_room(len(prompt) * sampling.n)
        if body.model not in (None, "", self._model.name):
            raise HTTPException(404, f"The model {body.model!r} does not exist; see /v1/models")
        limit = self._model.context
        params = sampling.params(min(sampling.max_tokens or limit, limit))
        seed = self._random.getrandbits(63) if sampling.seed is None else sampling.seed
        given = body.request_id or f"{self._random.getrandbits(128):032x}"
        names = frozenset((given, f"{prefix}{given}", f"{prefix}{given}-0"))
        asked = [
            GenerationRequest("", prompt, (), seed + number, sampling.greedy, params)
            for number in range(sampling.n)
        ]
        samples = [_Sample(sampling, self._tokenizer.backend_tokenizer, self._labels) for _ in asked]

        async def deltas() -> AsyncGenerator[tuple[int, Delta]]:
            async with aclosing(self._engine.generate(names, asked)) as arriving:
                async for number, output in arriving:
                    yield number, samples[number].delta(output)

        id = given if kind is GenerateFormat else prefix + given
        format = kind(body, id, self._model.name, self._strings, prompt)
        if isinstance(format, GenerateFormat) and format.body.sampling_params.prompt_logprobs is not None:
            format.prompt_logprobs = await self._engine.score(prompt) if len(prompt) > 1 else []
        return await respond(format, deltas(), request)

    def _check(self, prompt: Sequence[int]) -> None:
        """Raises HTTPException if the model cannot continue the prompt."""
        limit, vocabulary = self._model.context, self._model.vocabulary
        if not prompt:
            raise HTTPException(400, "the prompt has no tokens")
        if len(prompt) >= limit:
            length = f"This model's maximum context length is {limit} tokens"
            raise HTTPException(400, f"{length}, but the prompt has {len(prompt)} or more")
        if max(prompt) >= vocabulary:
            raise HTTPException(400, f"token id {max(prompt)} is not below {vocabulary}")
