"""Encodes the prompt of a row, a string or chat messages, as text and token ids.

Loads the tokenizer of a model folder. It does not import torch, which the controller never needs.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any, Literal, Protocol, TypeGuard, cast

from tailrace.drivers.data.settings import TEMPLATE_KEYS, PromptSettings
from tailrace.errors import BadRow, ConfigError
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
    """Load the fast tokenizer of a Hugging Face folder, with its chat template. Raises a ConfigError if there
    is no `tokenizer.json`, or it cannot be read."""
    if not (model_path / "tokenizer.json").is_file():
        remedy = "save the model's fast tokenizer there with tokenizer.save_pretrained(folder)"
        raise folder_error(model_path, "the folder has no tokenizer.json", remedy)
    # AutoTokenizer would import torch, which takes longer than everything else here.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
    except Exception as why:
        # The tokenizers library raises bare exceptions.
        problem = f"its tokenizer cannot be read: tokenizer.json or tokenizer_config.json ({why})"
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


def vocabulary_digest(tokenizer: Tokenizer, below: int) -> str:
    """Return a digest of the tokens with an id below a number, each with its id."""
    words = tokenizer.backend_tokenizer.get_vocab().items()
    known = sorted((id, word) for word, id in words if id < below)
    return blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()


CALL_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
"""Marks of tool calls, which some tokenizers have as special tokens."""


def text_of(tokenizer: Tokenizer, kept: Collection[str] = ()) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, without special tokens but for those that are kept.

    Where there are no spaces to clean up, the function calls the library `tokenizers` directly: the wrapper
    of transformers takes twice as long as the decoding itself.
    """
    cleans = tokenizer.clean_up_tokenization_spaces
    decode = tokenizer.decode if cleans else tokenizer.backend_tokenizer.decode
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
    marks = {id for id, token in added if token.special and token.content in kept}
    if not marks:
        return partial(decode, skip_special_tokens=True)
    return lambda ids: "".join(
        decode([*part], skip_special_tokens=not is_mark) for is_mark, part in groupby(ids, marks.__contains__)
    )


def encode_up_to(limit: int, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the tokens of a text; of one with more tokens than the limit perhaps those of its beginning
    only, which are more, too. A tokenizer takes some 400 bytes of memory for each byte of text."""
    num_chars, uncertain = 4 * limit, limit // 8 + 64  # tokens that what follows may join
    while num_chars < len(text):
        if len(ids := encode(text[:num_chars])) > limit + uncertain:
            return ids
        num_chars *= 2
    return encode(text)


TOO_LONG = "prompt too long"
"""Reason under which dropped prompts are counted."""

LEFT_OUT = "tools that the chat template leaves out"
"""Reason under which prompts are dropped whose tools the model would not see."""
TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Text of Qwen's chat templates at the end of the system message."""

OPEN_TAG = re.compile(r"<([A-Za-z_]\w*)>\s*\Z")
"""A tag at the end of a prompt that the completion goes on after, as <think>."""
PROBE = "tailrace probe"

ChatMessages = Sequence[Mapping[str, object]]
Tools = Sequence[Mapping[str, object]]
"""Descriptions of tools as JSON schemas, as the chat template takes them."""


class PromptEncoder:
    """Applies the chat template, encodes, and enforces the length limit."""

    def __init__(
        self,
        settings: PromptSettings,
        tokenizer: Tokenizer,
        max_context_tokens: int | None = None,
        tools: Tools = (),
    ) -> None:
        """
        Args:
            max_context_tokens: positions of the model; None: unlimited.
            tools: tools of every prompt, before those of its row; they need the chat template.

        Raises:
            ConfigError: the settings need a chat template and the tokenizer has none.
        """
        self._settings, self._tokenizer, self._tools = settings, tokenizer, tools
        limits = [settings.max_prompt_tokens, max_context_tokens and max_context_tokens - 1]
        self._max_tokens = min((limit for limit in limits if limit is not None), default=None)
        self.has_template = tokenizer.chat_template is not None
        if not self.has_template and settings.chat_template != "never":
            needing = settings.model_dump(include={"chat_template"} | TEMPLATE_KEYS, exclude_defaults=True)
            for name, value in needing.items():
                problem = "the model's tokenizer has no chat template"
                remedy = "remove it, or add a template to the model folder"
                raise ConfigError(f"data.{name}", value, problem, remedy)

    def encode(
        self, prompt: object, tools: Tools | None = None, *, any_length: bool = False
    ) -> tuple[str, list[int]]:
        """Return the text that the model reads, and its token ids. It goes on with a last message of the
        assistant. Raises a BadRow if it is neither, it is empty, has parts that are not text, the template
        refuses it or leaves out its tools, or it has no token or too many.

        Args:
            prompt: a string, or a list of chat messages.
            tools: tools that the model may call; they need the chat template.
            any_length: the limit does not hold.
        """
        if not is_prompt(prompt):
            raise BadRow("no prompt", f"found {prompt!r:.80}")
        tools = [*self._tools, *(tools or ())] or None
        limit = None if any_length else self._max_tokens
        templated = self.has_template and self._settings.chat_template != "never"
        if isinstance(prompt, str) and not templated:
            if tools:
                raise BadRow("tools without a chat template")
            text, encode = prompt, self._tokenizer.encode
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = self._apply_template([self._plain(message) for message in messages], tools)
            # The template has written the special tokens.
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
        ids = encode(text) if limit is None else encode_up_to(limit, text, encode)
        if not ids:
            raise BadRow("empty prompt", "the chat template writes no token for it")
        if limit is not None and len(ids) > limit:
            raise BadRow(TOO_LONG, f"{len(ids)} tokens, at most {limit} fit (data.max_prompt_tokens)")
        return text, ids

    def encode_response(
        self, prompt: object, text: str, response: Mapping[str, Any], tools: Tools | None, ends: Sequence[int]
    ) -> list[int]:
        """Return the token ids of a response as the chat template closes its message, or of a plain string
        with its end. Raises a BadRow if the template does not write it after the prompt.

        Args:
            text: of the prompt, as `encode` returns it.
            response: a message of the assistant.
            ends: the token that ends a plain string, if there is one.
        """
        if isinstance(prompt, str) and not (self.has_template and self._settings.chat_template != "never"):
            return [*self._tokenizer.encode(str(response["content"]), add_special_tokens=False), *ends]
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        plain = [self._plain(message) for message in [*messages, response]]
        whole = self._apply_template(plain, [*self._tools, *(tools or ())] or None, closed=True)
        if not whole.startswith(text):
            raise BadRow("a response that the chat template does not write after its prompt", whole[-80:])
        return self._tokenizer.encode(whole[len(text) :], add_special_tokens=False)

    def opened(self, prompt: object, text: str) -> str:
        """Return what a prompt has of the assistant's turn already: a last message of the assistant, or a tag
        that is open at the end of the text, as <think>. Mostly it is empty."""
        if isinstance(prompt, list) and prompt[-1].get("role") == "assistant":
            return str(self._plain(prompt[-1])["content"])
        found = OPEN_TAG.search(text)
        return found[0] if found and not (self._header or "").endswith(found[0]) else ""

    @cached_property
    def _header(self) -> str | None:
        """Return the template's text before that of the assistant. None: it takes no text as a string."""
        with suppress(BadRow):
            asked = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": PROBE}]
            before, found, _ = self._render(asked).partition(PROBE)
            return before if found else None
        return None

    def _plain(self, message: Mapping[str, Any]) -> dict[str, object]:
        """Return a message without null keys, with its parts as one text where the template takes strings."""
        content = message.get("content")
        if content is None and message.get("role") != "assistant":
            raise BadRow("a message without content", f"{message!r:.80}")
        if isinstance(content, list):
            texts: list[Any] = [part.get("text") if isinstance(part, dict) else 0 for part in content]
            if not all(isinstance(text, str) for text in texts):
                raise BadRow("a part of a message that is not text", f"{content!r:.80}")
            content = content if self._header is None else "\n".join(texts)
        return {**{key: each for key, each in message.items() if each is not None}, "content": content or ""}

    def _apply_template(self, messages: ChatMessages, tools: Tools | None, *, closed: bool = False) -> str:
        system = self._settings.system_prompt
        if system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
        if not tools:
            return self._render(messages, closed=closed)
        bare = self._render(messages, closed=closed)
        moved = self._settings.tools_in_system_prompt
        asked = (_with_tools(messages, tools), None) if moved else (messages, tools)
        text = self._render(*asked, closed=closed)
        for name in map(_name_of, tools):
            if text.count(name) <= bare.count(name):  # a tool without a name makes the text longer
                raise BadRow(LEFT_OUT, f"{name}; data.tools_in_system_prompt = true describes them")
        return text

    def _render(self, messages: ChatMessages, tools: Tools | None = None, *, closed: bool = False) -> str:
        """Return the text of messages. `closed`: nothing follows the last one."""
        ends = messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
        goes_on, opens = ends and not closed, not ends and not closed
        given = {"tools": tools, "add_generation_prompt": opens, **self._settings.chat_template_kwargs}
        given |= {"continue_final_message": True} if goes_on else {}
        try:
            return render(self._tokenizer, messages, given)
        except ConfigError:
            raise
        except Exception as why:
            # Templates are programs: they raise errors of their own on messages they do not know.
            raise BadRow("messages that the chat template refuses", str(why)) from why


def _with_tools(messages: ChatMessages, tools: Tools) -> ChatMessages:
    described = TOOLS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0].get("role") != "system":
        return [{"role": "system", "content": described}, *messages]
    content: Any = messages[0]["content"]
    added = f"\n\n{described}" if isinstance(content, str) else [{"type": "text", "text": described}]
    return [{**messages[0], "content": content + added}, *messages[1:]]


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def is_prompt(prompt: object) -> TypeGuard[str | list[Mapping[str, object]]]:
    """Return whether the value is a non-empty string or a non-empty list of chat messages."""
    if isinstance(prompt, str):
        return prompt != ""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(each, dict) for each in prompt)
