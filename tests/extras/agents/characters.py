"""A tokenizer of single characters, for chat templates of any model."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|end_of_text|>"),
]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a character or a special token."""
    characters = ["\n", *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({c: id for id, c in enumerate(characters)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=" ", additional_special_tokens=SPECIAL, chat_template=template
    )
