"""What an engine gets of a prompt that the agent writes."""

from pathlib import Path

import pytest
from agent_cases import MODEL, QUESTION, TOKENIZER, render
from agents_of_tests import TOOL

from helpers.tiny_models import letter_tokenizer
from tailrace.data.base import MixedRowsSettings, MixtureSettings, RowsSettings
from tailrace.data.encoding import load_tokenizer
from tailrace.environments.agent_prompts import AgentPrompts, RequestEncoder
from tailrace.errors import BadRow, ConfigError
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
