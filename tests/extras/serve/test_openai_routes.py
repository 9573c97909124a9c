"""/v1/completions and /v1/chat/completions, through the official client."""

import openai
import pytest
from serve_cases import CONTEXT, MODEL_NAME, generated

from helpers.tiny_models import LETTERS

PROMPT = [3, 4, 5, 6]
TEXT = "".join(LETTERS[id] for id in PROMPT)


def letters(ids) -> str:
    return "".join(LETTERS[id] for id in ids)


def test_a_greedy_completion_is_the_engines(client, native):
    (expected,) = generated(native, [PROMPT], 20, greedy=True)
    for prompt in (PROMPT, TEXT):
        reply = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=20, temperature=0)
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason) == (letters(expected.ids), "length")
        usage = reply.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 20, 24)


def test_samples_of_a_prompt_have_the_seeds_that_follow_the_first(client, native):
    expected = generated(native, [PROMPT] * 3, 12, seed=7, temperature=0.7, top_k=9, top_p=0.9)
    reply = client.completions.create(
        model=MODEL_NAME,
        prompt=[PROMPT],
        max_tokens=12,
        temperature=0.7,
        top_p=0.9,
        n=3,
        seed=7,
        extra_body={"top_k": 9, "return_token_ids": True},
    )
    assert [choice.index for choice in reply.choices] == list(range(3))
    assert [choice.token_ids for choice in reply.choices] == [output.ids for output in expected]
    assert [choice.prompt_token_ids for choice in reply.choices] == [PROMPT] * 3


def test_unseeded_samples_differ(client):
    reply = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=20, n=8)
    assert len({choice.text for choice in reply.choices}) == 8


def test_logprobs_of_a_completion_are_the_engines(client, native):
    (expected,) = generated(native, [PROMPT], 6, seed=1)
    reply = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=6, seed=1, logprobs=1)
    found, tokens = reply.choices[0].logprobs, [LETTERS[id] for id in expected.ids]
    assert found.tokens == tokens
    assert found.token_logprobs == pytest.approx(expected.behavior_logprobs, abs=1e-5)
    assert found.text_offset == list(range(6))
    logprobs = zip(tokens, found.token_logprobs, strict=True)
    assert found.top_logprobs == [{token: logprob} for token, logprob in logprobs]


def test_a_stream_brings_what_the_whole_reply_has(client):
    asked = dict(model=MODEL_NAME, prompt=PROMPT, max_tokens=200, n=2, seed=3, logprobs=0)
    whole = client.completions.create(**asked, extra_body={"return_token_ids": True})
    texts, ids, logprobs, finished, prompts = ["", ""], [[], []], [[], []], {}, []
    events = list(
        client.completions.create(
            **asked,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    assert events[-1].choices == [] and events[-1].usage == whole.usage
    for event in events[:-1]:
        (choice,) = event.choices
        texts[choice.index] += choice.text
        ids[choice.index] += choice.token_ids
        logprobs[choice.index] += choice.logprobs.token_logprobs
        prompts += [choice.prompt_token_ids] if choice.prompt_token_ids else []
        if choice.finish_reason:
            finished[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert finished == {0: "length", 1: "length"}
    assert prompts == [PROMPT, PROMPT]
    assert len(events) > 3  # and came in pieces


def test_a_chat_is_templated_and_has_logprobs(client, native):
    (expected,) = generated(native, [PROMPT], 8, seed=3)
    messages = [
        {"role": "system", "content": TEXT[:2]},
        {"role": "user", "content": [{"type": "text", "text": TEXT[2:]}]},
    ]
    reply = client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,
        max_completion_tokens=8,
        seed=3,
        logprobs=True,
        extra_body={"return_token_ids": True, "return_weight_versions": True},
    )
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", letters(expected.ids))
    assert (reply.prompt_token_ids, choice.token_ids) == (PROMPT, expected.ids)
    (span,) = choice.weight_versions
    assert (span["start"], span["end"]) == (0, 8)
    entries = choice.logprobs.content
    assert [entry.token for entry in entries] == [LETTERS[id] for id in expected.ids]
    assert [bytes(entry.bytes).decode() for entry in entries] == [LETTERS[id] for id in expected.ids]
    assert [entry.logprob for entry in entries] == pytest.approx(expected.behavior_logprobs, abs=1e-5)


def test_a_chat_streams(client, native):
    (expected,) = generated(native, [PROMPT], 100, greedy=True)
    events = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": TEXT}],
            max_tokens=100,
            temperature=0,
            stream=True,
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].delta.role for event in events[1:]] == [None] * (len(events) - 1)
    assert "".join(event.choices[0].delta.content for event in events) == letters(expected.ids)
    assert events[-1].choices[0].finish_reason == "length"


def test_a_chat_without_a_limit_fills_the_context(client):
    reply = client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": TEXT}], seed=1
    )
    assert reply.usage.total_tokens == CONTEXT
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("included", [False, True])
def test_text_ends_at_a_stop_string_and_the_tokens_after_it(client, native, stream, included):
    (free,) = generated(native, [PROMPT], 60, seed=7)
    stop = letters(free.ids[20:23])
    end = letters(free.ids).index(stop)
    asked = dict(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=60, seed=7, stop=["never seen", stop], stream=stream
    )
    reply = client.completions.create(
        **asked, extra_body={"return_token_ids": True, "include_stop_str_in_output": included}
    )
    events = list(reply) if stream else [reply]
    assert "".join(event.choices[0].text for event in events) == letters(free.ids)[: end + 3 * included]
    assert [id for event in events for id in event.choices[0].token_ids] == free.ids[: end + 3]
    last = events[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_a_stop_token_is_the_last_one(client, native):
    (free,) = generated(native, [PROMPT], 60, seed=5)
    reply = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=60,
        seed=5,
        extra_body={"stop_token_ids": [free.ids[10]], "return_token_ids": True},
    )
    (choice,) = reply.choices
    assert choice.token_ids == free.ids[: free.ids.index(free.ids[10]) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", free.ids[10])


def test_the_model_is_listed_with_its_context(client):
    (card,) = client.models.list()
    assert (card.id, card.max_model_len) == (MODEL_NAME, CONTEXT)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": [1] * CONTEXT}, "maximum context length is 512 tokens, but the prompt has 512"),
        ({"prompt": [61]}, "token id 61 is not below 61"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1], "frequency_penalty": 0.5}, "frequency_penalty is not supported by this engine"),
        ({"prompt": [1], "temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"prompt": [[1], [2]]}, "several prompts are not supported"),
        ({"prompt": [1], "logprobs": 2}, "logprobs: Input should be less than or equal to 1"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_with_the_reason(client, asked, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL_NAME, **asked)
    assert message in refused.value.body["message"]


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="The model 'other' does not exist"):
        client.completions.create(model="other", prompt=[1])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs is not supported"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs must not have 'tokenize'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a message that is not text",
        ),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
    ],
)
def test_chats_that_cannot_be_are_refused(http, asked, message):
    body = {"messages": [{"role": "user", "content": TEXT}], **asked}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
