"""The controller's half of a connection in a test, over a pair of sockets, without an event loop."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tailrace.drivers.workers.wire import EVENT, UNANSWERED, Frames, decode_reply, frame, outcome_of
from tailrace.drivers.workers.worker import Worker, WorkerConnection
from tailrace.errors import TailraceError


class Controller:
    """Calls methods of a worker of some kind, and decodes what it says."""

    def __init__(self, own: socket.socket, kind: type[Worker]) -> None:
        self._socket, self._frames = own, Frames()
        self._events = {each.__name__: each for each in kind.events}
        self._methods: list[Callable[..., Any]] = []

    def call(self, method: Callable[..., Any], *arguments: object, answered: bool = True) -> None:
        self._methods += [method] if answered else []
        number = len(self._methods) if answered else UNANSWERED
        self._socket.sendall(frame(number, method.__name__, arguments))

    def heard(self) -> list[Any]:
        """What has arrived, at least something: events, results and errors."""
        found: list[Any] = []
        while not found:
            for each in map(decode_reply, self._frames.feed(self._socket.recv(1 << 18))):
                if each.number == EVENT:
                    found.append(msgspec.msgpack.decode(each.content, type=self._events[each.kind]))
                else:
                    found.append(outcome_of(each, self._methods[each.number - 1]))
        return found

    def until(self, num_answers: int) -> list[Any]:
        """What arrives until so many calls are answered."""
        found: list[Any] = []
        while sum(each is None or isinstance(each, TailraceError) for each in found) < num_answers:
            found += self.heard()
        return found

    def finish(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)


@contextmanager
def connected(kind: type[Worker]) -> Iterator[tuple[Controller, WorkerConnection]]:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield Controller(mine, kind), WorkerConnection(theirs)
