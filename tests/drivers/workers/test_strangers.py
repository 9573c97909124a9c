"""Connections to the port of a worker that say nothing: how many it keeps, and what they take from others."""

import asyncio
import os
import resource

import pytest

from helpers.flood import file_limit, flood, num_connections
from helpers.stand_in import StandInJob
from tailrace.drivers.workers.calls import HELLO_S, RemoteWorker
from tailrace.drivers.workers.engine import EngineWorker
from tailrace.drivers.workers.strangers import MAX_STRANGERS, Strangers, raise_file_limit
from tailrace.drivers.workers.wire import Hello
from tailrace.drivers.workers.worker import WorkerConnection
from tailrace.extras.cluster.join import JoinedProcess


async def test_a_flood_takes_no_descriptor_that_the_run_needs_and_keeps_no_worker_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = StandInJob(manner="obey")
    worker = RemoteWorker("engine-0", EngineWorker, job)
    address, token = await worker.listen("127.0.0.1")
    worker.watch(JoinedProcess(worker))
    with file_limit(150):
        async with flood(int(address[1]), 300):
            assert num_connections(int(address[1])) <= MAX_STRANGERS
            for each in [os.dup(0) for _ in range(50)]:
                os.close(each)
            employed = WorkerConnection.employed
            connection, found = await asyncio.to_thread(employed, address, Hello(token), StandInJob)
            await worker.connected()
    assert found == job
    connection.socket.close()
    await worker.close()
    assert caplog.records == []


async def test_a_stranger_for_whom_there_is_no_room_waits_until_the_oldest_has_had_its_time() -> None:
    class Line(asyncio.Transport):
        is_open = True

        def abort(self) -> None:
            self.is_open = False

    strangers = Strangers(HELLO_S, 0.05)
    lines = [Line() for _ in range(MAX_STRANGERS)]
    for line in lines:
        await strangers.room()
        strangers.add(line)
        strangers.add(line)
    room = asyncio.create_task(strangers.room())
    await asyncio.sleep(0)
    assert not room.done() and lines[0].is_open
    await room
    assert [line.is_open for line in lines[:2]] == [False, True]
    assert len(strangers) == MAX_STRANGERS - 1
    for line in lines:
        strangers.remove(line)


def test_the_limit_of_descriptors_is_raised_as_far_as_it_may() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with file_limit(50):
        assert raise_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
