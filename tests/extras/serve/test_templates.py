"""Chat templates that take what the server needs: time, memory, text."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from helpers.served import served_here
from helpers.tiny_models import letter_tokenizer
from tailrace.drivers.data.encoding import ChatTemplate, PromptEncoder
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.workers.template import TemplateWorker

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 'a' * 3000000000 }}", "messages that the chat template refuses"),
        ("{{ 'a' * 3000000 }}", "it writes 3000000 characters, more than 1064960"),
        ("{{ '\\ud800' }}", "messages for which the chat template writes no Unicode"),
        (LOOP, "the chat template took too much time or memory and is used no more"),
        ("{{ 10 ** 999999999 }}", "the chat template took too much time or memory and is used no more"),
    ],
    ids=["memory", "text", "no Unicode", "loop", "a call without an end"],
)
def test_a_template_that_takes_too_much_is_refused_and_the_server_serves_others_meanwhile(
    folder, tmp_path, monkeypatch, template, problem
):
    monkeypatch.setattr("tailrace.extras.serve.generation.TEMPLATE_TIMEOUT_S", 3.0)
    shutil.copytree(folder / "model", tmp_path / "model")
    letter_tokenizer(template).save_pretrained(tmp_path / "model")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    options = ["--kv-cache-tokens", "512"]
    with (
        served_here(tmp_path / "model", *options) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        chats = [
            threads.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=60) for _ in range(8)
        ]
        slowest_s = 0.0
        while not all(chat.done() for chat in chats):
            began_s = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert slowest_s < 2.0
        for reply in [chat.result() for chat in chats]:
            assert (reply.status_code, problem in reply.text) == (400, True), reply.text
        assert client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200


def test_messages_have_the_text_that_a_run_gives_them():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    tokenizer = letter_tokenizer(template)
    text = TemplateWorker(ChatTemplate(tokenizer), 1000).write(messages, "turn", {})
    assert text == 'user: one\ntwo;assistant: {"a": 1};tool: 1;assistant: '
    assert PromptEncoder(RowsSettings(path="rows.jsonl"), tokenizer).encode(messages)[0] == text
