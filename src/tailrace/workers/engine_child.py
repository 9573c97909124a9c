"""The engine's process: a loop that listens, decodes one step, and reports.

Requests that end are reported as soon as they are a quarter of what runs, or have waited for a few
milliseconds: each report wakes the controller. Running ones are reported every `report_every_s`, before
a load, and when they are aborted. With nothing to do it sleeps in the socket.
"""

import time
from collections.abc import Sequence

import msgspec

from tailrace.engine.native.engine import Delta, NativeEngine, Request
from tailrace.weights.shared_memory import read_weights
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.counter import TokenCounter
from tailrace.workers.messages import (
    Abort,
    CheckIntegrity,
    Done,
    EngineJob,
    Gained,
    Generate,
    Load,
    Ready,
    Report,
    Settle,
    ToEngine,
)

ENOUGH = 1 / 4
"""Of what runs: so many that ended are worth a report."""
HELD_BACK_S = 0.02
"""The longest that one that ended waits for others."""


class EngineLoop:
    """Drives one engine from one channel."""

    def __init__(
        self,
        engine: NativeEngine,
        channel: WorkerChannel[ToEngine],
        report_every_s: float,
        counter: TokenCounter | None = None,
    ) -> None:
        self._engine, self._channel, self._counter = engine, channel, counter
        self._report_every_s = report_every_s
        self._reported_s = time.monotonic()
        self._gained_s = 0.0
        """Since when what was gained waits for a report."""
        self._gained: list[Gained] = []
        self._aborted: list[str] = []

    def run(self) -> None:
        """Serve until the controller says no more."""
        while (messages := self._channel.receive(wait=self._engine.idle)) is not None:
            for message in messages:
                self._obey(message)
            if not self._engine.idle:
                self._gain(self._engine.step())
                if self._counter is not None:
                    self._counter.set(self._engine.num_generated)
            if time.monotonic() - self._reported_s >= self._report_every_s:
                self._gain(self._engine.report())
                self._reported_s = time.monotonic()
            if self._is_due():
                self._report()

    def _is_due(self) -> bool:
        if self._aborted or not self._gained:
            return bool(self._aborted)
        enough = len(self._gained) >= ENOUGH * self._engine.num_running
        return enough or time.monotonic() - self._gained_s >= HELD_BACK_S

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Generate(id=id, prompt_ids=prompt_ids, completion_ids=completion_ids, seed=seed):
                self._engine.submit(Request(id, prompt_ids, completion_ids, seed))
            case Abort(id=id):
                delta = self._engine.abort(id)
                self._gain([delta] if delta else [])
                self._aborted.append(id)
            case Load(weights=weights, kv=kv):
                tensors = read_weights(weights)
                self._gain(self._engine.load(tensors, version=weights.version, kv=kv))
                self._answer()
            case CheckIntegrity():
                self._engine.check_integrity()
                self._answer()
            case Settle():
                self._gain(self._engine.report())
                self._answer()

    def _gain(self, deltas: Sequence[Delta]) -> None:
        if deltas and not self._gained:
            self._gained_s = time.monotonic()
        self._gained += (Gained(d.id, d.ids, d.logprobs, d.version, d.finish_reason) for d in deltas)

    def _report(self) -> None:
        self._channel.send(Report(self._gained, self._aborted, self._engine.usage()))
        self._gained, self._aborted = [], []

    def _answer(self) -> None:
        self._report()
        self._channel.send(Done())


def main() -> None:
    end, job = begin(EngineJob)
    end_with_controller(end)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(ToEngine))
    with config_errors_sent(channel):
        engine = NativeEngine.from_pretrained(job.model, job.engine, job.sampling)
    channel.send(Ready())
    counter = TokenCounter(job.count) if job.count else None
    EngineLoop(engine, channel, job.report_every_s, counter).run()


if __name__ == "__main__":
    main()
