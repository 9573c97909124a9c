"""The released versions that the fakes speak, and how they differ beyond their schemas."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Generation:
    """One released version. The defaults are those of the newest.

    Args:
        streams_generate: /inference/v1/generate streams; older servers answer such a request as a whole.
        ends_aborted_streams: the last event of an aborted stream says so; older servers just end the stream.
        names_tokens: how the log-probs of /inference/v1/generate name their token.
        has_spans: the last event of a generation has the versions of its tokens.
        hides_generate: /inference/v1/generate exists only with --enable-scale-out.
        starts_with_body: /start_weight_update parses a body.
        rejects_while_paused: new requests get 503 under pause(abort) and pause(wait).
        flush_ignores_waiting: a paused server flushes its cache though requests wait.
        flush_asserts: a flush that fails after an update ends the server.
    """

    server: Literal["vllm", "sglang"]
    version: str
    streams_generate: bool = True
    ends_aborted_streams: bool = True
    names_tokens: Literal["token_id", "token"] = "token_id"
    has_spans: bool = True
    hides_generate: bool = True
    starts_with_body: bool = False
    rejects_while_paused: bool = True
    flush_ignores_waiting: bool = True
    flush_asserts: bool = False


_OLD = {
    "names_tokens": "token",
    "has_spans": False,
    "rejects_while_paused": False,
    "ends_aborted_streams": False,
}
GENERATIONS = {
    "vllm-0.18": Generation("vllm", "0.18.1", streams_generate=False, hides_generate=False, **_OLD),
    "vllm-0.22": Generation("vllm", "0.22.0", starts_with_body=True, hides_generate=False, **_OLD),
    "vllm-0.26": Generation("vllm", "0.26.0", hides_generate=False, **_OLD),
    "vllm-0.28": Generation("vllm", "0.28.0", hides_generate=False, **_OLD),
    "vllm-0.30": Generation("vllm", "0.30.0", **_OLD),
    "vllm-0.32": Generation("vllm", "0.32.0", rejects_while_paused=False),
    "vllm-0.33": Generation("vllm", "0.33.0"),
    "sglang-0.5.20": Generation("sglang", "0.5.20", flush_ignores_waiting=False, flush_asserts=True),
    "sglang-0.5.21": Generation("sglang", "0.5.21", flush_asserts=True),
    "sglang-0.5.23": Generation("sglang", "0.5.23"),
}
