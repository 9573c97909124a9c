"""What Tinker's API does with one model: a trainer and engines, the same as those of a run.

One training client has the trainer at a time. Its requests are executed in the order in which they arrive.
The engines serve one version of the weights at a time:

    base         the model itself; any client may sample from it
    checkpoint   of save_weights_for_sampler; loaded when a client is made for it and no request runs
    snapshot     of save_weights_and_get_sampling_client; loaded when no request runs
    in flight    of the same with kind="inflight"; loaded between two decode steps

A sampling client whose weights are served no longer is refused. Checkpoints outlive the server:

    MODEL/weights/NAME              of save_state: a Hugging Face folder with the optimizer's state
    MODEL/sampler_weights/NAME      a Hugging Face folder in the engines' type
"""

import asyncio
import os
import re
import shutil
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.clock import Signal, now
from tailrace.engine.base import Engine
from tailrace.errors import CheckpointError, TailraceError
from tailrace.record.events import Recorder
from tailrace.rollout.router import Router
from tailrace.tinker.wire import NotOffered, Pass, pass_bytes, sample_bytes
from tailrace.trainer.base import LoraSettings
from tailrace.trainer.batch import AdamStep, LossDatum, TokenLoss
from tailrace.types import KV, Group, Prompt, Sample, SampleId, SamplingParams, noise_seed
from tailrace.weights.base import Weights
from tailrace.workers.trainer import RemoteTrainer

SILENT_S = 30.0
"""The SDK's heartbeats come each 10 s. After this time without one, another client may have the trainer."""
KEPT_RESULTS = 256
"""Results that are kept after a client took them, should it ask again."""
BASE, SNAPSHOTS = "base", "snapshots"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(rf"tinker://([\w:.-]+)/(weights|sampler_weights)/({_NAME.pattern})")


class ServedPolicy(NamedTuple):
    """What the service must know of its model.

    Args:
        name: in requests and replies.
        context: tokens of a sequence, at most.
        lora: of the trainer; None: it trains all weights.
    """

    name: str
    path: Path
    vocabulary: int
    context: int
    lora: LoraSettings | None


class Failed(NamedTuple):
    """A request that failed. `is_users`: it must be changed."""

    message: str
    is_users: bool


class Unknown(TailraceError):
    """The service does not know the id: it belongs to another life of the server, or has ended."""

    status_code = 404


@dataclass
class Sampler:
    """A sampling client. `weights`: BASE, the path of a checkpoint, or the name of a snapshot."""

    weights: str
    model_id: str = ""
    """Of a client in flight, which gets the newest weights of this model."""


class Training(NamedTuple):
    """The training client that has the trainer."""

    model_id: str
    session_id: str


class TinkerService:
    """Executes requests. Those that return a future are begun by `begin`, and `result` waits for them.

    Args:
        trainer: publishes folders.
        folder: of checkpoints; it exists.
    """

    def __init__(
        self, trainer: RemoteTrainer, engines: Sequence[Engine], policy: ServedPolicy, folder: Path
    ) -> None:
        self.policy, self.folder = policy, folder
        self._trainer, self._engines = trainer, engines
        self._router = Router(engines, Recorder())
        self._sessions: dict[str, float] = {}
        """The time of the last heartbeat."""
        self._samplers: dict[str, Sampler] = {}
        self._results: dict[str, asyncio.Task[Any]] = {}
        self._taken = deque[str]()
        self._training: Training | None = None
        self._trainer_turn = asyncio.Lock()
        self._trainer_weights = BASE
        """As Sampler.weights; empty: they are not published."""
        self._served = BASE
        self._loading = asyncio.Lock()
        self._num_running, self._changed = 0, Signal()
        self._version = self._num_samples = 0
        self._infos = Weights(0)
        """The last publication."""

    async def open(self) -> None:
        """Write the model that training begins with, and that clients may return to."""
        for name in ("initial", BASE, SNAPSHOTS):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        await (await self._trainer.save(self.folder / "initial"))
        await self._publish_to(self.folder / BASE)

    def create_session(self) -> str:
        """Begin a session, and return its id."""
        self._sessions[id := os.urandom(8).hex()] = now()
        return id

    def heartbeat(self, session_id: str) -> None:
        """A session's client is alive. Raises Unknown."""
        self._check_session(session_id)
        self._sessions[session_id] = now()

    def finish(self, session_id: str) -> None:
        """End a session; its training client leaves the trainer."""
        self._sessions.pop(session_id, None)

    def _check_session(self, session_id: str) -> None:
        if session_id not in self._sessions:
            raise Unknown(f"session {session_id}: this server has no such session; begin a new ServiceClient")

    def begin(self, request_id: str, work: Coroutine[Any, Any, Any]) -> None:
        """Begin a request, unless it has been begun: a client that got no reply sends it again."""
        if request_id in self._results:
            work.close()
            return
        self._results[request_id] = asyncio.ensure_future(_outcome(work))

    async def result(self, request_id: str, timeout_s: float) -> Any:
        """Wait for the result of a request, or a `Failed`; None: there is none yet. Raises Unknown."""
        if (task := self._results.get(request_id)) is None:
            raise Unknown(f"request {request_id}: this server does not know it")
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            return None
        self._taken.append(request_id)
        while len(self._taken) > KEPT_RESULTS:
            self._results.pop(self._taken.popleft(), None)
        return Failed("it was cancelled", True) if task.cancelled() else task.result()

    def cancel(self, request_id: str) -> None:
        """End a request for samples."""
        if (task := self._results.get(request_id)) is not None:
            task.cancel()

    async def create_model(self, model_id: str, session_id: str, base_model: str, rank: int | None) -> None:
        """Give a training client the trainer, with the weights of the model."""
        self._check_base(base_model)
        lora = self.policy.lora
        if lora and rank not in (None, lora.rank):
            raise NotOffered(
                f"rank = {rank}: the adapter of this server has rank {lora.rank}; ask for that, or start the "
                f"server with --trainer.lora.rank {rank}"
            )
        async with self._trainer_turn:
            self._claim(model_id, session_id)
            await self._trainer.restore(self.folder / "initial")
            self._trainer_weights = BASE

    async def load_state(
        self, model_id: str, path: str, *, optimizer: bool, session_id: str | None = None
    ) -> None:
        """Continue from a saved state. `session_id`: of a new training client; None: it has the trainer."""
        folder = self._folder_of(path, "weights")
        async with self._trainer_turn:
            if session_id is None:
                self._check_model(model_id)
            else:
                self._claim(model_id, session_id)
            await self._trainer.restore(folder, optimizer=optimizer)
            self._trainer_weights = ""

    async def run_pass(self, model_id: str, asked: Pass) -> bytes:
        """Compute losses and log-probs, and add gradients to their sum."""
        async with self._trainer_turn:
            self._check_model(model_id)
            outputs = await self._trainer.run_tokens(
                asked.data, asked.loss, with_gradient=asked.with_gradient
            )
        return pass_bytes(asked, outputs)

    async def optim_step(self, model_id: str, adam: AdamStep) -> dict[str, Any]:
        """Step on the sum of gradients."""
        async with self._trainer_turn:
            self._check_model(model_id)
            self._trainer_weights = ""
            norm = await self._trainer.step_sum(adam)
        return {"metrics": {"grad_norm": norm, "learning_rate": adam.learning_rate}}

    async def save_state(self, model_id: str, name: str, *, overwrite: bool) -> dict[str, Any]:
        """Write a checkpoint from which `load_state` continues."""
        path, folder = self._new_folder(model_id, "weights", name, overwrite=overwrite)
        partial = folder.with_name(f".{folder.name}")
        async with self._trainer_turn:
            self._check_model(model_id)
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            await (await self._trainer.save(partial))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        return {"path": path}

    async def save_for_sampler(
        self, model_id: str, name: str | None, *, sampler_id: str, in_flight: bool
    ) -> dict[str, Any]:
        """Publish the weights: under a name, or for a new sampling client."""
        if name is not None:
            path, folder = self._new_folder(model_id, "sampler_weights", name, overwrite=False)
            async with self._trainer_turn:
                self._check_model(model_id)
                await self._publish_to(folder)
                self._trainer_weights = path
            return {"path": path}
        async with self._trainer_turn:
            self._check_model(model_id)
            snapshot = f"snapshot {self._version + 1}"
            folder = self.folder / SNAPSHOTS / str(self._version + 1)
            await self._publish_to(folder)
            self._trainer_weights = snapshot
            await self._serve(snapshot, folder, drains=not in_flight)
            for older in {*folder.parent.iterdir()} - {folder}:
                shutil.rmtree(older)
        for sampler in self._samplers.values():
            if in_flight and sampler.model_id == model_id:
                sampler.weights = snapshot
        self._samplers[sampler_id] = Sampler(snapshot, model_id if in_flight else "")
        return {"sampling_session_id": sampler_id}

    def info(self, model_id: str) -> dict[str, Any]:
        """What a training client asks of its model. Raises Unknown."""
        self._check_model(model_id)
        lora = self.policy.lora
        model = {"model_name": self.policy.name, "tokenizer_id": str(self.policy.path)}
        more = {"is_lora": lora is not None, "lora_rank": lora.rank if lora else None}
        return {"type": "get_info", "model_data": model, "model_id": model_id, **more, **model}

    async def create_sampler(self, sampler_id: str, base_model: str | None, path: str | None) -> None:
        """Make a sampling client of the model itself, or of saved weights; the engines serve them."""
        if path is None:
            self._check_base(base_model or "")
            weights, folder = BASE, self.folder / BASE
        else:
            weights, folder = path, self._folder_of(path, "sampler_weights")
        await self._serve(weights, folder, drains=True)
        self._samplers[sampler_id] = Sampler(weights)

    def sampler(self, sampler_id: str) -> Sampler:
        """Raises Unknown."""
        if (found := self._samplers.get(sampler_id)) is None:
            raise Unknown(f"sampling client {sampler_id}: this server does not know it; make a new one")
        return found

    async def sample(
        self,
        sampler_id: str,
        ids: list[int],
        num_samples: int,
        sampling: SamplingParams,
        *,
        greedy: bool,
        seed: int | None,
        prompt_logprobs: bool,
    ) -> bytes:
        """Sample completions of a prompt; with `prompt_logprobs` also score it."""
        sampler = self.sampler(sampler_id)
        scores = await self._scores(sampler, ids) if prompt_logprobs else None
        self._num_samples += 1
        group = Group(Prompt(self._num_samples, ids), num_samples, [])
        chance = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        group.samples = [
            Sample(id, group, noise_seed(chance, SampleId(0, 0, id.number)), greedy, sampling=sampling)
            for id in (SampleId(self._num_samples, 0, number) for number in range(num_samples))
        ]
        if scores is not None and sampling.max_completion_tokens == 1 and sampler.weights != self._served:
            return sample_bytes(group.samples, scores)  # compute_logprobs, which looks at no sample
        async with self._running(sampler):
            await asyncio.gather(*map(self._router.serve, group.samples))
        return sample_bytes(group.samples, scores)

    async def _scores(self, sampler: Sampler, ids: list[int]) -> Sequence[float]:
        """Log-probs of a prompt's tokens from the second on, by the trainer."""
        if len(ids) < 2:
            return []
        if sampler.weights == self._trainer_weights:
            datum = LossDatum(ids, [0.0] * (len(ids) - 1))
            loss = TokenLoss("cross_entropy")
            return (await self._trainer.run_tokens([datum], loss, with_gradient=False))[0].logprobs
        if sampler.weights == BASE and self.policy.lora:
            group = Group(Prompt(0, ids[:1]), 1, [])
            sample = Sample(SampleId(0, 0, 0), group)
            sample.extend(ids[1:], [0.0] * (len(ids) - 1), 0)
            return await self._trainer.reference_logprobs(sample)
        raise NotOffered(
            "prompt log-probs: the trainer computes them, and its weights are not those of this sampling "
            "client any more; ask before the next optim_step"
        )

    @asynccontextmanager
    async def _running(self, sampler: Sampler) -> AsyncIterator[None]:
        """Inside the block the engines serve the weights of a sampling client."""
        async with self._loading:
            if sampler.weights != self._served:
                raise NotOffered(
                    "the engines serve one version of the weights at a time, not this sampling client's "
                    "any more; make a new sampling client"
                )
            self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._changed.fire()

    async def _serve(self, weights: str, folder: Path, *, drains: bool) -> None:
        """Load weights into the engines. `drains`: after the requests that run; else between decode steps."""
        async with self._loading:
            if weights == self._served:
                return
            while drains and self._num_running:
                await self._changed.wait("requests of the weights that are served now")
            self._version += 1
            loaded = Weights(self._version, str(folder), self._infos.tensors)
            kv: KV = "recompute" if drains else "keep"
            await asyncio.gather(*(engine.load(loaded, kv=kv) for engine in self._engines))
            self._served = weights

    async def _publish_to(self, folder: Path) -> None:
        """Publish the trainer's weights, and keep them in a folder of ours."""
        self._version += 1
        self._infos = await self._trainer.publish(self._version)
        shutil.copytree(self._infos.location, folder, copy_function=os.link)

    def _check_base(self, name: str) -> None:
        if name != self.policy.name:
            raise NotOffered(f"base_model = {name!r}: this server has {self.policy.name!r}")

    def _check_model(self, model_id: str) -> None:
        if self._training is None or self._training.model_id != model_id:
            raise Unknown(
                f"training client {model_id}: it does not have the trainer any more; continue from its last "
                "saved state with create_training_client_from_state_with_optimizer"
            )

    def _claim(self, model_id: str, session_id: str) -> None:
        self._check_session(session_id)
        if (other := self._training) is not None and other.session_id != session_id:
            silent_s = now() - self._sessions.get(other.session_id, float("-inf"))
            if silent_s < SILENT_S:
                raise NotOffered(
                    "another training client has the trainer of this server; it is free once that client is "
                    f"closed, or has been silent for {SILENT_S:g} s"
                )
        self._training = Training(model_id, session_id)

    def _folder_of(self, path: str, kind: str) -> Path:
        """The folder of a tinker:// path. Raises NotOffered if there is none."""
        match = _PATH.fullmatch(path)
        folder = self.folder.joinpath(*match.groups()) if match and ".." not in path else None
        if folder is None or match is None or match[2] != kind or not folder.is_dir():
            raise NotOffered(f"{path}: this server has no such checkpoint ({kind})")
        return folder

    def _new_folder(self, model_id: str, kind: str, name: str, *, overwrite: bool) -> tuple[str, Path]:
        if not _NAME.fullmatch(name):
            raise NotOffered(f"name = {name!r}: a name has letters, digits, '.', '_' and '-'")
        folder = self.folder / model_id / kind / name
        if folder.exists() and not overwrite:
            raise NotOffered(f"name = {name!r}: there is such a checkpoint; choose another name")
        folder.parent.mkdir(parents=True, exist_ok=True)
        return f"tinker://{model_id}/{kind}/{name}", folder


async def _outcome(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except (NotOffered, Unknown, CheckpointError) as why:
        return Failed(str(why), True)
    except TailraceError as why:
        return Failed(f"{type(why).__name__}: {why}", False)
