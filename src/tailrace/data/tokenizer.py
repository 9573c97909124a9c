"""The tokenizer of a model folder, without torch: the controller that reads the data never needs it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from tailrace.errors import ConfigError


class Tokenizer(Protocol):
    """What we ask of a tokenizer of `transformers`."""

    chat_template: str | None
    eos_token_id: int | None
    clean_up_tokenization_spaces: bool
    backend_tokenizer: Any
    """Of the library `tokenizers`: it does the work."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The fast tokenizer of a Hugging Face folder, its chat template included.

    Raises:
        ConfigError: there is no `tokenizer.json`, or it cannot be read.
    """
    if not (model_path / "tokenizer.json").is_file():
        raise ConfigError(
            "model.path",
            str(model_path),
            "the folder has no tokenizer.json",
            "save the model's fast tokenizer there with tokenizer.save_pretrained(folder)",
        )
    # AutoTokenizer would import torch, which takes longer than everything else here.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
    except Exception as why:
        # The tokenizers library raises bare exceptions.
        problem = f"its tokenizer cannot be read ({why})"
        raise ConfigError("model.path", str(model_path), problem, "save the tokenizer again") from why
    return cast(Tokenizer, tokenizer)


def text_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """What makes text of ids, special tokens left out. Where the tokenizer has nothing to clean up behind the
    library that does the work, that one is asked directly: the way to it takes twice as long as the work."""
    cleans = tokenizer.clean_up_tokenization_spaces
    decode = tokenizer.decode if cleans else tokenizer.backend_tokenizer.decode
    return partial(decode, skip_special_tokens=True)
