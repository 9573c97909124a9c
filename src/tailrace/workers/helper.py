"""Helpers, as the trainer's process sees them: while CPUs are lent, they compute with its weights.

Weights and gradients are in files of a folder in shared memory, so that only samples and a few figures
travel. A helper belongs to the trainer's process group and ends with it.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tailrace.trainer.passes import Passes
from tailrace.trainer.torch_trainer import TorchTrainer
from tailrace.trainer.wire import TrainingSample
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.exits import exit_cause
from tailrace.workers.messages import BadConfig, Compute, Computed, FromHelper, HelperJob, TrainerJob

ELEMENT_BYTES = 4
_WEIGHTS_FILE = "weights.helped"


def passes_of(job: TrainerJob) -> Passes:
    """What a trainer and its helpers compute with.

    Raises:
        ConfigError: the architecture cannot run packed.
    """
    return Passes.load(
        job.model,
        job.trainer,
        job.algorithm,
        temperature=job.sampling.temperature,
        max_tokens=job.sampling.max_completion_tokens,
    )


@contextmanager
def helpers_of(job: TrainerJob, folder: Path) -> Iterator[list["LocalHelper"]]:
    """Start a trainer's helpers, and end them with the block. folder: the trainer's, in shared memory."""
    weights = folder / _WEIGHTS_FILE
    helpers = [
        LocalHelper(HelperJob(trainer=job, weights=weights, gradient=folder / f"gradient.{number}"))
        for number in range(job.helpers)
    ]
    try:
        yield helpers
    finally:
        for helper in helpers:
            helper.close()


def make_helped(trainer: TorchTrainer, helpers: Sequence["LocalHelper"], folder: Path) -> None:
    """Wait until the helpers of the folder have loaded the model, and let the trainer use them.

    Raises:
        ConfigError: one cannot load it.
    """
    if helpers:
        for helper in helpers:
            helper.ready(trainer.num_parameters)
        trainer.be_helped(helpers, mapped(folder / _WEIGHTS_FILE, trainer.num_parameters))


def mapped(file: Path, num_elements: int) -> Tensor:
    """[num_elements] float32: the content of a file, which all who map it share. It is made if it does not
    exist, of zeros."""
    with file.open("ab") as made:
        made.truncate(num_elements * ELEMENT_BYTES)
    return torch.from_file(str(file), shared=True, size=num_elements, dtype=torch.float32)


class LocalHelper:
    """A Helper (trainer/helper.py)."""

    gradient: Tensor

    def __init__(self, job: HelperJob) -> None:
        self._job = job
        self._unfinished = 0
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tailrace.workers.helper_child"),
                    *(str(theirs.fileno()), job.model_dump_json()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._channel = WorkerChannel(mine, msgspec.msgpack.Decoder(FromHelper))
        self._answers: Iterator[FromHelper] = iter(self._channel)

    def ready(self, num_parameters: int) -> None:
        """Wait until it has loaded the model.

        Raises:
            ConfigError: it cannot.
        """
        first = self._answer()
        if isinstance(first, BadConfig):
            raise first.error()
        self.gradient = mapped(self._job.gradient, num_parameters)

    def begin(self, samples: Sequence[TrainingSample]) -> None:
        """As Helper.begin."""
        self._unfinished += 1
        with suppress(BrokenPipeError):  # it has ended: `finish` says why
            self._channel.send(Compute(list(samples)))

    def finish(self) -> list[float]:
        """As Helper.finish."""
        figures: list[list[float]] = []
        while self._unfinished:
            computed = self._answer()
            assert isinstance(computed, Computed), computed
            figures.append(computed.figures)
            self._unfinished -= 1
        return [sum(column) for column in zip(*figures, strict=True)]

    def close(self) -> None:
        """Let it end, and wait until it has."""
        self._channel.close()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answer(self) -> FromHelper:
        answer = next(self._answers, None)
        if answer is None:
            raise RuntimeError(f"a helper of the trainer ended: {exit_cause(self._process.wait())}")
        return answer
