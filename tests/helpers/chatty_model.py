"""A random model that ends its turns and calls tools now and then, with a tokenizer of single characters."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tiny_models import tiny_model

END = "<|im_end|>"
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
CALLS = tuple(
    f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    for name, arguments in (
        ("pad_write", {"word": "alpha"}),
        ("pad_write", {"word": "bravo"}),
        ("pad_read", {}),
        ("first_letter", {}),
        ("nothing", {}),
    )
)
ANSWER = "<reversed_text>rebma</reversed_text>"
OFTEN = (END, *CALLS, ANSWER, "a")
"""Tokens that nine of ten tokens are."""
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def chatty_tokenizer() -> PreTrainedTokenizerFast:
    """Each character, each tool call and each mark of the chat template is a token."""
    inner = Tokenizer(models.WordLevel({each: id for id, each in enumerate(CHARACTERS)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(call, normalized=False) for call in (*CALLS, ANSWER)])
    inner.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="?", eos_token=END, chat_template=TEMPLATE
    )


def save_chatty_model(folder: Path) -> None:
    """Save model and tokenizer. The first dimension of the hidden state is large after every token, and the
    output weights of OFTEN are large there."""
    tokenizer = chatty_tokenizer()
    often = tokenizer.convert_tokens_to_ids(list(OFTEN))
    model = tiny_model(
        "llama",
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[often, 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
