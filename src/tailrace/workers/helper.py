"""Helpers, as the trainer's process sees them: while CPUs are lent, they compute with its weights.

Weights and gradients are in files of a folder in shared memory, so that only samples and a few figures
travel. A helper belongs to the trainer's process group and ends with it.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tailrace.trainer.wire import TrainSample
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.exits import exit_cause
from tailrace.workers.messages import BadConfig, Compute, Computed, FromHelper, HelperJob, TrainerJob

ELEMENT_BYTES = 4


def spawn_helpers(job: TrainerJob, folder: Path) -> list["LocalHelper"]:
    """Start the helpers of a trainer whose folder in shared memory this is."""
    weights = folder / "weights.helped"
    jobs = [
        HelperJob(trainer=job, weights=weights, gradient=folder / f"gradient.{n}") for n in range(job.helpers)
    ]
    return [LocalHelper(job) for job in jobs]


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

    def ready(self, num_parameters: int) -> Tensor:
        """Wait until it has loaded the model. Returns [num_parameters]: where it finds the weights.

        Raises:
            ConfigError: it cannot.
        """
        first = self._answer()
        if isinstance(first, BadConfig):
            raise first.error()
        self.gradient = mapped(self._job.gradient, num_parameters)
        return mapped(self._job.weights, num_parameters)

    def begin(self, samples: Sequence[TrainSample]) -> None:
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
