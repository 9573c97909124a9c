"""Channels: typed messages over a socket between the controller and one worker process.

A frame is a length (4 bytes, little-endian) and a msgpack message of one closed union. The
controller's end never blocks the event loop: messages sent in one tick of the loop are written in one
system call, and all that has arrived is handled in one wake-up. The worker's end can block or poll.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

In = TypeVar("In")

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18

_encoder = msgspec.msgpack.Encoder()


def _frame(message: msgspec.Struct) -> bytes:
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class _Reassembly(Generic[In]):
    """Cuts a stream of bytes back into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[In]) -> None:
        self._decoder = decoder
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[In]:
        """Yield the messages that `data` completes; the caller must exhaust the iterator."""
        self._bytes += data
        start = 0
        while (body := start + _LENGTH.size) <= len(self._bytes):
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if body + length > len(self._bytes):
                break
            yield self._decoder.decode(self._bytes[body : body + length])
            start = body + length
        del self._bytes[:start]


class ControllerChannel:
    """The controller's end, on the running event loop.

    Args:
        on_message: called with each message, in order.
        on_defect: called with the exception when a message could not be decoded or handled.
    """

    def __init__(
        self,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        on_message: Callable[[msgspec.Struct], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._reassembly = _Reassembly(decoder)
        self._on_message, self._on_defect = on_message, on_defect
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self.read)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; it is written at the end of this tick of the loop."""
        frame = _frame(message)  # may raise
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += frame

    def read(self) -> None:
        """Handle all messages that have arrived; stop reading once the worker's end is closed."""
        try:
            while data := self._socket.recv(_READ_BYTES):
                for message in self._reassembly.feed(data):
                    self._on_message(message)
                if len(data) < _READ_BYTES:
                    return
        except (BlockingIOError, ConnectionResetError):
            return
        except Exception as defect:
            self._on_defect(defect)
        self._loop.remove_reader(self._socket)

    def finish(self) -> None:
        """Shut down for writing: the worker ends after its current request."""
        with suppress(OSError):  # the worker has ended already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; unsent messages are lost."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()

    def _flush(self) -> None:
        if not self._unsent:
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # the watcher of the process reports it
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)


class WorkerChannel(Generic[In]):
    """The worker's end."""

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[In]) -> None:
        end.setblocking(True)
        self._socket = end
        self._reassembly = _Reassembly(decoder)
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; blocks until it is written. Any thread may call it."""
        frame = _frame(message)
        with self._sending:
            self._socket.sendall(frame)

    def receive(self, *, wait: bool) -> list[In] | None:
        """Return the messages that have arrived.

        Args:
            wait: block until there is at least one.

        Returns:
            None when the controller will send no more.
        """
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            except ConnectionResetError:
                return None
            if not data:
                return None
            if messages := list(self._reassembly.feed(data)):
                return messages

    def __iter__(self) -> Iterator[In]:
        """Yield each message as it arrives, until the controller will send no more."""
        while (messages := self.receive(wait=True)) is not None:
            yield from messages
