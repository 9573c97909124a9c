"""The embedded engine: continuous batching of a Llama-like model, on a CPU or one GPU.

    submit -> waiting -> [admit: prefill, or copy from a sibling] -> running -> [decode] -> ended
                  ^------------------- preempted, tokens kept <---------'

Synchronous and single-threaded: whoever owns it calls `step` in a loop, and calls everything else
between two steps. Read sampler.py for what makes a request's tokens independent of its company, cache.py
for the layout that makes it fast, model.py for the arithmetic, decoder.py for what a CPU does otherwise.

What must hold: the cache of a running response holds all its tokens but the last; what is unreported was
produced by the current version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tailrace.engine.base import EngineSettings, SamplingSettings, Usage
from tailrace.engine.native.architecture import check_weights, read_architecture, read_weights
from tailrace.engine.native.cache import Block, Cache, Response
from tailrace.engine.native.decoder import Decoder, decoder_for
from tailrace.engine.native.model import Model
from tailrace.engine.native.sampler import noise, stream
from tailrace.engine.native.scheduler import Admission, Scheduler
from tailrace.engine.native.stops import Stops
from tailrace.types import KV, FinishReason


@dataclass(frozen=True, slots=True)
class Request:
    """A completion to be generated, or to be gone on with."""

    id: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    """What it already has."""
    seed: int
    """Its token t is a function of the weights, the tokens before t, and (seed, t)."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request gained since it was last reported; all of it by one version."""

    id: str
    ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: FinishReason | None


class NativeEngine:
    """One replica. Make it with `from_pretrained`."""

    def __init__(
        self,
        model: Model,
        decoder: Decoder,
        stops: Stops,
        scheduler: Scheduler,
        settings: EngineSettings,
        version: int,
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._stops = stops
        self._scheduler = scheduler
        self._settings = settings
        self._version = version
        self._ended: list[Delta] = []
        self.num_generated = 0
        """Tokens since the start."""
        self._num_prefilled = 0

    @classmethod
    def from_pretrained(
        cls, path: Path, settings: EngineSettings, sampling: SamplingSettings, *, version: int = 0
    ) -> "NativeEngine":
        """Load a Hugging Face model folder.

        Raises:
            ConfigError: the folder is missing, incomplete, or of a model that this engine cannot run.
        """
        arch = read_architecture(path)
        device, dtype = torch.device(settings.device), _DTYPES[settings.dtype]
        max_tokens = min(arch.max_positions, settings.kv_tokens)
        stops = Stops(path, sampling, eos_ids=arch.eos_ids, max_tokens=max_tokens)
        with torch.inference_mode():
            model = Model(
                arch, temperature=sampling.temperature, max_tokens=max_tokens, device=device, dtype=dtype
            )
            model.load(read_weights(path, arch))
            cache = Cache(arch, max_tokens=max_tokens, budget=settings.kv_tokens, device=device, dtype=dtype)
            decoder = decoder_for(model, sampling, max_tokens=max_tokens)
        return cls(model, decoder, stops, Scheduler(cache, settings), settings, version)

    @property
    def idle(self) -> bool:
        """Nothing running, waiting, or ended and not yet told."""
        return not (self._scheduler.running or self._scheduler.waiting or self._ended)

    @property
    def num_running(self) -> int:
        """Requests that the next step decodes."""
        return len(self._scheduler.running)

    def submit(self, request: Request) -> None:
        """Queue it. One without a prompt, or already at its limit, ends at the next step with "length".

        Raises:
            ValueError: a request with its id is being served.
        """
        tokens = [*request.prompt_ids, *request.completion_ids]
        response = Response(request.id, tokens, len(request.prompt_ids), stream(request.seed))
        if not tokens or self._stops.exhausted(response):
            self._ended.append(self._delta(response, "length"))
        else:
            self._scheduler.add(response)

    def abort(self, id: str) -> Delta | None:
        """Stop a request. Returns what it gained since its last report; None if it has ended. Its keys and
        values are kept where there is room, so that it can go on without being computed again."""
        with torch.inference_mode():
            if running := self._scheduler.running.get(id):
                self._scheduler.park(running)
            response = self._scheduler.remove(id)
        return None if response is None else self._delta(response, None)

    def step(self) -> list[Delta]:
        """Admit, prefill, and decode one token of every running request. Returns those that ended."""
        with torch.inference_mode():
            self._scheduler.grow()
            if self._scheduler.waiting:
                self._fill(self._scheduler.admit(self._version))
            if self._scheduler.running:
                self._decode()
        ended, self._ended = self._ended, []
        return ended

    def report(self) -> list[Delta]:
        """What all others gained since they were last reported."""
        live = [*self._scheduler.running.values(), *self._scheduler.waiting]
        return [self._delta(response, None) for response in live if response.logprobs]

    def load(self, tensors: Mapping[str, Tensor], *, version: int, kv: KV) -> list[Delta]:
        """Take new weights (Hugging Face names, all of them). Nothing in flight ends.

        With kv="keep" what is cached stays as the old weights computed it, of aborted requests too; one that
        was preempted or waits is computed anew all the same. Returns the report of the old version.

        Raises:
            ValueError: a tensor is missing or of another shape. Nothing has changed then.
        """
        check_weights(self._model.architecture, tensors)
        gained = self.report()
        with torch.inference_mode():
            self._model.load(tensors)
            self._version = version
            if kv == "recompute":
                self._scheduler.lot.make_room(0)
                self._recompute()
        return gained

    def usage(self) -> Usage:
        return Usage(
            num_running=self.num_running,
            num_waiting=len(self._scheduler.waiting),
            kv_tokens=self._scheduler.cache.num_reserved,
            num_generated=self.num_generated,
            num_prefilled=self._num_prefilled,
            num_preempted=self._scheduler.num_preempted,
        )

    def check_integrity(self) -> None:
        """Assert that the books of the scheduler and the cache close."""
        self._scheduler.check_integrity()

    def _delta(self, response: Response, reason: FinishReason | None) -> Delta:
        """Report what it gained, once."""
        logprobs, response.logprobs = response.logprobs, []
        ids = response.tokens[len(response.tokens) - len(logprobs) :]
        return Delta(response.id, ids, logprobs, self._version, reason)

    def _fill(self, admissions: Sequence[Admission]) -> None:
        """Put the contexts of the admitted into their slots, each computed or copied once."""
        cache = self._scheduler.cache
        computed = iter(self._prefill([a.context for a in admissions if not (a.donor or a.block)]))
        for admission in admissions:
            block = admission.block
            if block is None:
                donor = admission.donor
                block = cache.read(donor, len(admission.context)) if donor else next(computed)
            for response in admission.responses:
                cache.write(response, block)

    def _prefill(self, contexts: Sequence[Sequence[int]]) -> list[Block]:
        self._num_prefilled += sum(map(len, contexts))
        return self._decoder.prefill(contexts)

    def _recompute(self) -> None:
        """Fill the cache of every running request anew, in portions of a step's prefill budget."""
        portion: list[Response] = []
        room = self._settings.prefill_tokens
        for response in self._scheduler.running.values():
            if portion and len(response.tokens) > room:
                self._refill(portion)
                portion, room = [], self._settings.prefill_tokens
            portion.append(response)
            room -= len(response.tokens)
        self._refill(portion)

    def _refill(self, responses: Sequence[Response]) -> None:
        blocks = self._prefill([response.tokens[:-1] for response in responses])
        for response, block in zip(responses, blocks, strict=True):
            self._scheduler.cache.write(response, block)
            response.prompt_version = self._version

    def _decode(self) -> None:
        """One token for every running request."""
        cache = self._scheduler.cache
        responses = cache.responses()
        drawn, logprobs = self._decoder(
            [tier for tier in cache.tiers if tier.responses],
            [response.tokens[-1] for response in responses],
            [len(response.tokens) for response in responses],
            noise(
                [response.stream for response in responses],
                [response.num_completion for response in responses],
            ),
        )
        for response, id, logprob in zip(responses, drawn, logprobs, strict=True):
            response.tokens.append(id)
            response.logprobs.append(logprob)
            reason = self._stops.reason(response)
            if reason is not None:
                self._scheduler.end(response)
                self._ended.append(self._delta(response, reason))
        self.num_generated += len(responses)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
