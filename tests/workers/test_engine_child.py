"""What the engine's loop says, and when."""

import math
import socket
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from tailrace.engine.base import EngineSettings, SamplingSettings
from tailrace.engine.native.engine import NativeEngine
from tailrace.workers import engine_child
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.engine_child import ENOUGH, EngineLoop
from tailrace.workers.messages import FromEngine, Generate, Report, ToEngine

LIMIT = 40


def reports_of(model: Path, num_requests: int) -> list[Report]:
    """All that the loop reports of requests of which each has one token more left than the one before."""
    torch.set_num_threads(1)
    engine = NativeEngine.from_pretrained(
        model, EngineSettings(max_running=num_requests), SamplingSettings(max_completion_tokens=LIMIT)
    )
    mine, theirs = socket.socketpair()
    with mine, theirs:
        return heard(engine, mine, theirs, num_requests)


def heard(
    engine: NativeEngine, mine: socket.socket, theirs: socket.socket, num_requests: int
) -> list[Report]:
    controller = WorkerChannel(mine, msgspec.msgpack.Decoder(FromEngine))
    loop = EngineLoop(
        engine, WorkerChannel(theirs, msgspec.msgpack.Decoder(ToEngine)), report_every_s=math.inf
    )
    for number in range(num_requests):
        controller.send(Generate(str(number), [5, 6, 7], [9] * (LIMIT - 1 - number), number))
    thread = threading.Thread(target=loop.run)
    thread.start()
    reports: list[Report] = []
    while sum(len(report.gained) for report in reports) < num_requests:
        reports += [m for m in controller.receive(wait=True) or () if isinstance(m, Report)]
    mine.shutdown(socket.SHUT_WR)
    thread.join()
    return reports


def test_what_ends_waits_for_others_until_it_is_a_share_of_what_runs(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_child, "HELD_BACK_S", math.inf)
    reports = reports_of(model_path, 32)
    ended = [gained.id for report in reports for gained in report.gained]
    assert sorted(ended, key=int) == [str(number) for number in range(32)]
    assert all(gained.finish_reason for report in reports for gained in report.gained)
    assert all(len(report.gained) >= ENOUGH * report.usage.num_running for report in reports)
    assert len(reports[0].gained) > 1
    assert reports[-1].usage.num_running == 0


def test_what_ends_is_not_held_back_for_long(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_child, "HELD_BACK_S", 0.0)
    assert len(reports_of(model_path, 32)[0].gained) == 1
