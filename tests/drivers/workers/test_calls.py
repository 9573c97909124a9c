"""Calls over a connection: whole and in order, whatever pieces the bytes come in, and only with the token."""

import asyncio
import math
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.wire import connected
from tailrace import errors
from tailrace.drivers.workers.calls import HELLO_S, Channel, RemoteWorker
from tailrace.drivers.workers.wire import END, START, STARTED, UNANSWERED, Hello, RaisedError, frame
from tailrace.drivers.workers.worker import BatchWorker, Job, Worker, WorkerConnection, batched
from tailrace.errors import ConfigError, RewardFailed, ServerRefused, TransferFailed, WorkerDied
from tailrace.extras.cluster.join import JoinedProcess

WORDS = [frame(UNANSWERED, "say", [word]) for word in ("1.0/2", "3.0/4")]


class Noticed(msgspec.Struct):
    what: str


class Clerk(Worker):
    events = (Noticed,)

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, word: str) -> None:
        self.said.append(word)

    def divide(self, dividend: float, divisor: float) -> float:
        if divisor == 0:
            raise TransferFailed("by zero")
        return dividend / divisor

    def size(self, words: list[str]) -> int:
        return len(words)


class Roots(BatchWorker):
    def __init__(self) -> None:
        self.batches: list[list[float]] = []

    @batched
    def root(self, numbers: list[float]) -> Iterable[float | RewardFailed]:
        self.batches.append(numbers)
        return [math.sqrt(each) if each >= 0 else RewardFailed("negative", str(each)) for each in numbers]


def test_calls_cut_anywhere_arrive_whole() -> None:
    sent = b"".join(WORDS)
    for cut in range(len(sent) + 1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            connection = WorkerConnection(theirs)
            ours.sendall(sent[:cut])
            received = list(connection.receive(wait=False) or [])
            ours.sendall(sent[cut:])
            received += connection.receive(wait=False) or []
            assert [msgspec.msgpack.decode(call.arguments) for call in received] == [["1.0/2"], ["3.0/4"]], (
                cut
            )


def test_nothing_there_is_not_the_end_and_the_end_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = WorkerConnection(theirs)
        assert connection.receive(wait=False) == []
        ours.sendall(WORDS[0])
        ours.close()
        assert [call.method for call in connection.receive(wait=True) or ()] == ["say"]
        assert connection.receive(wait=True) is None
        assert list(connection) == []


def test_the_last_calls_before_the_controller_lets_go_are_executed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = WorkerConnection(theirs)
        ours.sendall(WORDS[0] + 2 * frame(UNANSWERED, "end", []))
        assert [call.method for call in connection.receive(wait=True) or ()] == ["say"]
        assert connection.receive(wait=True) is None


def test_calls_that_have_arrived_together_are_one_batch_and_each_has_its_own_failure() -> None:
    with connected(Roots) as (controller, connection):
        roots = Roots()
        for number in (4.0, -1.0, 9.0):
            controller.call(Roots.root, number)
        controller.finish()
        roots.serve(connection)
        two, negative, three = controller.heard()
    assert roots.batches == [[4.0, -1.0, 9.0]]
    assert (two, three, negative.reason, negative.detail) == (2.0, 3.0, "negative", "-1.0")


def test_a_method_answers_with_its_result_or_its_error() -> None:
    with connected(Clerk) as (controller, connection):
        controller.call(Clerk.divide, 1.0, 0.0)
        controller.call(Clerk.divide, 1.0, 4.0)
        controller.finish()
        Clerk().serve(connection)
        error, quarter = controller.heard()
    assert (type(error), str(error), quarter) == (TransferFailed, "by zero", 0.25)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("model.path", Path("/nowhere"), "there is no such folder", "write another"),
        RewardFailed("raised", "KeyError", is_defect=True),
        ServerRefused("GET /", 500, "no"),
        errors.RewardBroken(3, "first"),
        errors.WeightsRefused("1 of another shape"),
    ],
)
def test_an_error_travels_as_what_it_was_made_of(error: errors.TailraceError) -> None:
    data = msgspec.msgpack.encode(RaisedError.of(error))
    again = msgspec.msgpack.decode(data, type=RaisedError).error(type(error).__name__)
    assert type(again) is type(error)
    assert str(again) == str(error).replace(repr(Path("/nowhere")), repr("/nowhere"))
    attributes = {key: str(value) for key, value in vars(error).items() if key != "arguments"}
    assert {key: str(value) for key, value in vars(again).items() if key != "arguments"} == attributes


REFUSAL = frame(UNANSWERED, END, ())


async def listening(host: str | None = "127.0.0.1") -> tuple[RemoteWorker, Any, str]:
    worker = RemoteWorker("clerk", Clerk, Job(threads=3))
    address, token = await worker.listen(host)
    worker.watch(JoinedProcess(worker))
    return worker, address, token


@pytest.mark.parametrize("host", ["127.0.0.1", None])
async def test_a_message_larger_than_the_sockets_buffer_does_not_block_the_loop(host: str | None) -> None:
    worker, address, token = await listening(host)
    connection = WorkerConnection.dial(address, Hello(token))
    big = worker.begin(Clerk.size, ["word"] * 1_000_000)
    worker.send(Clerk.say, "after it")
    received = []
    while len(received) < 3:
        await asyncio.sleep(0)
        received += connection.receive(wait=False) or []
    job, size, said = received
    assert (job.number, job.method, said.method) == (STARTED, START, "say")
    (text,) = msgspec.msgpack.decode(job.arguments)
    assert Job.model_validate_json(text) == Job(threads=3)
    connection.answer(STARTED, None)
    connection.tell(Noticed("a fly"))
    noticed: list[Noticed] = []
    connection.execute(Clerk(), size)
    await worker.ready()
    worker.subscribe(noticed.append)  # it came before
    assert await big == 1_000_000
    assert noticed == [Noticed("a fly")]
    connection.socket.close()
    with pytest.raises(WorkerDied, match=r"clerk \(joined from 127\.0\.0\.1\) has ended"):
        await worker.call(Clerk.size, [])


@pytest.mark.parametrize(
    "first",
    [frame("0" * 64, ""), frame("", ""), frame(7), b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n"],
    ids=["another token", "no token", "no hello", "a long frame", "http"],
)
async def test_a_connection_without_the_token_is_closed_and_the_worker_still_comes(first: bytes) -> None:
    worker, address, token = await listening()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(first)
    with suppress(ConnectionResetError):
        assert await reader.read() in (b"", REFUSAL)
    writer.close()
    connection = WorkerConnection.dial(address, Hello(token))
    await worker.connected()
    with pytest.raises(ConnectionRefusedError):
        WorkerConnection.dial(address, Hello(token))
    connection.socket.close()
    await worker.exit_reason()


def test_a_worker_that_is_closed_without_a_word_dials_again_and_one_that_is_refused_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as controller, ThreadPoolExecutor(1) as thread:
        for num_closed, answer in ((3, frame(STARTED, START, (Job().model_dump_json(),))), (1, REFUSAL)):
            address = controller.getsockname()[:2]
            dialling = thread.submit(WorkerConnection.employed, address, Hello("a token"), Job)
            for _ in range(num_closed):
                controller.accept()[0].close()
            connection, _ = controller.accept()
            connection.sendall(answer)
            if answer != REFUSAL:
                own, job = dialling.result(timeout=60)
                assert job == Job()
                own.socket.close()
            else:
                with pytest.raises(SystemExit, match="does not know the token"):
                    dialling.result(timeout=60)
            connection.close()


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.drivers.workers.calls.HELLO_S", 0.05)
    greeted: list[Hello] = []
    over = asyncio.get_running_loop().create_future()
    note = lambda channel, hello: greeted.append(hello)  # noqa: E731
    server = Channel.listen(note, over, [socket.create_server(("127.0.0.1", 0))])
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    assert await reader.read() == b""
    writer.close()
    server.close()
    assert greeted == []


async def test_a_connection_is_closed_when_no_worker_is_awaited_any_more() -> None:
    worker, address, _ = await listening()
    reader, writer = await asyncio.open_connection(*address)
    await asyncio.sleep(0.01)  # it is accepted, and says nothing
    worker.expect_no_more()
    async with asyncio.timeout(HELLO_S / 2):
        assert await reader.read() == b""
    writer.close()
