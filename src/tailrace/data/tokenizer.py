"""Loads the tokenizer of a model folder. It does not import torch, which the controller never needs."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal, Protocol, cast

from tailrace.model_folder import folder_error

TEMPLATE_TIMEOUT_S = 30.0
"""Seconds in which a chat template must write a prompt."""


class Tokenizer(Protocol):
    """The part of a fast tokenizer of `transformers` that is used here."""

    name_or_path: str
    chat_template: str | None
    clean_up_tokenization_spaces: bool
    backend_tokenizer: Any
    """The tokenizer of the library `tokenizers` behind it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, tokenize: Literal[False], **arguments: object
    ) -> str: ...


def load_tokenizer(model_path: Path) -> Tokenizer:
    """Load the fast tokenizer of a Hugging Face folder, with its chat template.

    Raises:
        ConfigError: there is no `tokenizer.json`, or it cannot be read.
    """
    if not (model_path / "tokenizer.json").is_file():
        remedy = "save the model's fast tokenizer there with tokenizer.save_pretrained(folder)"
        raise folder_error(model_path, "the folder has no tokenizer.json", remedy)
    # AutoTokenizer would import torch, which takes longer than everything else here.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
    except Exception as why:
        # The tokenizers library raises bare exceptions.
        problem = f"its tokenizer cannot be read ({why})"
        raise folder_error(model_path, problem, "save the tokenizer again") from why
    return cast(Tokenizer, tokenizer)


def render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]], arguments: Mapping[str, object]
) -> str:
    """Return the text that the chat template writes for messages.

    Args:
        arguments: of the template, by name.

    Raises:
        ConfigError: the template does not end.
        Exception: what the template raises.
    """
    text: Future[str] = Future()

    def work() -> None:
        try:
            text.set_result(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
        except Exception as why:
            text.set_exception(why)

    Thread(target=work, name="chat template", daemon=True).start()
    try:
        return text.result(TEMPLATE_TIMEOUT_S)
    except TimeoutError:
        problem = f"its chat template did not end within {TEMPLATE_TIMEOUT_S:g} s for {messages!r:.200}"
        remedy = "correct the template: it has a loop without an end"
        raise folder_error(Path(tokenizer.name_or_path), problem, remedy) from None


def text_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, without special tokens.

    Where there are no spaces to clean up, the function calls the library `tokenizers` directly: the wrapper
    of transformers takes twice as long as the decoding itself.
    """
    cleans = tokenizer.clean_up_tokenization_spaces
    decode = tokenizer.decode if cleans else tokenizer.backend_tokenizer.decode
    return partial(decode, skip_special_tokens=True)
