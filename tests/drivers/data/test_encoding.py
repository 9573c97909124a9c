"""From strings and chat messages to text: the chat template, the system message, template arguments."""

from pathlib import Path

import pytest
from tests.drivers.data.conftest import TEMPLATE, character_tokenizer
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

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


ANSWERED = {"role": "assistant", "content": "Because"}
TURNS = (
    "{% for m in messages %}{{ m['role'][0] }}:WRITTEN"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def turns(written: str, call: str = "") -> PreTrainedTokenizerFast:
    """A template that writes its messages in one way."""
    return character_tokenizer(TURNS.replace("WRITTEN", written).replace("CALL", call))


CONTENT = "{{ m['content'] }}"
ALWAYS = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<e>{% endfor %}a:"
CALLS = "{{ c.function.name }}{{ c.function.arguments | tojson }}"
CHAT = turns(CONTENT + "<e>;")
WITH_CALLS = turns(CONTENT, CALLS + "<e>")


def trained(tokenizer, prompt, response, ends=(1,), **given):
    """Return the text of the tokens that are trained."""
    encoder = PromptEncoder(settings(**given), tokenizer)
    message = response if isinstance(response, dict) else {**ANSWERED, "content": response}
    return tokenizer.decode(
        encoder.encode_response(prompt, encoder.encode(prompt)[0], message, None, list(ends))
    )


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "response", "text"),
    [
        (CHAT, "Why?", "Because", "Because<e>"),
        (turns(CONTENT + "<e>;<e>"), "Why?", "Because", "Because<e>"),
        (turns(CONTENT + "<b>;"), "Why?", "Because", "Because<b>"),
        (turns(CONTENT + " "), "Why?", "Because", "Because<e>"),
        (turns(CONTENT + ";"), "Why?", "Because", "Because;<e>"),
        (character_tokenizer(ALWAYS), "Why?", "Because", "Because<e>"),
        (CHAT, [USER, {**ANSWERED, "content": "It is "}], "so", "so<e>"),
        (CHAT, "Why?", "Because<e>", "Because<e>"),
        (character_tokenizer(None), "1+1=", "2", "2<e>"),
        (character_tokenizer(None), "1+1=", "2<e>", "2<e>"),
    ],
    ids=[
        *("with the end of the turn", "without what follows it", "with a token that ends no text"),
        *("an end of text", "an end of text after the template's", "without a header that is always written"),
        *("after a begun answer", "an end that it has", "a plain string", "a plain string with an end"),
    ],
)
def test_a_response_is_trained_to_the_token_that_ends_it(tokenizer, prompt, response, text):
    assert trained(tokenizer, prompt, response) == text


def test_a_response_that_no_token_can_end_is_refused():
    with pytest.raises(BadRow, match=r"add eos_token_id to its generation_config\.json"):
        trained(turns(CONTENT + ";"), "Why?", "Because", ends=())


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("tokenizer", "response"),
    [
        (turns("{{ m['content'].split('</think>')[-1] }}<e>"), "<think>so</think>8"),
        (CHAT, "Because<e>of it"),
        (CHAT, {**ANSWERED, "reasoning_content": "so"}),
        (turns(CONTENT + "<e>"), CALLED),
    ],
    ids=["thinking", "after an end", "reasoning", "calls"],
)
def test_a_response_of_which_the_template_leaves_out_a_part_is_a_bad_row(tokenizer, response):
    with pytest.raises(BadRow) as bad:
        trained(tokenizer, "Why?", response)
    assert bad.value.reason == "a response that would not be trained whole"


def test_a_response_that_the_template_rewrites_is_trained_as_written():
    tokenizer = turns("{{ m['content'].replace('</think>', ' </think> ') }}<e>")
    assert trained(tokenizer, "Why?", "<think>so</think>8") == "<think>so </think> 8<e>"


def with_text(message):
    """Return a message that calls a function, with the arguments as OpenAI's clients send them."""
    (call,) = message["tool_calls"]
    return {**message, "tool_calls": [{**call, "function": {"name": "add", "arguments": '{"a":1}'}}]}


def test_arguments_of_calls_may_be_json_text():
    encoder = PromptEncoder(settings(), WITH_CALLS)
    for calls in (CALLED, with_text(CALLED)):
        assert encoder.encode([USER, {**calls, "content": None}, USER])[0] == 'u:1+1a:add{"a": 1}<e>u:1+1a:'
        assert trained(WITH_CALLS, "Why?", calls) == 'add{"a": 1}<e>'


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize(("calls", "written"), [(CALLED, '{"a": 1}'), (with_text(CALLED), '{"a":1}')])
def test_a_template_that_takes_json_text_alone_gets_it(calls, written, tools):
    tokenizer = turns(CONTENT, "{{ c.function.name + c.function.arguments }}")
    encoder = PromptEncoder(settings(tools_in_system_prompt=True), tokenizer)
    assert encoder.encode([USER, calls, USER], tools)[0].endswith(f"u:1+1a:add{written}u:1+1a:")


def test_a_tool_may_return_nothing():
    result = {"role": "tool", "content": None, "tool_call_id": "1"}
    assert PromptEncoder(settings(), WITH_CALLS).encode([USER, CALLED, result])[0].endswith("<e>t:a:")


NO_OBJECTS = [{"name": "add", "arguments": each} for each in ("{", "3", '"{}"', [1, 2], [], 5, 0, True)]


@pytest.mark.parametrize("function", [*NO_OBJECTS, {}, {"name": ""}, {"name": 3}])
def test_a_call_without_a_name_or_an_object_of_arguments_is_a_bad_row(function):
    calls = [{"type": "function", "function": function}]
    with pytest.raises(BadRow, match="tool calls without a name or an object of arguments"):
        PromptEncoder(settings(), WITH_CALLS).encode([USER, {**CALLED, "tool_calls": calls}, USER])


def test_a_plain_prompt_does_not_end_with_the_end_of_text_that_the_tokenizer_adds():
    tokenizer = character_tokenizer(None)
    added = {"single": "<b> $A <e>", "special_tokens": [("<b>", 0), ("<e>", 1)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**added)
    for text in ("1+1=", "1+1<e>"):
        assert tokenizer.decode(PromptEncoder(settings(), tokenizer).encode(text)[1]) == "<b>" + text
    assert trained(tokenizer, "1+1=", "2") == "2<e>"


def test_the_tokens_of_a_prompt_stay_where_those_of_the_whole_are_others():
    inner = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<e>": 3}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")
    encoder = PromptEncoder(settings(), tokenizer)
    assert tokenizer.encode("aab") == [0, 2]
    assert encoder.encode("aa") == ("aa", [0, 0])
    assert encoder.encode_response("aa", "aa", {**ANSWERED, "content": "bab"}, None, [3]) == [1, 2, 3]


def test_a_header_that_is_no_generation_prompt_in_the_template_is_written_and_said():
    tokenizer = character_tokenizer(TEMPLATE.split("{% if add")[0])
    encoder = PromptEncoder(settings(), tokenizer)
    assert encoder.encode("1+1")[0] == "<b>u:1+1;a:"
    assert [*encoder.remarks("1+1", [])] == [
        "the chat template has no generation prompt: prompts get the assistant's header 'a:'"
    ]
    assert trained(tokenizer, "1+1", "2") == "2;<e>"
    written = character_tokenizer("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert PromptEncoder(settings(), written).encode("1+1")[0] == "[1+1]["


def test_a_blank_before_answers_is_no_header_of_a_prompt():
    """As Mistral's templates write it."""
    blank = "{{ ' ' if m.role == 'assistant' }}"
    tokenizer = character_tokenizer("{% for m in messages %}" + blank + "{{ m['content'] }}{% endfor %}")
    assert PromptEncoder(settings(), tokenizer).encode("1+1")[0] == "1+1"


def test_a_token_that_ends_turns_and_no_completion_is_said():
    encoder = PromptEncoder(settings(), CHAT)
    assert [*encoder.remarks("1+1", [0, 1])] == []
    assert [*encoder.remarks("1+1", [0])] == [
        "no completion ends with the token that ends turns in the chat template: add 1 to eos_token_id in "
        "generation_config.json, or to sampling.stop_token_ids"
    ]
    assert [*PromptEncoder(settings(chat_template="never"), CHAT).remarks("1+1", [0])] == []
