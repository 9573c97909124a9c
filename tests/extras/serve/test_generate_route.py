"""/inference/v1/generate: tokens in, tokens out, as vLLM has it; and what many streams at once need."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest
import renderers.client
from renderers.default import DefaultRenderer
from serve_cases import CHAT_TEMPLATE, CONTEXT, MODEL_NAME, generated

from helpers.tiny_models import LETTERS, letter_tokenizer

PROMPT = [3, 4, 5, 6]
NUM_STREAMS, NUM_TOKENS = 256, 32


def generate(http, *, num_tokens=8, **fields):
    sampling = {"max_tokens": num_tokens, **fields.pop("sampling_params", {})}
    reply = http.post(
        "/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling, **fields}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def events_of(lines):
    """The events of a stream without the end, which must be there."""
    *events, end = [line.removeprefix("data: ") for line in lines if line]
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_reply_has_ids_logprobs_under_both_keys_and_versions(http, native):
    (expected,) = generated(native, [PROMPT], 8, seed=2)
    reply = generate(
        http,
        request_id="mine",
        cache_salt="v1",
        sampling_params={"seed": 2, "logprobs": 1},
        return_token_ids=True,
    )
    assert (reply["request_id"], reply["model"], reply["output_mode"]) == ("mine", MODEL_NAME, "tokens")
    assert reply["prompt_token_ids"] == PROMPT
    (choice,) = reply["choices"]
    assert choice["token_ids"] == expected.ids
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    (span,) = choice["weight_versions"]
    assert (span["start"], span["end"]) == (0, 8)
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == expected.ids
    assert [entry["token"] for entry in entries] == [f"token_id:{id}" for id in expected.ids]
    assert [e["logprob"] for e in entries] == pytest.approx(expected.behavior_logprobs, abs=1e-5)
    for entry in entries:
        assert [each["token_id"] for each in entry["top_logprobs"]] == [entry["token_id"]]


def test_without_a_limit_the_context_is_filled(http):
    reply = http.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": {}}).json()
    assert len(reply["choices"][0]["token_ids"]) == CONTEXT - len(PROMPT)


def test_logprobs_come_only_when_asked_for(http):
    assert generate(http)["choices"][0]["logprobs"] is None


def test_a_renderers_client_parses_the_reply(url, native):
    (expected,) = generated(native, [PROMPT], 8, seed=3)

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await renderers.client.generate(
                client=client,
                renderer=DefaultRenderer(letter_tokenizer(CHAT_TEMPLATE)),
                messages=[{"role": "user", "content": "".join(LETTERS[id] for id in PROMPT)}],
                model=MODEL_NAME,
                sampling_params={"max_tokens": 8, "seed": 3},
                cache_salt="3",
                extra_headers={"X-Session-ID": "trace"},
            )

    reply = asyncio.run(ask())
    assert (reply["prompt_ids"], reply["completion_ids"]) == (PROMPT, expected.ids)
    assert reply["completion_logprobs"] == pytest.approx(expected.behavior_logprobs, abs=1e-5)
    assert reply["content"] == "".join(LETTERS[id] for id in expected.ids)
    assert reply["finish_reason"] == "length"


def test_256_streams_at_once_get_all_their_tokens(url, native):
    prompts = [[number % 61, 7, number // 61] for number in range(NUM_STREAMS)]
    expected = generated(native, prompts, NUM_TOKENS)

    async def stream(client, number):
        sampling = {"max_tokens": NUM_TOKENS, "seed": number, "logprobs": 1}
        body = {"token_ids": prompts[number], "stream": True, "sampling_params": sampling}
        async with client.stream("POST", "/inference/v1/generate", json=body) as reply:
            assert reply.status_code == 200
            events = events_of([line async for line in reply.aiter_lines()])
        choices = [choice for event in events for choice in event["choices"]]
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        assert choices[-1]["finish_reason"] == "length"
        assert [entry["token_id"] for entry in entries] == [
            id for choice in choices for id in choice["token_ids"]
        ]
        return [entry["token_id"] for entry in entries], [entry["logprob"] for entry in entries]

    async def all_streams():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(NUM_STREAMS)))

    found = asyncio.run(all_streams())
    assert [ids for ids, _ in found] == [output.ids for output in expected]
    for (_, logprobs), output in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(output.behavior_logprobs, abs=1e-4)


def running(http):
    """The requests that the engine works on."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_"))


@pytest.mark.parametrize("route", ["/abort_requests", "/inference/v1/abort_requests"])
@pytest.mark.parametrize("name", ["long", "generate-tokens-long"])
def test_an_aborted_request_ends_with_the_tokens_it_has(http, route, name):
    body = {"token_ids": PROMPT, "stream": True, "request_id": "long", "sampling_params": {"max_tokens": 500}}
    body["sampling_params"]["logprobs"] = 1
    with http.stream("POST", "/inference/v1/generate", json=body) as reply:
        lines = reply.iter_lines()
        received = [next(lines)]
        assert http.post(route, json={"request_ids": [name]}).status_code == 200
        events = events_of([*received, *lines])
    choices = [event["choices"][0] for event in events]
    ids = [id for choice in choices for id in choice["token_ids"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["abort"]
    assert 0 < len(ids) < 500
    assert [(span["start"], span["end"]) for span in choices[-1]["weight_versions"]] == [(0, len(ids))]


@pytest.mark.parametrize("stream", [False, True])
def test_the_requests_of_a_client_that_has_gone_are_aborted(url, http, stream):
    sampling = {"max_tokens": 508, "n": 64}
    body = {"token_ids": PROMPT, "stream": stream, "sampling_params": sampling}
    asked = http.build_request("POST", "/inference/v1/generate", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
    deadline = time.monotonic() + 60
    with socket.create_connection((asked.url.host, asked.url.port)) as client:
        client.sendall(f"POST {asked.url.path} HTTP/1.1\r\n{head}\r\n".encode() + asked.content)
        while not running(http) and time.monotonic() < deadline:
            time.sleep(0.01)
    while running(http) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(http) == 0
    before = http.get("/metrics").text
    assert "vllm:generation_tokens_total" in before


def test_a_stream_begins_with_the_prompt_and_ends_with_the_numbers_of_tokens(http):
    body = {
        "token_ids": PROMPT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "sampling_params": {"max_tokens": 5, "n": 2, "seed": 1},
    }
    with http.stream("POST", "/inference/v1/generate", json=body) as reply:
        events = events_of(list(reply.iter_lines()))
    assert events[0]["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in event for event in events[1:])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}
