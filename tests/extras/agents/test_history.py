"""What an engine gets of a prompt that the agent writes, and the tokens between two turns: what the template
writes there, and nothing of the turns themselves."""

from pathlib import Path

import pytest
from agent_cases import MODEL, QUESTION, TOKENIZER, render
from agents_of_tests import TOOL
from characters import tokenizer

from helpers.tiny_models import letter_tokenizer
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.data.settings import MixedRowsSettings, MixtureSettings, RowsSettings
from tailrace.drivers.environments.history import AgentPrompts, Chat, RequestEncoder
from tailrace.errors import BadRow, ConfigError, EnvironmentFailed
from tailrace.types import Prompt

ROWS = RowsSettings(path=Path("unused.jsonl"))
USER = {"role": "user", "content": QUESTION}
PROMPT = Prompt(7, render([USER]), QUESTION, {"answer": "408"})


def test_the_prompt_is_the_token_with_which_every_first_request_begins() -> None:
    start = RequestEncoder(ROWS, TOKENIZER, 512).start()
    assert start == render([USER])[:1] == render([USER], [TOOL])[:1]
    cut = AgentPrompts([PROMPT], start)[0]
    assert (cut.ids, cut.index, cut.text, cut.row) == (start, 7, QUESTION, {"answer": "408"})


def test_a_template_that_begins_with_the_message_itself_is_refused() -> None:
    tokenizer = letter_tokenizer("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=r'environment.prompt = .*; write "data"'):
        RequestEncoder(ROWS, tokenizer, 512).start()


def test_a_first_request_has_the_settings_of_its_data_source() -> None:
    system = {"role": "system", "content": "user\n"}
    limit = len(render([system, USER]))
    sources = [
        MixedRowsSettings(name="plain", path=Path("a")),
        MixedRowsSettings(name="strict", path=Path("b"), system_prompt="user\n", max_prompt_tokens=limit),
    ]
    encoder = RequestEncoder(MixtureSettings(sources=tuple(sources)), load_tokenizer(MODEL), 512)
    plain, strict = (
        encoder.contexts(Prompt(0, [1], source=source), "keep", 2) for source in ("plain", "strict")
    )
    assert list(plain.first([USER], None)) == render([USER])
    assert list(strict.first([USER], None)) == render([system, USER])
    with pytest.raises(BadRow, match="prompt too long"):
        strict.first([USER, USER], None)
    later = strict.rewritten([1], [USER, USER], None, continues=False)
    assert later == render([system, USER, USER]), "the limit of prompts is not that of later contexts"


QWEN = """\
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{{- (message.content | tojson if role == 'ipython' else message.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
FORGETFUL = """\
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>' + message.role + '\\n' + content.strip() + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
"""As Qwen3's, it leaves out the thinking of earlier turns."""
WITHOUT_TOOLS = """\
{%- for message in messages %}
{%- if message.role != 'tool' %}{{ '<|' + message.role + '|>' + message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}"""
"""As Phi-3's, it leaves out what it does not know."""
STRICT = "{{ raise_exception('Roles must alternate') }}"


@pytest.mark.parametrize(
    ("template", "role", "end", "expected"),
    [
        (
            QWEN,
            "tool",
            "<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            QWEN,
            "user",
            "<|im_end|>",
            "\n<|im_start|>user\n4<|im_end|>\n<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA,
            "tool",
            "<|eot_id|>",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            FORGETFUL,
            "user",
            "<|im_end|>",
            "\n<|im_start|>user\n4<|im_end|>\n<|im_start|>user\n5<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
    ],
)
def test_the_observation_is_what_the_template_writes_from_one_turn_to_the_next(
    template: str, role: str, end: str, expected: str
) -> None:
    """A turn that did not end with the template's token gets it."""
    letters = tokenizer(template)
    chat = Chat(letters, "tools", {}, role)
    messages = [{"role": role, "content": content} for content in ("4", "5")]
    end_id, other_id = letters.convert_tokens_to_ids([end, "<|end_of_text|>"])
    assert letters.decode(chat.observe(messages, end_id)) == expected
    for last_id in (other_id, None):
        assert letters.decode(chat.observe(messages, last_id)) == end + expected


@pytest.mark.parametrize(
    ("template", "arguments"), [(QWEN, {}), (LLAMA, {}), (FORGETFUL, {"enable_thinking": True})]
)
def test_prompt_turn_and_observation_are_the_template_s_rendering_of_the_whole(
    template: str, arguments: dict[str, object]
) -> None:
    """Where the template rewrites no earlier turn, nothing differs from rendering everything at once."""
    letters = tokenizer(template)
    question = [{"role": "user", "content": "1+1"}]
    render = {"tokenize": False, "add_generation_prompt": True, **arguments}
    prompt = letters.encode(letters.apply_chat_template(question, **render), add_special_tokens=False)
    turn = [*letters.encode("2", add_special_tokens=False)]
    observed = Chat(letters, "python", arguments).observe([{"role": "user", "content": "sure?"}], turn[-1])
    whole = [*question, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
    assert letters.decode([*prompt, *turn, *observed]) == letters.apply_chat_template(whole, **render)


def test_the_thinking_of_a_turn_stays_although_the_template_would_leave_it_out() -> None:
    letters = tokenizer(FORGETFUL)
    observed = Chat(letters, "python", {"enable_thinking": True}).observe(
        [{"role": "user", "content": "sure?"}], letters.convert_tokens_to_ids("<|im_end|>")
    )
    turn = "<think>\nhm\n</think>\n\n2<|im_end|>"
    assert (
        turn + letters.decode(observed)
        == turn + "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "role", "said"),
    [
        (
            None,
            "tool",
            "it needs the chat template of the model's tokenizer, which has none; add a chat_temp",
        ),
        (WITHOUT_TOOLS, "tool", "does not write messages of the role 'tool' (it leaves them out)"),
        (WITHOUT_TOOLS, "tool", 'or set environment.answer_role = "user"'),
        (STRICT, "user", "does not write messages of the role 'user' (Roles must alternate); choose a model"),
    ],
)
def test_a_template_that_cannot_continue_is_refused_with_a_remedy(
    template: str | None, role: str, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Chat(tokenizer(template), "tools", {}, role)
    assert str(error.value).startswith("environment.kind = 'tools': ") and said in str(error.value)


def test_messages_that_the_template_refuses_fail_the_episode() -> None:
    chat = Chat(tokenizer(QWEN), "tools", {}, "tool")
    with pytest.raises(EnvironmentFailed, match="template"):
        chat.observe([{"role": "tool", "content": 3}], None)
