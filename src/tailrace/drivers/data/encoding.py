"""The way from messages, tools, chat template and tokenizer to text and token ids: of prompts, of given
responses, of what a template adds to a turn. Data, warm start, serving, agents and judges take it.

Loads the tokenizer of a model folder. It does not import torch, which the controller never needs.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import date
from functools import cached_property, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any, Literal, Protocol, TypeGuard, cast

import msgspec

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
    eos_token_id: int | None
    added_tokens_decoder: Mapping[int, object]
    """Tokens that are no part of its vocabulary of text, by their ids: control tokens, for one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, tokenize: Literal[False], **arguments: object
    ) -> str: ...


def load_tokenizer(model_path: Path, template_date: date | None = None) -> Tokenizer:
    """Load the fast tokenizer of a Hugging Face folder, with its chat template. Raises a ConfigError if there
    is no `tokenizer.json`, or it cannot be read. `template_date`: as ModelSettings.template_date."""
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
    if template_date:
        told = partial(tokenizer.apply_chat_template, strftime_now=template_date.strftime)
        tokenizer.apply_chat_template = told
    return cast(Tokenizer, tokenizer)


def vocabulary_digest(tokenizer: Tokenizer, below: int) -> str:
    """Return a digest of the tokens with an id below a number, each with its id."""
    words = tokenizer.backend_tokenizer.get_vocab().items()
    known = sorted((id, word) for word, id in words if id < below)
    return blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()


CALL_MARKS = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
"""Marks of tool calls, which some tokenizers have as special tokens."""


def text_of(tokenizer: Tokenizer, kept: Collection[str] = ()) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, without special tokens but for those that are kept.

    Where there are no spaces to clean up, the function calls the library `tokenizers` directly: the wrapper
    of transformers takes twice as long as the decoding itself.
    """
    cleans = tokenizer.clean_up_tokenization_spaces
    decode = tokenizer.decode if cleans else tokenizer.backend_tokenizer.decode
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if kept else ()
    marks = {id for id, token in added if token.special and token.content in kept}
    if not marks:
        return partial(decode, skip_special_tokens=True)
    return lambda ids: "".join(
        decode([*part], skip_special_tokens=not is_mark) for is_mark, part in groupby(ids, marks.__contains__)
    )


def encode_text(tokenizer: Tokenizer, text: str, *, begins: bool = True) -> list[int]:
    """Return the token ids of a text that goes on: without what the tokenizer puts after one, as an end of
    text. `begins`: with what it puts before one."""
    ids = tokenizer.encode(text, add_special_tokens=begins)
    if not begins:
        return ids
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    ends = [n + len(bare) for n in range(len(whole)) if bare and whole[n : n + len(bare)] == bare]
    return ids[: len(ids) - len(whole) + ends[0]] if ends else ids


def ids_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Return the token ids of a text after the ids of another, which stay as they are: those that it has in
    the whole; where a token of the whole has characters of both, those that it has after a line break.
    Standing alone it could have others: SentencePiece, for one, puts a blank before a text."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    for context in (before, "\n"):
        whole, first = encode(context + text), encode(context)
        if whole[: len(first)] == first:
            return whole[len(first) :]
    return encode(text)


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

ChatMessages = Sequence[Mapping[str, object]]
Tools = Sequence[Mapping[str, object]]
"""Descriptions of tools as JSON schemas, as the chat template takes them."""
Then = Literal["turn", "rest", "nothing"]
"""A turn of the assistant follows the messages of a text, or the rest of the last message, or nothing."""

NOTHING: Mapping[str, object] = {}
PROBE = "tailrace probe"
ASKED: ChatMessages = [{"role": "user", "content": "Why?"}]
SAID = ("content", "reasoning_content", "reasoning", "thinking")
"""Keys of a message of the assistant that hold text of the model."""


def plain(message: Mapping[str, Any], *, keeps_parts: bool = False, as_text: bool = False) -> dict[str, Any]:
    """Return a message as chat templates expect it: without null keys, its content as one text, the arguments
    of tool calls as objects, or as JSON text. Raises a BadRow if the content is not text, or others than the
    assistant and tools have none, or a call has no name or object. `keeps_parts`: they are not joined."""
    result = {key: each for key, each in message.items() if each is not None}
    content, calls = result.get("content", ""), result.pop("tool_calls", None)
    if "content" not in result and message.get("role") not in {"assistant", "tool"}:
        raise BadRow("a message without content", f"{message!r:.80}")
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else 0 for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRow("a part of a message that is not text", f"{content!r:.80}")
    try:
        called = {"tool_calls": [_called(call, as_text) for call in calls]} if calls else {}
    except (AttributeError, TypeError, msgspec.DecodeError) as why:
        raise BadRow("tool calls without a name or an object of arguments", f"{calls!r:.80}") from why
    return {**result, "content": content if keeps_parts else "\n".join(texts), **called}


def _called(call: Any, as_text: bool) -> dict[str, Any]:
    function = call.get("function") or call  # some data have no object around the function
    given = {} if function.get("arguments") in (None, "") else function["arguments"]
    arguments = msgspec.json.decode(given) if isinstance(given, str) else given
    if not (isinstance(arguments, dict) and isinstance(function.get("name"), str) and function["name"]):
        raise TypeError
    if as_text:
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    called = {**function, "arguments": arguments}
    return called if function is call else {**call, "function": called}


class ChatTemplate:
    """Writes chat messages as the text that the model reads. `arguments`: of the template, by name."""

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, object] = NOTHING) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments

    def text(self, messages: ChatMessages, then: Then, more: Mapping[str, object] = NOTHING) -> str:
        """Return the text of messages. Raises a BadRow if the template refuses them, a ConfigError if it does
        not end. `more`: arguments of the template, as its tools."""
        try:
            text = self._write(self.taken(messages), then, more)
        except BadRow:  # DeepSeek's templates take arguments of calls as JSON text alone
            if not any(each.get("tool_calls") for each in messages):
                raise
            text = self._write(self.taken(messages, as_text=True), then, more)
        return text + self.unwritten if then == "turn" else text

    def taken(self, messages: ChatMessages, *, as_text: bool = False) -> list[dict[str, Any]]:
        """Return messages as the template takes them: some take parts alone. `as_text`: as of `plain`."""
        return [plain(each, keeps_parts=not self.around[0], as_text=as_text) for each in messages]

    @cached_property
    def around(self) -> tuple[str, str]:
        """The template's text before and after that of the assistant. Empty: it takes no text as a string."""
        with suppress(BadRow):
            text = self._write([*ASKED, {"role": "assistant", "content": PROBE}], "nothing")
            before, found, after = text.partition(PROBE)
            return (before, after) if found else ("", "")
        return "", ""

    @cached_property
    def unwritten(self) -> str:
        """The header of a turn of the assistant, if the template does not write it as a generation prompt."""
        with suppress(BadRow):
            asked, closed = self._write(ASKED, "turn"), self._write(ASKED, "nothing")
            header = self.around[0].removeprefix(asked)
            if asked == closed and asked + header == self.around[0] and header.strip():
                return header
        return ""

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token with which the template ends a turn of the assistant. None: it ends it with text."""
        ids = self._tokenizer.encode(self.around[1], add_special_tokens=False)
        return next((id for id in ids if id in self._tokenizer.added_tokens_decoder), None)

    def _write(self, messages: ChatMessages, then: Then, more: Mapping[str, object] = NOTHING) -> str:
        arguments = {"tools": None, "add_generation_prompt": then == "turn", **self._arguments, **more}
        arguments |= {"continue_final_message": True} if then == "rest" else {}
        text: Future[str] = Future()

        def work() -> None:
            try:
                text.set_result(self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
            except Exception as why:  # templates are programs: they raise errors of their own
                problem = str(why) or type(why).__name__
                text.set_exception(BadRow("messages that the chat template refuses", problem[:1000]))

        Thread(target=work, name="chat template", daemon=True).start()
        try:
            return text.result(TEMPLATE_TIMEOUT_S)
        except TimeoutError:
            problem = f"its chat template did not end within {TEMPLATE_TIMEOUT_S:g} s for {messages!r:.200}"
            remedy = "correct the template: it has a loop without an end"
            raise folder_error(Path(self._tokenizer.name_or_path), problem, remedy) from None


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
        self._template = ChatTemplate(tokenizer, settings.chat_template_kwargs)
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
        limit = None if any_length else self._max_tokens
        text = self._text(prompt, tools)
        # A template has written the special tokens.
        encode = partial(encode_text, self._tokenizer, begins=not self._is_templated(prompt))
        ids = encode(text) if limit is None else encode_up_to(limit, text, encode)
        if not ids:
            raise BadRow("empty prompt", "the chat template writes no token for it")
        if limit is not None and len(ids) > limit:
            raise BadRow(TOO_LONG, f"{len(ids)} tokens, at most {limit} fit (data.max_prompt_tokens)")
        return text, ids

    def encode_response(
        self, prompt: object, text: str, response: Mapping[str, Any], tools: Tools | None, ends: Sequence[int]
    ) -> list[int]:
        """Return the token ids of a response after its prompt, to the token that ends it: the end of the turn
        in the chat template, or an end of a text. Where there is none the first of `ends` is added. Raises a
        BadRow if the template leaves out a part of the response or does not write it after the prompt.

        Args:
            text: of the prompt, as `encode` returns it.
            response: a message of the assistant. It goes on with a last message of the assistant.
            ends: tokens that end a text.
        """
        given, begun, messages = plain(response), _begun(prompt), _messages(prompt)
        closing, whole = set[int | None](ends), text + given["content"]
        if self._is_templated(prompt):
            last = {} if begun is None else messages.pop()
            message = {**last, **given, "content": (begun or "") + given["content"]}
            whole, after = self._text([*messages, message], tools, "nothing"), self._template.around[1]
            whole = whole if after.strip() else whole.removesuffix(after)
            closing.add(self._template.end_of_turn)
        if not whole.startswith(text):
            raise BadRow("a response that the chat template does not write after its prompt", whole[-80:])
        written = whole[len(text) :]
        ids = ids_after(self._tokenizer, text, written)
        end = next((n for n, id in enumerate(ids) if id in closing), None)
        if end is not None:
            ids = ids[: end + 1]
            written = "".join(written.partition(self._tokenizer.decode(ids[-1:]))[:2])
        elif ends:
            ids = [*ids, ends[0]]
        else:
            problem = "the model names no end of text: add eos_token_id to its generation_config.json"
            raise BadRow("a response that nothing ends", problem)
        there = "".join((self.opened(prompt, text) + written).split())  # templates change blanks
        for part in (*map(given.get, SAID), *map(_name_of, given.get("tool_calls", ()))):
            if isinstance(part, str) and "".join(part.split()) not in there:
                where = f"the chat template leaves out {part!r:.80} of it, or it goes on after an end of text"
                raise BadRow("a response that would not be trained whole", where)
        return ids

    def opened(self, prompt: object, text: str) -> str:
        """Return what a prompt has of the assistant's turn already: a last message of the assistant, or a tag
        that is open at the end of the text, as <think>. Mostly it is empty."""
        if (begun := _begun(prompt)) is not None:
            return begun
        found = OPEN_TAG.search(text)
        return found[0] if found and not self._template.around[0].endswith(found[0]) else ""

    def remarks(self, prompt: object, ends: Collection[int] | None = None) -> Iterator[str]:
        """Yield what a user should know before a run of how the template writes prompts like this one.
        `ends`: tokens that end a completion; None: responses are given, and end as their rows say."""
        header, end = self._template.unwritten, self._template.end_of_turn
        if header and self._is_templated(prompt):
            yield f"the chat template has no generation prompt: prompts get the assistant's header {header!r}"
        if ends is not None and end not in {None, *ends} and self._is_templated(prompt):
            remedy = f"add {end} to eos_token_id in generation_config.json, or to sampling.stop_token_ids"
            yield f"no completion ends with the token that ends turns in the chat template: {remedy}"

    def _is_templated(self, prompt: object) -> bool:
        return not isinstance(prompt, str) or (self.has_template and self._settings.chat_template != "never")

    def _text(self, prompt: str | ChatMessages, tools: Tools | None, then: Then | None = None) -> str:
        tools = [*self._tools, *(tools or ())]
        if isinstance(prompt, str) and not self._is_templated(prompt):
            if tools:
                raise BadRow("tools without a chat template")
            return prompt
        messages, system = _messages(prompt), self._settings.system_prompt
        then = then or ("turn" if _begun(prompt) is None else "rest")
        if system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
        bare = text = self._template.text(messages, then)
        if tools and self._settings.tools_in_system_prompt:
            first = self._template.taken(messages[:1])  # calls of the others stay as they are
            text = self._template.text(_with_tools([*first, *messages[1:]], tools), then)
        elif tools:
            text = self._template.text(messages, then, {"tools": tools})
        for name in map(_name_of, tools):
            if text.count(name) <= bare.count(name):  # a tool without a name makes the text longer
                raise BadRow(LEFT_OUT, f"{name}; data.tools_in_system_prompt = true describes them")
        return text


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]


def _begun(prompt: object) -> str | None:
    """Return the text of a last message of the assistant, which is gone on with. None: there is none."""
    last = _messages(prompt)[-1]
    is_begun = last.get("role") == "assistant" and not last.get("tool_calls")
    return str(plain(last)["content"]) if is_begun else None


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
    is_chat = isinstance(prompt, list) and all(isinstance(each, dict) for each in prompt)
    return bool(prompt) and (is_chat or isinstance(prompt, str))
