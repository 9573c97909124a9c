"""The engine's process: a loop that receives messages, decodes one step and reports.

Finished requests are reported in the iteration in which they end. Unfinished ones are reported every
`report_every_s`, before a load, and when they are aborted. An idle engine blocks on the socket.
"""

import time

import msgspec
import transformers.models.auto.modeling_auto  # noqa: F401  # the first config loads it; a fork server has it
from torch import Tensor

from tailrace.engine.base import GenerationOutput, GenerationRequest
from tailrace.engine.native.engine import NativeEngine
from tailrace.errors import TransferFailed, WeightsRefused
from tailrace.types import KV
from tailrace.weights.base import Link, Weights
from tailrace.weights.transports import WeightReceiver
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, config_errors_sent, end_with_controller, give_memory_back
from tailrace.workers.messages import (
    Abort,
    Alive,
    Done,
    EngineJob,
    Load,
    Pause,
    Ping,
    Ready,
    Refused,
    Report,
    Resume,
    Sleep,
    ToEngine,
    Wake,
)


class EngineLoop:
    """Serves one channel with one engine."""

    def __init__(
        self,
        engine: NativeEngine,
        channel: WorkerChannel[ToEngine],
        report_every_s: float,
    ) -> None:
        self._engine, self._channel = engine, channel
        self._report_every_s = report_every_s
        self._reported_s = time.monotonic()
        self._outputs: list[GenerationOutput] = []
        self._aborted: list[str] = []
        self._paused = False
        self._receiver = WeightReceiver()

    def run(self) -> None:
        """Serve until the controller closes the channel."""
        while (messages := self._channel.receive(wait=self._rests())) is not None:
            for message in messages:
                self._handle(message)
            if not self._rests():
                self._outputs += self._engine.step()
            if time.monotonic() - self._reported_s >= self._report_every_s:
                self._outputs += self._engine.report()
                self._reported_s = time.monotonic()
            if self._outputs or self._aborted:
                self._report()

    def _rests(self) -> bool:
        return self._paused or self._engine.idle

    def _handle(self, message: ToEngine) -> None:
        match message:
            case GenerationRequest():
                self._engine.submit(message)
            case Abort(id=id):
                output = self._engine.abort(id)
                self._outputs += [output] if output else []
                self._aborted.append(id)
            case Load(weights=weights, link=link, kv=kv):
                self._load(weights, link, kv)
            case Pause() | Resume():
                self._paused = isinstance(message, Pause)
                self._outputs += self._engine.report()
                self._report()
                self._channel.send(Done())
            case Ping():
                self._channel.send(Alive())
            case Sleep():
                self._engine.sleep()
                give_memory_back()
                self._channel.send(Done())
            case Wake():
                self._engine.wake()
                self._channel.send(Done())

    def _load(self, weights: Weights, link: Link, kv: KV) -> None:
        tensors: dict[str, Tensor] = {}
        try:
            for part in self._receiver.parts(weights, link):
                tensors |= part
                self._channel.send(Alive())  # a transfer may take longer than the health check waits
            self._outputs += self._engine.load(tensors, version=weights.version, kv=kv)
        except (TransferFailed, WeightsRefused) as error:
            self._channel.send(Refused.of(error))
        except ValueError as why:
            self._channel.send(Refused.of(WeightsRefused(str(why))))
        else:
            self._report()
            self._channel.send(Done())

    def _report(self) -> None:
        self._channel.send(Report(self._outputs, self._aborted, self._engine.usage()))
        self._outputs, self._aborted = [], []


def main() -> None:
    end, job = begin(EngineJob)
    end_with_controller(end)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(ToEngine))
    with config_errors_sent(channel):
        scale = job.adapter.alpha / job.adapter.rank if job.adapter else None
        engine = NativeEngine.from_pretrained(job.model, job.engine, job.sampling, adapter_scale=scale)
    channel.send(Ready())
    EngineLoop(engine, channel, job.report_every_s).run()


if __name__ == "__main__":
    main()
