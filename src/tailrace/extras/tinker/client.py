"""A run on a service with Tinker's API: its trainer and its engine, through the released SDK.

What a service cannot do, and what stands in for it:

- It returns no part of a cancelled response, and no version of a token. So a response is asked for in chunks
  (`engine.chunk_tokens`), each of one snapshot; a parked one loses the tokens of one chunk at most.
- Its gradient is a sum. So AdamW's epsilon and the limit of the norm are multiplied by the count of the step:
  the update is that of the mean as long as all steps have one count.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf, nan
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import tinker
from tinker import types
from typing_extensions import override

from tailrace.algo.base import AlgorithmSettings
from tailrace.clock import now, waiting
from tailrace.contracts.engine import Arrival, Capabilities, Engine, EngineState, TokenCounter, Usage
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import StepStats, Trainer, TrainerSettings
from tailrace.contracts.weights import Weights
from tailrace.drivers.engine.stops import Decoder, first_stop, stop_window
from tailrace.drivers.trainer import checksums
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.errors import CheckpointError, ConfigError, ScheduleError, VersionGone, WorkerDied
from tailrace.extras.tinker.settings import TinkerEngineSettings
from tailrace.types import KV, Sample, SampleId

STATE_FILE = "tinker.json"
"""File in a checkpoint of the run that names the state at the service."""
CLAIM_S, CLAIM_PAUSE_S, CLOSE_S = 90.0, 5.0, 10.0
"""A service of `tailrace serve` keeps its trainer for a client that was killed for up to 30 s."""
KEY_VARIABLE, CHECK_S = "TINKER_API_KEY", 10.0
EPSILON = 1e-8
"""AdamW's, as in torch."""
LOSSES = {"grpo": "ppo", "cispo": "cispo", "reinforce": "cross_entropy"}
"""Tinker's name of each of our losses that it has."""
T = TypeVar("T")


def check_service(settings: TinkerEngineSettings) -> None:
    """Raises a ConfigError if the service does not answer, takes no key or has no such model. The SDK would
    go on asking for minutes."""
    (url,), key = settings.urls, os.environ.get(KEY_VARIABLE, "")
    route, headers = f"{url}/api/v1/get_server_capabilities", {"x-api-key": key}
    try:
        reply = httpx.get(route, headers=headers, timeout=CHECK_S)
        if not key or reply.status_code in (401, 403):
            raise ConfigError("engine.urls", url, "the service needs a key", f"set ${KEY_VARIABLE}")
        models = [each["model_name"] for each in reply.json()["supported_models"]]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as why:
        problem = f"no service with Tinker's API answers there ({type(why).__name__})"
        raise ConfigError("engine.urls", url, problem, "start it, or correct the address") from why
    if settings.base_model not in models:
        problem, remedy = "the service has no such model", f"choose from {', '.join(models)}"
        raise ConfigError("engine.base_model", settings.base_model, problem, remedy)


def check_algorithm_of_service(algorithm: AlgorithmSettings, sampling: SamplingSettings) -> None:
    """Raises a ConfigError if Tinker's losses cannot say an algorithm, or its passes the log-probs of how
    tokens were sampled."""
    whole = SamplingSettings()
    for key in ("temperature", "top_p", "top_k"):
        if (given := getattr(sampling, key)) != (only := getattr(whole, key)):
            problem = "a service computes log-probs at temperature 1 over all tokens"
            raise ConfigError(f"sampling.{key}", given, problem, f"set it to {only}")
    if sampling.stop and sampling.stop_token_ids:
        problem = "a request of Tinker's API has stop strings or stop tokens"
        raise ConfigError(
            "sampling.stop_token_ids", list(sampling.stop_token_ids), problem, "remove one of them"
        )
    recomputed = algorithm.old_policy == "recomputed"
    corrected = algorithm.correction not in ("none", "truncate")
    for wrong, key, problem, remedy in (
        (algorithm.loss not in LOSSES, "loss", f"Tinker's API has {', '.join(LOSSES)}", "choose one of them"),
        (algorithm.advantage == "gae", "advantage", "Tinker's API has no critic", 'choose "group"'),
        (algorithm.kl_coef > 0, "kl_coef", "Tinker's losses have no KL to a reference", "set it to 0"),
        (algorithm.distill_coef > 0, "distill_coef", "a service's losses get no teacher", "set it to 0"),
        (recomputed, "old_policy", "a service computes no old log-probs", 'set it to "recorded"'),
        (corrected, "correction", "Tinker's losses have no such weight", 'use "none" or "truncate"'),
    ):
        if wrong:
            raise ConfigError(f"algorithm.{key}", getattr(algorithm, key), problem, remedy)


def _log_ratios(samples: Sequence[TrainingSample], reply: Any) -> list[float]:
    """log pi / mu of each token in the loss, from the log-probs of a pass."""
    found = [
        each["logprobs"].data[-sample.num_loss_tokens :]
        for sample, each in zip(samples, reply.loss_fn_outputs, strict=True)
    ]
    before = chain.from_iterable(sample.behavior_logprobs[sample.num_masked :] for sample in samples)
    return list(map(float.__sub__, chain.from_iterable(found), before))


def _ess(log_ratios: Any) -> float:
    """Effective sample size, a share (drivers/trainer/losses.py, which needs torch)."""
    weights = np.exp(log_ratios)
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights)) if len(weights) else 1.0


class TinkerSession:
    """The connection of a run to a service, with its trainer and its engine. Made by `open`."""

    def __init__(self, client: Any, settings: TinkerEngineSettings, rank: int) -> None:
        self.client, self.base_model, self.rank = client, settings.base_model, rank
        (self._url,), self._health_timeout_s = settings.urls, settings.health_timeout_s
        self.samplers: dict[int, Any] = {}
        """The sampling client of the newest publication, by its version."""
        self.is_publishing = False
        self.opened = asyncio.Event()
        """Set when version 0 is published."""

    @classmethod
    async def open(cls, settings: TinkerEngineSettings, rank: int) -> "TinkerSession":
        """Begin a session. Raises a ConfigError if none begins."""
        (url,), loop = settings.urls, asyncio.get_running_loop()
        try:  # the key: $TINKER_API_KEY
            client = await loop.run_in_executor(None, partial(tinker.ServiceClient, base_url=url))
        except tinker.TinkerError as why:
            remedy = "set $TINKER_API_KEY, and engine.urls to the address of the service"
            raise ConfigError("engine.urls", url, f"no session began there ({why})", remedy) from why
        return cls(client, settings, rank)

    async def keep(self) -> None:
        """Ask whether the service lives, until cancelled: the SDK waits without a limit for one that hangs.
        Raises a WorkerDied once it has not answered for `engine.health_timeout_s`."""
        limit_s, heard_s = self._health_timeout_s, now()
        async with httpx.AsyncClient(timeout=limit_s) as client:
            while now() - heard_s < limit_s:
                with suppress(httpx.HTTPError):
                    await client.get(f"{self._url}/api/v1/healthz")
                    heard_s = now()
                await asyncio.sleep(limit_s / 4)
        limit = f"{limit_s:g} s (engine.health_timeout_s)"
        raise WorkerDied(f"the service at {self._url} did not answer for {limit}")

    async def asked(self, what: str, future: Callable[[], Awaitable[T]]) -> T:
        """Wait for a reply. Raises WorkerDied if the service lost the session, refuses or does not answer:
        the run can be resumed from its newest checkpoint."""
        try:
            with waiting(f"the service: {what}"):
                return await future()
        except (tinker.TinkerError, httpx.HTTPError, OSError) as why:  # TimeoutError is an OSError
            raise WorkerDied(f"the service: {what}: {type(why).__name__}: {why}") from why

    async def claimed(self, make: Callable[[], Awaitable[T]]) -> T:
        """Ask the service for a training client; while another client has the trainer, ask again."""
        began_s = now()
        while True:
            try:
                return await self.asked("create a training client", make)
            except WorkerDied as why:
                refused = tinker.RequestFailedError, tinker.APIConnectionError
                if not isinstance(why.__cause__, refused) or now() - began_s > CLAIM_S:
                    raise
                await asyncio.sleep(CLAIM_PAUSE_S)

    async def close(self) -> None:
        """End the session. A service that is gone has ended it already."""
        with suppress(Exception):
            await asyncio.wait_for(self.client.close("success"), CLOSE_S)


class OnOtherDevices:
    """`sleep` and `wake` do nothing: the devices are the service's."""

    async def sleep(self) -> None:
        """Do nothing."""

    async def wake(self, replicas: int | None = None) -> None:
        """Do nothing."""


class TinkerTrainer(OnOtherDevices, Trainer):
    """A Trainer (contracts/trainer.py) whose passes and steps a service computes."""

    def __init__(
        self,
        service: TinkerSession,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        sampling: SamplingSettings,
    ) -> None:
        self.service, self._settings = service, settings
        self._algorithm, self._sampling = algorithm, sampling
        self._training: Any = None
        self._num_steps = 0
        self._begin_step()

    def _begin_step(self) -> None:
        self._samples: list[SampleId] = []
        self._num_tokens, self._loss, self._compute_s = 0, 0.0, 0.0
        self._log_ratios: list[float] = []

    async def ready(self) -> None:
        """Begin with the weights of the base model; they are version 0."""
        service = self.service

        def make() -> Any:
            return service.client.create_lora_training_client(service.base_model, rank=service.rank)

        self._training = await service.claimed(make)
        await self.publish(0)
        service.opened.set()

    @override
    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        samples = [TrainingSample.of(each, published=version) for each in chain.from_iterable(units)]
        self._samples += [each.id for each in samples]
        self._num_tokens += sum(each.num_loss_tokens for each in samples)
        trained = [each for each in samples if each.advantage and each.num_loss_tokens]
        if not trained:
            return
        name, config = self._loss_of()
        data = [self._datum(each, name) for each in trained]
        reply = await self._timed(
            "forward_backward", lambda: self._training.forward_backward(data, name, config)
        )
        self._loss += reply.metrics.get("loss:sum", 0.0)
        self._log_ratios += _log_ratios(trained, reply)

    @override
    async def step(self) -> StepStats:
        if not self._samples:
            raise ScheduleError("step: nothing was accumulated since the last one; accumulate a group first")
        settings, by_token = self._settings, self._algorithm.normalize == "token_mean"
        count = max(1, self._num_tokens if by_token else len(self._samples))
        self._num_steps += 1
        warmup = settings.warmup_steps
        rate = settings.learning_rate * (min(1.0, self._num_steps / warmup) if warmup else 1.0)
        adam = types.AdamParams(
            learning_rate=rate,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            eps=EPSILON * count,
            weight_decay=settings.weight_decay,
            grad_clip_norm=settings.max_grad_norm * count,
        )
        reply = await self._timed("optim_step", lambda: self._training.optim_step(adam))
        metrics = reply.metrics or {}
        skipped = bool(metrics.get("skipped"))
        ratios = np.asarray(self._log_ratios)
        stats = StepStats(
            num_steps=self._num_steps,
            samples=tuple(self._samples),
            num_tokens=self._num_tokens,
            compute_s=self._compute_s,
            loss=self._loss / count,
            grad_norm=nan if skipped else metrics.get("grad_norm", 0.0) / count,
            learning_rate=rate,
            skipped=skipped,
            kl=float((np.expm1(ratios) - ratios).sum() / max(1, len(ratios))),
            ess=_ess(ratios),
        )
        self._begin_step()
        return stats

    @override
    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        samples = [TrainingSample.of(each) for each in chain.from_iterable(units) if each.num_loss_tokens]
        if not (data := [self._datum(each, "cross_entropy") for each in samples]):
            return 1.0
        reply = await self._timed("forward", lambda: self._training.forward(data, "cross_entropy"))
        return _ess(np.asarray(_log_ratios(samples, reply)))

    @override
    async def publish(self, version: int) -> Weights:
        self.service.is_publishing = True
        sampler = await self.service.asked(
            "save_weights_and_get_sampling_client", self._training.save_weights_and_get_sampling_client
        )
        self.service.samplers = {version: sampler}
        return Weights(version, f"tinker://{version}")

    @override
    async def save(self, folder: Path) -> Awaitable[None]:
        saved = await self.service.asked(
            "save_state", lambda: self._training.save_state(folder.name, overwrite=True)
        )
        state = {"path": saved.path, "steps": self._num_steps}
        with checksums.replacing(folder) as new:
            (new / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            checksums.seal(new, self._num_steps)
        return asyncio.sleep(0)

    @override
    async def retire(self, older: Sequence[Path], newest: Path) -> None:
        """Do nothing: the state is the service's."""

    @override
    async def restore(self, folder: Path) -> None:
        advice = checksums.remedy(folder)
        checksums.verify(folder, advice)
        try:
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            path, num_steps = state["path"], state["steps"]
        except (OSError, ValueError, LookupError) as why:
            raise CheckpointError(f"{folder / STATE_FILE}: not readable ({why}); {advice}") from why
        client = self.service.client
        self._training = await self.service.claimed(
            lambda: client.create_training_client_from_state_with_optimizer(path)
        )
        self._num_steps = num_steps
        self._begin_step()

    def _loss_of(self) -> tuple[str, Mapping[str, float] | None]:
        """Tinker's loss, and its parameters."""
        algorithm = self._algorithm
        name = LOSSES[algorithm.loss]
        if name == "cross_entropy" and algorithm.correction == "truncate":
            # min(cap, pi / mu) A log pi, without a gradient through the weight
            return "cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": algorithm.correction_cap}
        low = 1 - algorithm.clip_low if name == "ppo" else 0.0
        clips = {"clip_low_threshold": low, "clip_high_threshold": 1 + algorithm.clip_high}
        return name, None if name == "cross_entropy" else clips

    def _datum(self, sample: TrainingSample, loss: str) -> Any:
        """A sample with its advantage, times the weight of a token's loss."""
        num_tokens, masked = sample.num_loss_tokens, [0.0] * sample.num_masked
        skipped = [0.0] * (len(sample.prompt_ids) - 1)
        match self._algorithm.normalize:
            case "sample_mean":
                weight = 1 / num_tokens
            case "fixed_length":
                weight = 1 / self._sampling.max_completion_tokens
            case _:
                weight = 1.0
        ids = [*sample.prompt_ids, *sample.completion_ids]
        advantages = [*skipped, *masked, *[sample.advantage * weight] * num_tokens]
        inputs: dict[str, Any] = {"weights": advantages}
        if loss != "cross_entropy":
            inputs = {"advantages": advantages, "logprobs": [*skipped, *sample.behavior_logprobs]}
        return types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], **inputs},
        )

    async def _timed(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        began_s = now()
        reply = await self.service.asked(what, call)
        self._compute_s += now() - began_s
        return reply


class TinkerEngine(OnOtherDevices, Engine):
    """All samplers of a service as one engine."""

    capabilities = Capabilities(exact_versions=True, top_p=True)
    state: EngineState = "open"
    width = 1

    def __init__(
        self,
        service: TinkerSession,
        settings: TinkerEngineSettings,
        sampling: SamplingSettings,
        counter: TokenCounter,
        decode: Decoder,
    ) -> None:
        self._decode = decode
        self.name, self.slots, self.versions = "engine-0", settings.max_num_seqs, 1
        self._service, self._sampling, self._counter = service, sampling, counter
        self._chunk_tokens = settings.chunk_tokens or inf
        self._loaded = asyncio.Event()
        self._num_running = self._num_prefilled = 0
        self.on_state: Callable[[str], None] = lambda why: None
        self.on_arrival: Callable[[Arrival], None] = lambda arrival: None

    async def open(self) -> None:
        """Wait for the first publication, and serve it."""
        with waiting("the trainer of the service"):
            await self._service.opened.wait()
        (version,) = self._service.samplers
        await self.load(Weights(version, ""), kv="keep")

    @override
    async def generate(self, sample: Sample) -> None:
        self._num_running += 1
        try:
            while sample.finish_reason is None:
                await self._extend(sample, self._sampling.room(sample))
        finally:
            self._num_running -= 1

    async def _extend(self, sample: Sample, room: int) -> None:
        """Ask for one chunk. One that a publication ends is asked for again, with the new weights."""
        while self._service.is_publishing:
            self._loaded.clear()
            with waiting("the new weights at the service"):
                await self._loaded.wait()
        client, version, num_tokens = self._client, self._version, int(min(room, self._chunk_tokens))
        if sample.pin not in (None, version):
            raise VersionGone(f"{self.name} has version {version} only, and not {sample.pin}")
        prompt = types.ModelInput.from_ints(sample.context_ids)
        params = self._params(sample, num_tokens)
        try:
            reply = await self._service.asked("sample", lambda: client.sample(prompt, 1, params))
        except WorkerDied:
            if client is self._client and not self._service.is_publishing:
                raise
            return
        (sequence,) = reply.sequences
        ids, strings = list(sequence.tokens), self._sampling.stop  # the service saw these tokens only
        end = first_stop(self._decode, sample.completion_ids, ids[: stop_window(strings)], strings, ())
        tokens, logprobs = ids[:end], list(sequence.logprobs or [])[:end]
        self._num_prefilled += prompt.length
        self._counter.add(len(tokens))
        sample.extend(tokens, logprobs, version)
        if sequence.stop_reason == "stop" or end is not None:
            sample.finish_reason = "stop"
        elif len(tokens) >= room:
            sample.finish_reason = "length"

    def _params(self, sample: Sample, num_tokens: int) -> Any:
        given = self._sampling
        temperature = given.temperature if sample.temperature is None else sample.temperature
        return types.SamplingParams(
            max_tokens=num_tokens,
            seed=sample.request_seed >> 32,
            temperature=0.0 if sample.greedy else temperature,
            top_p=sample.top_p or given.top_p,
            top_k=given.top_k or -1,
            stop=list(given.stop or given.stop_token_ids) or None,
        )

    @override
    async def load(self, weights: Weights, *, kv: KV) -> None:
        self._version, self._client = weights.version, self._service.samplers[weights.version]
        self._service.is_publishing = False
        self._loaded.set()

    @override
    def usage(self) -> Usage:
        return Usage(
            num_running=self._num_running, num_generated=self._counter.num, num_prefilled=self._num_prefilled
        )
