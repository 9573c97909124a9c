"""Messages over a socket, whole and in order, whatever pieces the bytes come in."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.engine.base import GenerationRequest
from tailrace.workers.channel import ControllerChannel, WorkerChannel
from tailrace.workers.messages import Abort, Done, ToEngine

Execute = Callable[[Any], Any]
DECODER = msgspec.msgpack.Decoder(ToEngine)
BIG = GenerationRequest("big", list(range(1_000_000)), [], seed=1)


def frame(message: msgspec.Struct) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        WorkerChannel(ours, DECODER).send(message)
        return theirs.recv(1 << 16)


def test_messages_cut_anywhere_arrive_whole() -> None:
    sent = frame(Abort("1.0/2")) + frame(Abort("3.0/4"))
    for cut in range(len(sent) + 1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = WorkerChannel(theirs, DECODER)
            ours.sendall(sent[:cut])
            received = list(channel.receive(wait=False) or [])
            ours.sendall(sent[cut:])
            received += channel.receive(wait=False) or []
            assert received == [Abort("1.0/2"), Abort("3.0/4")], cut


def test_nothing_there_is_not_the_end_and_the_end_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = WorkerChannel(theirs, DECODER)
        assert channel.receive(wait=False) == []
        ours.sendall(frame(Abort("1.0/2")))
        ours.close()
        assert channel.receive(wait=True) == [Abort("1.0/2")]
        assert channel.receive(wait=True) is None
        assert list(channel) == []


def test_a_message_larger_than_the_sockets_buffer_does_not_block_the_loop(execute: Execute) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        answered = asyncio.Event()
        messages: list[msgspec.Struct] = []

        def on_message(message: msgspec.Struct) -> None:
            messages.append(message)
            answered.set()

        channel = ControllerChannel(ours, msgspec.msgpack.Decoder(Done), on_message, lambda defect: None)
        with theirs:
            worker = WorkerChannel(theirs, DECODER)
            channel.send(BIG)
            channel.send(Abort("after it"))
            await asyncio.sleep(0)
            received: list[ToEngine] = []
            while len(received) < 2:
                await asyncio.sleep(0)
                received += worker.receive(wait=False) or []
            assert received == [BIG, Abort("after it")]
            worker.send(Done())
            await answered.wait()
            assert messages == [Done()]
        channel.close()

    execute(main())
