"""Tinker's API for one model: a trainer and engines, the same as those of a run.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.clock import Signal, now
from tailrace.contracts.engine import Engine
from tailrace.contracts.mark import Mark, remove
from tailrace.contracts.weights import Weights
from tailrace.drivers.trainer.batch import AdamStep, LossDatum, TokenLoss
from tailrace.drivers.trainer.checksums import PARTIAL, replacing
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import CheckpointError, TailraceError
from tailrace.extras.serve.generation import ServedModel
from tailrace.extras.tinker.wire import NotOffered, Pass, pass_bytes, sample_bytes
from tailrace.record.events import Recorder
from tailrace.rollout.router import Router
from tailrace.types import KV, Group, Prompt, Sample, SampleId, SamplingParams, noise_seed

SILENT_S, FORGOTTEN_S, SWEEP_S = 30.0, 3600.0, 5.0
"""The SDK's heartbeats come each 10 s. After SILENT_S without a request a client's samples are cancelled, and
another may have the trainer; after FORGOTTEN_S its session ends."""
MAX_SESSIONS, MAX_OPEN, BYTES_OF_ONE = 256, 4096, 2**15
"""Sessions of the server; of each its sampling clients, and its samples and other requests that have no
result yet. A request with a large body counts as several."""
KEPT_BYTES, KEPT_S = 2**26, 600.0
"""Results that a session keeps, should its client ask again, and how long."""
INITIAL, BASE, SNAPSHOTS = "initial", "base", "snapshots"
STATE = (INITIAL, f"{INITIAL}.*partial", BASE, f"{BASE}.*partial", SNAPSHOTS)
"""The names in the folder of checkpoints that a new service replaces."""


_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}(?<!{re.escape(PARTIAL)})")
_PATH = re.compile(rf"tinker://([\w:.-]{{1,128}})/(weights|sampler_weights)/({_NAME.pattern})")


Execute = Callable[[], Awaitable[Any]]
"""Begins what a request asks for."""


class Failed(NamedTuple):
    """A request that failed. `is_users`: it must be changed."""

    message: str
    is_users: bool


class Unknown(TailraceError):
    """The service does not know the id: it belongs to another life of the server, or has ended."""

    status_code = 404


class Busy(TailraceError):
    """A client has as much under way as it may. The SDK asks again."""

    status_code = 429


@dataclass
class Sampler:
    """A sampling client. `weights`: BASE, the path of a checkpoint, or the name of a snapshot."""

    weights: str
    model_id: str = ""
    """Id of a client in flight, which gets the newest weights of this model."""


@dataclass(eq=False)
class Asked:
    """A request that returns a future. `digest`: of its body: another body is another request."""

    digest: bytes
    is_for_samples: bool
    task: asyncio.Task[Any]
    ended_s: float = inf


@dataclass(eq=False)
class ClientSession:
    """A client, with all that ends with it. `heard_s`: time of its last request."""

    heard_s: float
    samplers: dict[str, Sampler] = field(default_factory=dict)
    asked: dict[str, Asked] = field(default_factory=dict)
    """Requests by id, as long as the results are kept."""
    newest: dict[str, int] = field(default_factory=dict)
    """The highest number of a request, by training client."""
    num_open = 0

    @property
    def has_clients(self) -> bool:
        return bool(self.newest or self.samplers)

    def cancel(self) -> None:
        """End the requests for samples."""
        for each in self.asked.values():
            if each.is_for_samples:
                each.task.cancel()

    def sweep(self) -> None:
        """Drop results that are old, and the first ones if all are too large."""
        done = [(id, each) for id, each in self.asked.items() if each.task.done()]
        sizes = {id: 1024 + (0 if each.task.cancelled() else len(each.task.result())) for id, each in done}
        excess = sum(sizes.values()) - KEPT_BYTES
        for id, each in done:
            if excess > 0 or each.ended_s < now() - KEPT_S:
                del self.asked[id]
                excess -= sizes[id]


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
        self, trainer: RemoteTrainer, engines: Sequence[Engine], policy: ServedModel, folder: Path
    ) -> None:
        self.policy, self.folder = policy, folder
        self._trainer, self._engines = trainer, engines
        self._router = Router(engines, Recorder())
        self._sessions: dict[str, ClientSession] = {}
        self._training: Training | None = None
        self._trainer_turn = asyncio.Lock()
        self._trainer_weights = BASE
        """Weights of the trainer, as in Sampler.weights; empty: they are not published."""
        self._served = BASE
        self._loading = asyncio.Lock()
        self._num_running, self._changed = 0, Signal()
        self._version = self._num_samples = 0
        self._infos = Weights(0)
        """The last publication."""

    async def open(self) -> None:
        """Write the model that training begins with, and that clients may return to."""
        for path in Mark("", [*STATE]).owned_in(self.folder):
            remove(path)
        await (await self._trainer.save(self.folder / INITIAL))
        await self._publish_to(self.folder / BASE)
        self._sweep(now())

    def create_session(self) -> str:
        """Begin a session, and return its id. Of too many the one ends that has nothing under way, has made
        no client if there is such a one, and has been silent for the longest time. Raises Busy."""
        if len(self._sessions) >= MAX_SESSIONS:
            idle = {id: each for id, each in self._sessions.items() if not each.num_open}
            if not idle:
                raise Busy(f"all {MAX_SESSIONS} sessions of this server have requests under way; close one")
            self.finish(min(idle, key=lambda id: (idle[id].has_clients, idle[id].heard_s)))
        self._sessions[id := os.urandom(8).hex()] = ClientSession(now())
        return id

    def session(self, id: str) -> ClientSession:
        """The session of an id that begins with its own; its client is alive. Raises Unknown."""
        if (found := self._sessions.get(id := id.partition(":")[0])) is None:
            raise Unknown(f"session {id}: this server has no such session; begin a new ServiceClient")
        found.heard_s = now()
        return found

    def finish(self, session_id: str) -> None:
        """End a session. Its training client leaves the trainer, after what that computes now."""
        if session := self._sessions.pop(session_id, None):
            session.cancel()

    def begin(self, owner: str, seq_id: int | None, body: bytes, work: Execute, num_samples: int = 0) -> str:
        """Begin a request of a training client, or one for samples, and return its id. One that has begun is
        not begun again: a client that got no reply sends it again. The numbers of a training client rise.
        Raises Unknown, NotOffered if the number was that of another request, and Busy."""
        session, request_id = self.session(owner), f"{owner}:{seq_id}"
        digest, known = blake2b(body, digest_size=16).digest(), session.asked.get(request_id)
        if known and known.digest == digest:
            return request_id
        if known or seq_id is None or (not num_samples and seq_id <= session.newest.get(owner, -1)):
            raise NotOffered(f"seq_id = {seq_id}: it is missing, or was the number of an earlier request")
        size = max(1, num_samples, len(body) // BYTES_OF_ONE)
        if session.num_open + size > MAX_OPEN:
            raise Busy("too many requests are under way; ask again when some have ended")
        if not num_samples:
            session.newest[owner] = seq_id
        session.num_open += size
        asked = Asked(digest, num_samples > 0, asyncio.ensure_future(_outcome(work)))
        session.asked[request_id] = asked

        def ended(task: asyncio.Task[Any]) -> None:
            session.num_open, asked.ended_s = session.num_open - size, now()

        asked.task.add_done_callback(ended)
        return request_id

    def _sweep(self, due_s: float) -> None:
        """End what belongs to silent clients, and drop old results, now and again. `due_s`: when; while the
        server itself stood still, no client was silent."""
        asyncio.get_running_loop().call_later(SWEEP_S, self._sweep, now() + SWEEP_S)
        for id, session in list(self._sessions.items()):
            session.heard_s += now() - due_s
            session.sweep()
            if (silent_s := now() - session.heard_s) > SILENT_S:
                session.cancel()
            if silent_s > FORGOTTEN_S:
                self.finish(id)

    async def result(self, request_id: str, timeout_s: float) -> Any:
        """Wait for the result of a request, or a `Failed`; None: there is none yet. Raises Unknown."""
        if (asked := self.session(request_id).asked.get(request_id)) is None:
            raise Unknown(f"request {request_id}: this server does not know it")
        await asyncio.wait([asked.task], timeout=timeout_s)
        if not asked.task.done():
            return None
        return Failed("it was cancelled", True) if asked.task.cancelled() else asked.task.result()

    def cancel(self, request_id: str) -> None:
        """End a request for samples. Others are refused: a pass may be in the gradient already."""
        if (asked := self.session(request_id).asked.get(request_id)) is not None:
            if not asked.is_for_samples:
                raise NotOffered(f"request {request_id}: only requests for samples can be cancelled")
            asked.task.cancel()

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
            self._check_free(session_id)
            await self._restore(self.folder / INITIAL, Training(model_id, session_id), BASE)

    async def load_state(
        self, model_id: str, path: str, *, optimizer: bool, session_id: str | None = None
    ) -> None:
        """Continue from a saved state. `session_id`: of a new training client; None: it has the trainer."""
        folder = self._folder_of(path, "weights")
        async with self._trainer_turn:
            if session_id is None:
                session_id = self.check_model(model_id).session_id
            else:
                self._check_free(session_id)
            await self._restore(folder, Training(model_id, session_id), "", optimizer=optimizer)

    async def _restore(self, folder: Path, to: Training, weights: str, *, optimizer: bool = True) -> None:
        """Give a training client the trainer, once it has the weights of a folder. Until then, and if they
        cannot be read, nobody has it."""
        self._training, self._trainer_weights = None, ""
        await self._trainer.restore(folder, optimizer=optimizer)
        self._training, self._trainer_weights = to, weights

    async def run_pass(self, model_id: str, read: Callable[[], Awaitable[Pass]]) -> bytes:
        """Compute losses and log-probs, and add gradients to their sum. `read`: called when it is its turn,
        so that only one pass is held that is more than bytes."""
        async with self._turn(model_id):
            asked = await read()
            outputs = await self._trainer.run_tokens(
                asked.data, asked.loss, with_gradient=asked.with_gradient
            )
        return pass_bytes(asked, outputs)

    async def optim_step(self, model_id: str, adam: AdamStep) -> dict[str, Any]:
        """Step on the sum of gradients."""
        async with self._turn(model_id):
            self._trainer_weights = ""
            norm = await self._trainer.step_sum(adam)
        found = {"grad_norm": norm} if isfinite(norm) else {"skipped": 1.0}
        return {"metrics": {"learning_rate": adam.learning_rate, **found}}

    async def save_state(self, model_id: str, name: str, *, overwrite: bool) -> dict[str, Any]:
        """Write a checkpoint from which `load_state` continues."""
        async with self._turn(model_id):
            path, folder = self._new_folder(model_id, "weights", name, overwrite=overwrite)
            await (await self._trainer.save(folder))
        return {"path": path}

    async def save_for_sampler(
        self, model_id: str, name: str | None, *, sampler_id: str, in_flight: bool
    ) -> dict[str, Any]:
        """Publish the weights: under a name, or for a new sampling client."""
        if name is not None:
            async with self._turn(model_id):
                path, folder = self._new_folder(model_id, "sampler_weights", name, overwrite=False)
                await self._publish_to(folder)
                self._trainer_weights = path
            return {"path": path}
        async with self._turn(model_id):
            snapshot = f"snapshot {self._version + 1}"
            folder = self.folder / SNAPSHOTS / str(self._version + 1)
            await self._publish_to(folder)
            self._trainer_weights = snapshot
            await self._serve(snapshot, folder, drains=not in_flight)
            for older in {*folder.parent.iterdir()} - {folder}:
                remove(older)
            samplers = self.session(model_id).samplers
            for sampler in samplers.values():
                if in_flight and sampler.model_id == model_id:
                    sampler.weights = snapshot
            samplers[sampler_id] = Sampler(snapshot, model_id if in_flight else "")
        return {"sampling_session_id": sampler_id}

    def info(self, model_id: str) -> dict[str, Any]:
        """Return the description of a training client's model. Raises Unknown."""
        self.check_model(model_id)
        lora = self.policy.lora
        model = {"model_name": self.policy.name, "tokenizer_id": str(self.policy.path)}
        more = {"is_lora": lora is not None, "lora_rank": lora.rank if lora else None}
        return {"type": "get_info", "model_data": model, "model_id": model_id, **more, **model}

    async def create_sampler(self, sampler_id: str, base_model: str | None, path: str | None) -> None:
        """Make a sampling client of the model itself, or of saved weights; the engines serve them. Raises
        Unknown, NotOffered and Busy."""
        samplers = self.session(sampler_id).samplers
        if len(samplers) >= MAX_OPEN:
            raise Busy("this session has too many sampling clients; begin a new ServiceClient")
        if path is None:
            self._check_base(base_model or "")
            weights, folder = BASE, self.folder / BASE
        else:
            weights, folder = path, self._folder_of(path, "sampler_weights")
        if sampler_id in samplers and samplers[sampler_id] != Sampler(weights):
            raise NotOffered(f"{sampler_id}: this was the number of another sampling client")
        await self._serve(weights, folder, drains=True)
        samplers[sampler_id] = Sampler(weights)

    def sampler(self, sampler_id: str) -> Sampler:
        """Raises Unknown."""
        if (found := self.session(sampler_id).samplers.get(sampler_id)) is None:
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
        async with self._trainer_turn:
            if sampler.weights == self._trainer_weights:
                datum, loss = LossDatum(ids, [0.0] * (len(ids) - 1)), TokenLoss("cross_entropy")
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
        """Publish the trainer's weights, and keep them in a folder of ours, which is whole or not there."""
        self._version += 1
        self._infos = await self._trainer.publish(self._version)
        with replacing(folder) as new:
            shutil.copytree(self._infos.location, new, copy_function=os.link, dirs_exist_ok=True)

    def _check_base(self, name: str) -> None:
        if name != self.policy.name:
            raise NotOffered(f"base_model = {name!r}: this server has {self.policy.name!r}")

    @asynccontextmanager
    async def _turn(self, model_id: str) -> AsyncIterator[None]:
        """Inside the block a training client has the trainer for itself. Raises Unknown."""
        async with self._trainer_turn:
            self.check_model(model_id)
            yield

    def check_model(self, model_id: str) -> Training:
        """The training client that has the trainer. Raises Unknown if it is another one, or has ended."""
        training = self._training
        if training is None or training.model_id != model_id or training.session_id not in self._sessions:
            raise Unknown(
                f"training client {model_id}: it does not have the trainer any more; continue from its last "
                "saved state with create_training_client_from_state_with_optimizer"
            )
        return training

    def _check_free(self, session_id: str) -> None:
        """Raises NotOffered if the training client of another session has the trainer."""
        self.session(session_id)
        other = self._training and self._sessions.get(self._training.session_id)
        if other and other is not self._sessions[session_id] and now() - other.heard_s < SILENT_S:
            raise NotOffered(
                "another training client has the trainer of this server; it is free once that client is "
                f"closed, or has been silent for {SILENT_S:g} s"
            )

    def _folder_of(self, path: str, kind: str) -> Path:
        """The folder of a tinker:// path. Raises NotOffered if there is none."""
        match = _PATH.fullmatch(path)
        folder = self.folder.joinpath(*match.groups()) if match and ".." not in path else None
        if folder is None or match is None or match[2] != kind or not folder.is_dir():
            raise NotOffered(f"{path}: this server has no such checkpoint ({kind})")
        return folder

    def _new_folder(self, model_id: str, kind: str, name: str, *, overwrite: bool) -> tuple[str, Path]:
        """The path and folder of a new checkpoint of a training client that has the trainer."""
        if not _NAME.fullmatch(name):
            raise NotOffered(f"name = {name!r}: a name has letters, digits, '.', '_' and '-'")
        folder = self.folder / model_id / kind / name
        if folder.exists() and not overwrite:
            raise NotOffered(f"name = {name!r}: there is such a checkpoint; choose another name")
        return f"tinker://{model_id}/{kind}/{name}", folder


async def _outcome(work: Execute) -> Any:
    """A result, or the `Failed` that is the final answer whatever was raised."""
    try:
        return await work()
    except (NotOffered, Unknown, CheckpointError) as why:
        return Failed(str(why), True)
    except Exception as why:  # a request is not the last word of the server: disks and libraries fail, too
        return Failed(f"{type(why).__name__}: {why}", False)
