"""From strings and chat messages to text: the chat template, the system message, template arguments."""

from pathlib import Path

import pytest
from tests.drivers.data.conftest import character_tokenizer

from tailrace.drivers.data.encoding import PromptEncoder, encode_up_to
from tailrace.drivers.data.settings import RowsSettings
from tailrace.errors import BadRow, ConfigError

SYSTEM = {"role": "system", "content": "Add."}
USER = {"role": "user", "content": "1+1"}


def settings(**given):
    return RowsSettings.model_validate({"path": "rows.jsonl", **given})


@pytest.mark.parametrize(
    ("given", "prompt", "text"),
    [
        ({}, "1+1", "<b>u:1+1;a:"),
        ({"chat_template": "always"}, "1+1", "<b>u:1+1;a:"),
        ({"chat_template": "never"}, "1+1", "1+1"),
        ({"chat_template": "never"}, [USER], "<b>u:1+1;a:"),
        ({"system_prompt": "Add."}, "1+1", "<b>s:Add.;u:1+1;a:"),
        ({"system_prompt": "Add."}, [USER], "<b>s:Add.;u:1+1;a:"),
        ({"system_prompt": "Subtract."}, [SYSTEM, USER], "<b>s:Add.;u:1+1;a:"),
    ],
)
def test_a_prompt_becomes_the_text_of_the_chat_template(tokenizer, given, prompt, text):
    found, ids = PromptEncoder(settings(**given), tokenizer).encode(prompt)
    assert found == text
    # The begin-of-text token stands once: the template writes it, or else the tokenizer.
    assert [tokenizer.decode([token]) for token in ids] == ["<b>", *text.removeprefix("<b>")]


def test_a_string_stays_as_it_is_without_a_chat_template(plain_tokenizer):
    text, ids = PromptEncoder(settings(), plain_tokenizer).encode("1+1")
    assert (text, ids) == ("1+1", plain_tokenizer.encode("1+1"))


def test_template_arguments_reach_the_template():
    tokenizer = character_tokenizer("{{ messages[0]['content'] }}{% if not enable_thinking %}!{% endif %}")
    for thinking, text in ((True, "1+1"), (False, "1+1!")):
        encoder = PromptEncoder(settings(chat_template_kwargs={"enable_thinking": thinking}), tokenizer)
        assert encoder.encode("1+1")[0] == text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"chat_template": "always"},
            "data.chat_template = 'always': the model's tokenizer has no chat templ",
        ),
        (
            {"system_prompt": "Add."},
            "data.system_prompt = 'Add.': the model's tokenizer has no chat template",
        ),
        (
            {"chat_template_kwargs": {"a": 1}},
            "data.chat_template_kwargs = {'a': 1}: the model's tokenizer has",
        ),
    ],
)
def test_settings_that_need_a_template_are_refused_without_one(plain_tokenizer, given, said):
    with pytest.raises(ConfigError) as refused:
        PromptEncoder(settings(**given), plain_tokenizer)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chat_template": "never", "system_prompt": "Add."}, "need the chat template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "'tokenize' is set by tailrace and cannot be given"),
        ({"chat_template_kwargs": {"scale": float("inf")}}, "finite number"),
        ({"system_prompt": ""}, "at least 1 character"),
        ({"max_prompt_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        settings(**given)


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def test_tools_in_the_system_prompt_are_what_qwens_template_writes():
    template = (Path(__file__).parents[2] / "helpers" / "qwen3_chat_template.jinja").read_text()
    tokenizer = character_tokenizer(template)
    for prompt in ("add 1 and 1", [SYSTEM, USER]):
        written = PromptEncoder(settings(), tokenizer).encode(prompt, [TOOL])
        assert (
            PromptEncoder(settings(tools_in_system_prompt=True), tokenizer).encode(prompt, [TOOL]) == written
        )
        assert '"name": "add"' in written[0]


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0]['content'] }}", "{{ messages[-1]['content'] }}{% if tools %}tools{% endif %}"],
)
def test_a_prompt_whose_tools_the_template_leaves_out_is_a_bad_row(template):
    with pytest.raises(BadRow, match=r"add; data\.tools_in_system_prompt = true") as bad:
        PromptEncoder(settings(), character_tokenizer(template)).encode("add 1 and 1", [TOOL])
    assert bad.value.reason == "tools that the chat template leaves out"


@pytest.mark.parametrize("template", ["", "{% if messages[0]['role'] == 'user' %}?{% endif %}"])
def test_a_prompt_without_a_token_is_a_bad_row(template):
    with pytest.raises(BadRow) as bad:
        PromptEncoder(settings(), character_tokenizer(template)).encode([SYSTEM])
    assert bad.value.reason == "empty prompt"


def test_a_chat_template_without_an_end_is_an_error(monkeypatch):
    monkeypatch.setattr("tailrace.drivers.data.encoding.TEMPLATE_TIMEOUT_S", 0.05)
    loop = "{% for a in range(6000) %}{% for b in range(6000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"its chat template did not end within 0\.05 s"):
        PromptEncoder(settings(), character_tokenizer(loop)).encode("1+1")


@pytest.mark.parametrize("prompt", [None, 3, "", [], ["hi"], {"role": "user"}])
def test_what_is_no_prompt_is_a_bad_row(tokenizer, prompt):
    with pytest.raises(BadRow) as bad:
        PromptEncoder(settings(), tokenizer).encode(prompt)
    assert bad.value.reason == "no prompt"


def test_of_a_text_that_is_too_long_only_the_beginning_is_encoded():
    asked = []

    def encode(text):
        asked.append(len(text))
        return list(range(len(text) // 2))

    assert len(encode_up_to(1000, "ab" * 10**6, encode)) > 1000
    assert max(asked) < 10_000
    asked.clear()
    assert encode_up_to(1000, "ab" * 1000, encode) == list(range(1000))
    assert asked == [2000]
    assert len(encode_up_to(1000, "ab" * 1001, encode)) == 1001
