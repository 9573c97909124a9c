"""The trainer's processes, from both sides. Samples are sent to them; weights never come to the controller.

Every call goes to all processes that it concerns: the ranks of one replica get the same calls in the same
order. Rank 0 of replica 0 publishes the weights and sends them.
"""

import asyncio
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, TypeVarTuple

import msgspec
from typing_extensions import override

from tailrace.algo.base import AlgorithmSettings
from tailrace.clock import waiting
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import StepStats, TrainerSettings
from tailrace.contracts.weights import DTYPE, Address, Link, Probe, Weights, WeightSender
from tailrace.drivers.engine.probes import SCORED
from tailrace.drivers.trainer import checksums
from tailrace.drivers.trainer.batch import AdamStep, LossDatum, LossOutput, TokenLoss, TrainingSample
from tailrace.drivers.weights.settings import WeightsSettings
from tailrace.drivers.weights.transfers import Transfers
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.process import give_memory_back, return_freed_tensors
from tailrace.drivers.workers.wire import STARTED
from tailrace.drivers.workers.worker import Job, Worker, WorkerConnection, beside
from tailrace.errors import CheckpointError, ConfigError, NotWoken, WorkerDied, say
from tailrace.kinds import class_of, kind_of
from tailrace.types import Sample, SampleId

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore

    from tailrace.drivers.trainer.distributed import Ranks
    from tailrace.drivers.trainer.trainer import TorchTrainer
    from tailrace.drivers.weights.tensors import Publisher

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
Units = list[list[TrainingSample]]

BLAME_S = 2.0
"""Seconds after the first failed collective in which a process may end and show why."""


class TrainerJob(Job):
    """Train a model."""

    model: Path
    trainer: TrainerSettings
    algorithm: AlgorithmSettings
    sampling: SamplingSettings
    weights: WeightsSettings
    published_dtype: DTYPE
    """The type of the engines' weights."""
    probe: tuple[int, ...] = ()
    """The fixed sequence by which engines prove that they have a publication; empty: there is none."""
    probe_dtype: DTYPE = "float32"
    """Type of the engines' weights."""
    checkpoints: Path | None = None
    """The folder of the run, into which it writes checkpoints that the controller reads."""
    seed: int = 0
    """Seed of its random generators."""
    replica: int = 0
    rank: int = 0
    """Number of this process among those of its replica."""
    host: str = "127.0.0.1"
    """The address of its host under which the other processes of the trainer reach it."""

    @property
    def is_alone(self) -> bool:
        """Whether the process has no need of torch.distributed."""
        return self.trainer.num_processes == 1 and not self.trainer.cpu_offload

    @property
    def listens(self) -> bool:
        """Whether the other processes find one another through this one."""
        return self.replica == self.rank == 0

    @override
    def folders(self) -> Mapping[str, Path]:
        folders = {"model.path": self.model}
        return folders if self.checkpoints is None else {**folders, "--output-dir": self.checkpoints}

    @override
    def at(self, address: str) -> Self:
        """A process group whose host is left at its default listens on that address."""
        weights = self.weights
        if weights.needs_address:
            weights = weights.model_copy(update={"host": address})
        return self.model_copy(update={"weights": weights, "host": address})


class Listening(msgspec.Struct):
    """The other processes of the trainer find one another at this address. It comes before the start."""

    host: str
    port: int


class Loaded(msgspec.Struct):
    """The trainer has loaded its model. `way`: how it computes several samples, in words."""

    way: str


class Stranded(msgspec.Struct):
    """A collective of the trainer's processes failed: another one has ended, or did not take part in time.
    The process does nothing more."""

    error: str


class TrainerWorker(Worker):
    """A process of the trainer: executes one call after another, and sends weights beside them. `sender`:
    None: another process of the trainer has it."""

    job_type = TrainerJob
    role = "trainer"
    events = (Listening, Loaded, Stranded)
    _store: "TCPStore"
    _written: Future[None]
    """Done when the last checkpoint that was begun is written."""
    _trainer: "TorchTrainer"
    _publisher: "Publisher | None"
    _initial: tuple[float, ...]
    """Log-probs of the probe before the first step."""

    def __init__(self, job: TrainerJob, connection: WorkerConnection, sender: WeightSender | None) -> None:
        self._job, self._connection, self._sender = job, connection, sender
        self._received = connection.in_turn(self)
        self._num_published = 0

    @override
    @classmethod
    def run(cls, job: TrainerJob, connection: WorkerConnection) -> None:
        if job.trainer.lora:
            return_freed_tensors()
        if not job.listens:
            connection.end_process_with_controller()
            cls(job, connection, None)._join_others()
            return
        with connection.refusals():
            sender = _open_sender(job)
        with closing(sender):
            connection.end_process_with_controller(clean_up=sender.close)
            worker = cls(job, connection, sender)
            worker._train(None) if job.is_alone else worker._join_others()

    def accumulate(self, units: Units) -> None:
        """Add the gradients of units to their sum."""
        self._trainer.accumulate(units)

    def ess(self, units: Units) -> float:
        """Compute the effective sample size of units under the current weights."""
        return self._trainer.ess(units)

    def step(self) -> StepStats:
        """Do one optimizer step. Raises a ScheduleError if nothing was accumulated."""
        return self._trainer.step()

    def run_tokens(self, data: list[LossDatum], loss: TokenLoss, with_gradient: bool) -> list[LossOutput]:
        """Run a loss over single tokens; the gradients are part of the next `step_sum`."""
        return self._trainer.run_tokens(data, loss, with_gradient=with_gradient)

    def step_sum(self, adam: AdamStep) -> float:
        """Step on the sum of the gradients of `run_tokens`; return its norm before clipping."""
        return self._trainer.step_sum(adam)

    def logprobs(self, sample: TrainingSample) -> list[float]:
        """The log-probs of a sample: [num_tokens]."""
        with self._trainer.present("weights"):
            return self._trainer.logprobs(sample)

    def reference_logprobs(self, sample: TrainingSample) -> list[float]:
        """Compute the log-probs of a sample under the model that LoRA began with: [num_tokens]."""
        with self._trainer.present("weights"):
            return self._trainer.reference_logprobs(sample)

    def publish(self, version: int) -> Weights:
        """Publish the current weights. Raises a TransferFailed if there is no room for them."""
        with self._trainer.present("weights"):
            weights, probe = self._trainer.export_weights(), self._probe()
            if self._publisher:
                return self._publisher.publish(weights, version, probe)
            self._help_to_gather(weights)
            return Weights(version)

    def _probe(self) -> Probe | None:
        """The probe of a publication: the first one is proven, and every n-th after it. All processes of the
        trainer compute it."""
        if not (ids := self._job.probe):
            return None
        asked = self._num_published % self._job.weights.probe_every == 0
        self._num_published += 1
        expected = self._score_probe() if asked else ()
        finite = all(map(isfinite, expected))  # else there is nothing to compare with
        return Probe(ids, len(ids) - SCORED, self._initial, expected if finite else (), {})

    def _score_probe(self) -> tuple[float, ...]:
        if not (ids := self._job.probe):
            return ()
        scored = list(ids[-SCORED:])
        sample = TrainingSample(SampleId(0, 0, 0), list(ids[:-SCORED]), scored, [0.0] * SCORED, 0.0)
        return tuple(self._trainer.rounded_logprobs(sample, self._job.probe_dtype))

    @beside
    def send(self, version: int, link: Link) -> None:
        """Send a version to the engines of a link. What is sent is a copy. They decide when this ends. Raises
        a TransferFailed if one of them did not take it."""
        assert self._sender is not None
        self._sender.send(version, link)

    @beside
    def give_up(self, link: Link) -> None:
        """End what a transfer over a link waits for."""
        assert self._sender is not None
        self._sender.give_up(link)

    @beside
    def rendezvous(self, link: Link) -> Address:
        """Return where the ends of a link meet."""
        assert self._sender is not None
        return self._sender.rendezvous(link)

    def sleep(self) -> None:
        """Move state off the device, and give back memory that is not in use. Raises a ConfigError if there
        is no room for it."""
        try:
            self._trainer.sleep()
        except (OSError, RuntimeError) as why:  # of a file, or of pinned memory
            remedy = 'make room there, set TMPDIR, or write "device" for a part'
            raise ConfigError(
                "trainer.offload", self._job.trainer.offload.places(), str(why), remedy
            ) from why
        give_memory_back()

    def wake(self, early: bool) -> None:
        """Take the state back, or only what is needed to accumulate. Raises a NotWoken without memory."""
        try:
            self._trainer.wake(early=early)
        except (RuntimeError, MemoryError) as why:  # of torch's allocators, and of a mapped file
            raise NotWoken(str(why)) from why

    def save(self, folder: str) -> None:
        """Begin a checkpoint. Training may go on afterwards. Raises a CheckpointError if it cannot begin."""
        self._written = Future()
        with self._trainer.present("weights", "optimizer"):
            write = self._trainer.save(Path(folder))
            if self._job.trainer.async_checkpoints:
                threading.Thread(target=self._write, args=(write, self._written), daemon=True).start()
            else:
                self._write(write, self._written)

    @beside
    def written(self) -> None:
        """Wait until the checkpoint that was begun is complete. Raises a CheckpointError if it has failed."""
        self._written.result()

    def restore(self, folder: str, optimizer: bool) -> None:
        """Continue from a checkpoint, as TorchTrainer.restore. Raises a CheckpointError if unreadable."""
        with self._trainer.present("weights", "gradients", "optimizer"):
            self._trainer.restore(Path(folder), optimizer=optimizer)

    def join(self, host: str, port: int) -> None:
        """Find the other processes at an address. It comes before the start."""
        from torch._C._distributed_c10d import TCPStore

        self._store = TCPStore(host, port, is_master=False)

    def _write(self, write: Callable[[], None], written: Future[None]) -> None:
        """Write a checkpoint. Where another process of the trainer is lost, nothing more is said of it."""
        from tailrace.drivers.trainer.distributed import is_lost_peer

        try:
            write()
        except CheckpointError as error:
            written.set_exception(error)
        except Exception as error:
            traceback.print_exc()
            if is_lost_peer(error):
                self._connection.tell(Stranded(str(error)))
                return
            cause = f"{type(error).__name__}: {error}"
            written.set_exception(
                CheckpointError(f"the checkpoint cannot be written ({cause}); see the log above")
            )
        else:
            written.set_result(None)

    def _join_others(self) -> None:
        """Train as one of the trainer's processes."""
        from tailrace.drivers.trainer.distributed import joined

        with self._failures_told_apart():
            place = joined(
                self._job.trainer, self._find_others(), replica=self._job.replica, rank=self._job.rank
            )
            with place as ranks, self._failures_told_apart():
                self._train(ranks)

    def _find_others(self) -> "TCPStore":
        """Return the store through which the trainer's processes find one another."""
        from tailrace.drivers.trainer.distributed import listen

        if self._job.listens:
            self._store = listen(self._job.host)
            self._connection.tell(Listening(self._job.host, self._store.port))
        elif (join := next(self._received, None)) is not None:
            self._connection.execute(self, join)
        else:
            sys.exit()  # the controller has ended
        return self._store

    def _train(self, ranks: "Ranks | None") -> None:
        """Load the model and execute calls. `ranks`: None: it is alone."""
        import torch

        from tailrace.drivers.trainer.trainer import TorchTrainer

        job = self._job
        with self._connection.refusals():
            if ranks and ranks.tensor:
                class_of("parts.equality").check(job.model, job.trainer, ranks)
            self._trainer = TorchTrainer(job.model, job.trainer, job.algorithm, job.sampling, ranks=ranks)
        torch.manual_seed(job.seed + job.replica * job.trainer.replica_processes + job.rank)
        self._publisher, self._initial = self._open_publisher(), self._score_probe()
        give_memory_back()  # a file of weights is read twice
        if job.listens:
            self._connection.tell(Loaded(self._trainer.way))
        self._connection.answer(STARTED, None)
        for call in self._received:
            self._connection.execute(self, call)

    def _open_publisher(self) -> "Publisher | None":
        """Return the publisher; None: this process has no sender, and only helps to gather the weights."""
        from tailrace.drivers.weights.tensors import Publisher

        if self._sender is not None:
            return Publisher(self._sender, self._job.published_dtype, self._trainer.weights())
        self._help_to_gather(self._trainer.weights())
        return None

    def _help_to_gather(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        if self._job.replica == 0:
            for _ in tensors:
                pass

    @contextmanager
    def _failures_told_apart(self) -> Iterator[None]:
        """Tell the controller when a collective fails, and wait for the end: the cause is in another process.
        After any other error end at once, before this process leaves the others."""
        from tailrace.drivers.trainer.distributed import is_lost_peer

        try:
            yield
        except Exception as error:
            traceback.print_exc()
            if not is_lost_peer(error):
                os._exit(1)
            self._connection.tell(Stranded(str(error)))
            for _ in self._received:
                pass


def _open_sender(job: TrainerJob) -> WeightSender:
    from tailrace.drivers.trainer.adapter import peft_config

    adapter = job.trainer.adapter
    config = peft_config(job.model, adapter) if adapter else None
    sender: WeightSender = kind_of("weights", job.weights.transport, "weights.transport").sender(
        job.weights, job.model, config, job.trainer.device
    )
    return sender


def process_names(trainer: TrainerSettings) -> list[str]:
    """Return the names of a trainer's processes, replica by replica, rank by rank."""
    if trainer.num_processes == 1:
        return ["trainer"]
    ranks = range(trainer.replica_processes)
    return [f"trainer-{i}-{rank}" for i in range(trainer.replicas) for rank in ranks]


def trainer_jobs(job: TrainerJob) -> list[tuple[str, TrainerJob]]:
    """Return the name and the job of each process of a trainer, in the order of `process_names`."""
    names, ranks = process_names(job.trainer), job.trainer.replica_processes
    places = [{"replica": number // ranks, "rank": number % ranks} for number in range(len(names))]
    return [(name, job.model_copy(update=place)) for name, place in zip(names, places, strict=True)]


class RemoteTrainer:
    """A Trainer (contracts/trainer.py) of one or several processes.

    Args:
        workers: replica by replica, rank by rank, as `trainer_jobs`. They may still be starting.
        job: of any of them.
    """

    def __init__(self, workers: Sequence[RemoteWorker], job: TrainerJob) -> None:
        self._job, self.replicas = job, job.trainer.replicas
        self._published: Weights | None = None
        self.transfers = Transfers(self.send, self.give_up if job.weights.shares_transfers else None)
        self._adopt(workers)

    def _adopt(self, workers: Sequence[RemoteWorker]) -> None:
        self.workers, self._first = tuple(workers), workers[0]
        size = self._job.trainer.replica_processes
        self._replicas = [self.workers[start : start + size] for start in range(0, len(workers), size)]
        self._given = [0] * self.replicas
        """Tokens of divided units that each replica was given since the last step."""
        self._stranded: dict[RemoteWorker, str] = {}
        """The error of each process that lost another one in a collective."""
        for each in workers:
            each.subscribe(partial(self._on_event, each))

    async def ready(self) -> None:
        """Wait until all processes have loaded the model. Raises as RemoteWorker.ready."""
        await asyncio.gather(*(each.ready() for each in self.workers))

    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        """Add the gradients of units. Each unit goes to the replica with the fewest tokens since the last
        step, the largest unit first. Tokens that some replicas got alone do not count for the others, which
        were not there; they share the samples of a unit."""
        shares = zip(self._replicas, self._divide(units, replicas), strict=True)
        await asyncio.gather(
            *(
                _begin(ranks, TrainerWorker.accumulate, _training_samples(share, version))
                for ranks, share in shares
                if share
            )
        )

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        """Compute the effective sample size of units, by replica 0."""
        return (await _begin(self._replicas[0], TrainerWorker.ess, _training_samples(units, version)))[0]

    async def logprobs(self, sample: Sample) -> list[float]:
        """Log-probs of a sample's completion under the current weights, at the sampling temperature."""
        return (await _begin(self._replicas[0], TrainerWorker.logprobs, TrainingSample.of(sample)))[0]

    async def reference_logprobs(self, sample: Sample) -> list[float]:
        """Compute the log-probs of a sample under the model that LoRA began with: [num_tokens]."""
        asked = TrainingSample.of(sample)
        return (await _begin(self._replicas[0], TrainerWorker.reference_logprobs, asked))[0]

    async def step(self) -> StepStats:
        """Do one optimizer step. `compute_s` and `gpu` are the largest of the processes. Raises a
        ScheduleError if nothing was accumulated."""
        self._given = [0] * len(self._given)
        answers = await _begin(self.workers, TrainerWorker.step)
        firsts = answers[:: len(self._replicas[0])]
        samples = tuple(chain.from_iterable(stats.samples for stats in firsts))
        gpu = {name: max(stats.gpu.get(name, 0.0) for stats in answers) for name in firsts[0].gpu}
        compute_s = max(stats.compute_s for stats in answers)
        return replace(firsts[0], samples=samples, compute_s=compute_s, gpu=gpu)

    async def run_tokens(
        self, data: Sequence[LossDatum], loss: TokenLoss, *, with_gradient: bool
    ) -> list[LossOutput]:
        """Compute a loss that is a sum over tokens, and add its gradients to their sum, which `step_sum`
        consumes. The replicas share the data. Return one output for each datum, in their order."""
        shares = [range(number, len(data), len(self._replicas)) for number in range(len(self._replicas))]
        answers = await asyncio.gather(
            *(
                _begin(ranks, TrainerWorker.run_tokens, [data[i] for i in share], loss, with_gradient)
                for ranks, share in zip(self._replicas, shares, strict=True)
                if share
            )
        )
        found = {
            share[output.number]: output
            for ranks, share in zip(answers, shares, strict=False)  # replicas without data did not answer
            for output in chain.from_iterable(ranks)
        }
        return [found[number] for number in range(len(data))]

    async def step_sum(self, adam: AdamStep) -> float:
        """Step on the sum of the gradients of `run_tokens`; return its norm before clipping."""
        return (await _begin(self.workers, TrainerWorker.step_sum, adam))[0]

    async def publish(self, version: int) -> Weights:
        """Make the current weights available as `version`, by the configured transport."""
        answers = await _begin(self.workers, TrainerWorker.publish, version)
        self._published = answers[0]
        return answers[0]

    async def sleep(self) -> None:
        """Move the parts of `OffloadSettings` off the devices."""
        await _begin(self.workers, TrainerWorker.sleep)

    async def wake(self, replicas: int | None = None) -> None:
        """Take the parts back; with `replicas`, on the first ones only."""
        woken = chain.from_iterable(self._replicas[:replicas])
        await _begin(list(woken), TrainerWorker.wake, replicas is not None)

    async def send(self, weights: Weights, link: Link) -> None:
        """The trainer's half of a transfer (contracts/weights.py); it runs beside other work of the process.
        Raises a TransferFailed if an engine did not take the weights."""
        if weights.is_streamed:
            await self._first.call(TrainerWorker.send, weights.version, link)

    async def give_up(self, link: Link) -> None:
        """End what the trainer's half of a transfer waits for."""
        await self._first.call(TrainerWorker.give_up, link)

    async def rendezvous(self, link: Link) -> Address:
        """Return where the trainer and the engines of a link meet."""
        return await self._first.call(TrainerWorker.rendezvous, link)

    async def save(self, folder: Path) -> Awaitable[None]:
        """Begin a checkpoint, by replica 0; the result ends when it is written."""
        ranks = self._replicas[0]
        await _begin(ranks, TrainerWorker.save, str(folder))

        async def complete() -> None:
            await written

        written = _begin(ranks, TrainerWorker.written)
        completed = asyncio.ensure_future(complete())
        # asyncio reports an error that nobody awaits, and a run that fails awaits no checkpoint.
        completed.add_done_callback(lambda done: done.cancelled() or done.exception())
        return completed

    async def retire(self, older: Sequence[Path], newest: Path) -> None:
        """Remove the state of the optimizer from older checkpoints, beside training."""
        await asyncio.to_thread(checksums.retire, older, newest)

    async def restore(self, folder: Path, *, optimizer: bool = True) -> None:
        """Continue from a checkpoint. The engines get the weights with the next publication. `optimizer`:
        False: AdamW begins anew."""
        await _begin(self.workers, TrainerWorker.restore, str(folder), optimizer)

    async def close(self) -> None:
        """End all processes and remove the published weights."""
        try:
            await asyncio.gather(*(each.close() for each in self.workers))
        finally:
            # A process that was killed did not remove its folder in shared memory.
            if self._published is not None and self._job.weights.one_host:
                shutil.rmtree(Path(self._published.location).parent, ignore_errors=True)

    def _divide(
        self, units: Sequence[Sequence[Sample]], replicas: int | None
    ) -> list[list[Sequence[Sample]]]:
        """The units of each replica, in their order."""
        given = self._given
        if replicas is not None:
            given = [0] * replicas
            units = [[sample] for unit in units for sample in unit] if replicas > 1 else units
        sizes = [sum(each.num_sequence_tokens for each in unit) for unit in units]
        owners = [0] * len(units)
        for index in sorted(range(len(units)), key=lambda index: -sizes[index]):
            owners[index] = given.index(min(given))
            given[owners[index]] += sizes[index]
        return [
            [unit for unit, owner in zip(units, owners, strict=True) if owner == number]
            for number in range(len(self._given))
        ]

    def _on_event(self, worker: RemoteWorker, event: Listening | Loaded | Stranded) -> None:
        if isinstance(event, Loaded):
            say(f"the trainer computes samples {event.way}")
            return
        if isinstance(event, Listening):
            for each in self.workers[1:]:
                with suppress(WorkerDied):  # the run ends with it
                    each.send(TrainerWorker.join, event.host, event.port)
            return
        if not self._stranded:
            asyncio.get_running_loop().call_later(BLAME_S, self._end_missing, self.workers)
        self._stranded.setdefault(worker, event.error)  # training and writing a checkpoint may both fail

    def _end_missing(self, workers: Sequence[RemoteWorker]) -> None:
        """A collective of processes has failed. End those that did not take part, unless one ends by
        itself; others may have replaced them since."""
        if any(each.has_ended for each in workers):
            return
        limit = f"{self._job.trainer.collective_timeout_s:g} s (trainer.collective_timeout_s)"
        missing = [each for each in workers if each not in self._stranded]
        for each in missing:
            each.abort(f"did not take part in a collective within {limit}")
        if not missing:
            workers[0].abort(f"failed in a collective: {self._stranded[workers[0]]}")


class AdapterOff:
    """A Reference (contracts/trainer.py): the model of a trainer with LoRA, without the adapter. It needs no
    process and no memory of its own; the trainer computes between its other work."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def logprobs(self, sample: Sample) -> list[float]:
        """Compute log-probs under the model that LoRA began with."""
        return await self._trainer.reference_logprobs(sample)


def _begin(
    workers: Sequence[RemoteWorker], method: Callable[[Any, *Ts], R], *arguments: *Ts
) -> Coroutine[Any, Any, list[R]]:
    """Call a method of several processes now, so that all of them are asked everything in one order. Return
    what waits for the results."""
    results = asyncio.gather(*(each.begin(method, *arguments) for each in workers))

    async def wait() -> list[R]:
        with waiting(f"{', '.join(each.name for each in workers)}: {method.__name__}"):
            return await results

    return wait()


def _training_samples(units: Sequence[Sequence[Sample]], version: int) -> Units:
    return [[TrainingSample.of(sample, published=version) for sample in unit] for unit in units]
