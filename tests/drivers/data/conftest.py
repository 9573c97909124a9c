"""A real tokenizer: one token a character, a chat template, and a begin-of-text token as Llama's has."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "<b>{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def character_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    characters = [chr(code) for code in range(32, 127)]
    vocab = {token: i for i, token in enumerate(["<b>", "<e>", "<?>", *characters])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<?>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<b>", eos_token="<e>", unk_token="<?>", chat_template=chat_template
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(None)
