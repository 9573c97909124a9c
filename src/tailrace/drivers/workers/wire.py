"""Frames between the controller and its workers, and the types of what is in them.

A frame is a length (4 bytes, little-endian) and a msgpack array:

    first frame of a worker    token, role
    to the worker              number of the call, name of the method, arguments
    from the worker            number of the call, "", result
                               number of the call, name of an error, its arguments
                               EVENT, name of an event, the event
"""

import socket
import struct
from collections.abc import Callable, Iterator
from functools import cache
from inspect import signature
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from tailrace import errors
from tailrace.errors import TailraceError

START, END = "start", "end"
"""Names of the first call, and of the one with which the controller lets a worker end."""
STARTED, UNANSWERED, EVENT = 0, -1, -1
"""Numbers: of the first call, of a call that is not answered, of a message that answers none."""
MAX_BYTES = 2**32 - 1
"""Limit of the bytes of a frame."""
_LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 18
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that is lost is noticed within 30 seconds."""

encode = msgspec.msgpack.Encoder().encode


SocketAddress = str | tuple[str, int]
"""A Unix socket of this host, or host and port."""


class MethodCall(NamedTuple):
    """A method that a worker was asked for."""

    number: int
    method: str
    arguments: msgspec.Raw


class MethodReply(NamedTuple):
    """An answer or an event, as the worker sends it."""

    number: int
    kind: str
    content: msgspec.Raw


class Hello(NamedTuple):
    """The first frame of a worker. `role`: of a worker that joins; empty for one that was started for its
    token."""

    token: str
    role: str = ""


class RaisedError(msgspec.Struct, array_like=True):
    """The arguments of an error of errors.py."""

    arguments: list[str | int | float | bool | None]
    named: dict[str, str | int | float | bool | None]

    @classmethod
    def of(cls, error: TailraceError) -> "RaisedError":
        return cls([_plain(each) for each in error.arguments], {k: _plain(v) for k, v in error.named.items()})

    def error(self, kind: str) -> TailraceError:
        error = getattr(errors, kind)(*self.arguments, **self.named)
        assert isinstance(error, TailraceError), kind
        return error


def _plain(value: object) -> str | int | float | bool | None:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


decode_call = msgspec.msgpack.Decoder(MethodCall).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_raised = msgspec.msgpack.Decoder(RaisedError).decode
decode_reply = msgspec.msgpack.Decoder(MethodReply).decode


class Frames:
    """Cuts a stream of bytes into frames. `max_bytes`: of a frame."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytearray]:
        """Yield the frames that `data` completes. The caller must exhaust the iterator. Raises a ValueError
        if a frame is too long."""
        self._bytes += data
        start = 0
        while (body := start + _LENGTH.size) <= len(self._bytes):
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if length > self.max_bytes:
                raise ValueError(f"a frame of {length} bytes")
            if body + length > len(self._bytes):
                break
            yield self._bytes[body : body + length]
            start = body + length
        del self._bytes[:start]


def frame(*parts: object) -> bytes:
    """Return a frame with an array of values."""
    payload = encode(parts)
    return _LENGTH.pack(len(payload)) + payload


class MethodTypes(NamedTuple):
    """The types of a method, as decoders."""

    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Any]


@cache
def signature_of(method: Callable[..., Any]) -> MethodTypes:
    """Return the types of one call of a method."""
    hints = get_type_hints(method)
    parameters = [hints[name] for name in signature(method).parameters if name != "self"]
    result = hints["return"]
    if hasattr(method, "is_batched"):
        parameters, (result,) = list(get_args(parameters[0])), get_args(result)
        if get_origin(result) is UnionType:  # results or errors
            kinds = [each for each in get_args(result) if isinstance(each, type)]
            (result,) = {*get_args(result)} - {each for each in kinds if issubclass(each, TailraceError)}
    arguments: Any = tuple[*parameters]  # type: ignore[valid-type]
    return MethodTypes(msgspec.msgpack.Decoder(arguments), msgspec.msgpack.Decoder(result))


def outcome_of(reply: MethodReply, method: Callable[..., Any]) -> Any:
    """Return the result of a method, or the error that it raised."""
    if reply.kind:
        return _decode_raised(reply.content).error(reply.kind)
    return signature_of(method).result.decode(reply.content)


def start(job: str) -> None:
    """The types of the first call."""


def set_options(own: socket.socket) -> None:
    """Send at once, and notice a host that is lost."""
    if own.family == socket.AF_UNIX:
        return
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
