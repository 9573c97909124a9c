"""What clients of a server send, and what an engine in this process generates for the same requests."""

from collections.abc import Sequence

import httpx

from tailrace.contracts.engine import GenerationOutput, GenerationRequest
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.types import SamplingParams

MODEL_NAME = "tiny"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CONTEXT = 512
"""Tokens of the model's context."""


def update(http: httpx.Client, info: dict[str, object], label: str) -> None:
    """Load weights as a client of vLLM does."""
    for route, body in (
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": info}),
        ("/finish_weight_update", {"weight_version": label}),
    ):
        reply = http.post(route, json=body)
        assert reply.status_code == 200, reply.text


def restore(http: httpx.Client) -> None:
    """Bring a server to the state of its start."""
    assert http.post("/resume").json() == {"status": "resumed"}
    http.post("/finish_weight_update")
    http.post("/init_weight_transfer_engine", json={"init_info": {}})
    update(http, {"location": "old"}, "default")


def generated(
    engine: NativeEngine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    seed: int = 0,
    greedy: bool = False,
    **params: object,
) -> list[GenerationOutput]:
    """What the engine generates; the seeds of the prompts follow one another."""
    sampling = SamplingParams(num_tokens, **params)  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(str(number), prompt, (), seed + number, greedy, sampling))
    ended: dict[str, GenerationOutput] = {}
    while not engine.idle:
        ended |= {output.id: output for output in engine.step()}
    return [ended[str(number)] for number in range(len(prompts))]
