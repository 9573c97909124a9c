"""The released versions that the fakes speak, and how they differ beyond their schemas."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Generation:
    """One released version. The defaults are those of the newest.

    Args:
        rejects_while_paused: new requests get 503 under pause(abort) and pause(wait).
        flush_ignores_waiting: a paused server flushes its cache though requests wait.
        flush_asserts: a flush that fails after an update ends the server.
    """

    server: Literal["vllm", "sglang"]
    version: str
    rejects_while_paused: bool = True
    flush_ignores_waiting: bool = True
    flush_asserts: bool = False


GENERATIONS = {
    "vllm-0.32": Generation("vllm", "0.32.0", rejects_while_paused=False),
    "vllm-0.33": Generation("vllm", "0.33.0"),
    "sglang-0.5.20": Generation("sglang", "0.5.20", flush_ignores_waiting=False, flush_asserts=True),
    "sglang-0.5.21": Generation("sglang", "0.5.21", flush_asserts=True),
    "sglang-0.5.23": Generation("sglang", "0.5.23"),
}
