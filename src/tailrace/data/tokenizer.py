"""The tokenizer of a model folder, without torch: the controller that reads the data never needs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from tailrace.errors import ConfigError


class Tokenizer(Protocol):
    """What we ask of a tokenizer of `transformers`."""

    chat_template: str | None
    eos_token_id: int | None

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
