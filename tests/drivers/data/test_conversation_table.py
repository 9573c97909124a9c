"""A conversation has the tokens that transformers gives it: by chat template, kind of row, and what reads it:
prompts of a run, responses of `tailrace sft`, later turns of episodes, `tailrace serve`.

The right values come from `apply_chat_template` on the whole conversation, divided where its prompt ends.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from field_models import CHAT_CELLS, FIELD_MODELS, FieldModel
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.served import served_here
from helpers.small_run import write_small_run
from tailrace.config import load_config
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.data.open import open_prompts
from tailrace.drivers.environments.history import Chat
from tailrace.errors import BadRow, ConfigError
from tailrace.extras.sft.rows import ResponseRows

Messages = list[dict[str, Any]]
QUESTION, ANSWER, NEXT = "What is 16 + 26?", "It is 42.", "And 1 + 1?"
SYSTEM = {"role": "system", "content": "Be brief."}
NUMBER = {"type": "integer", "description": "A number."}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
ID = "call00000"  # nine letters and digits, as Mistral's template demands


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def call(model: FieldModel, a: int, b: int) -> dict[str, Any]:
    arguments = {"a": a, "b": b}
    if model.calls:
        function = {"name": "add", "arguments": arguments}
        return {**assistant(""), "tool_calls": [{"id": ID, "type": "function", "function": function}]}
    return assistant(f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>")


def result(model: FieldModel, value: str) -> dict[str, Any]:
    if model.calls:
        return {"role": "tool", "content": value, "tool_call_id": ID, "name": "add"}
    return user(f"<tool_response>\n{value}\n</tool_response>")


@dataclass(frozen=True)
class Cell:
    """A row of data, and the message that follows its response."""

    model: FieldModel
    prompt: str | Messages
    response: dict[str, Any]
    follows: dict[str, Any]
    tools: list[dict[str, Any]] | None = None

    def right(self, *more: Mapping[str, Any], asks: bool) -> str:
        """Return the text of the conversation by transformers. `asks`: with a generation prompt."""
        messages = [user(self.prompt)] if isinstance(self.prompt, str) else self.prompt
        tools = self.tools if self.model.calls else None
        if self.tools and not tools:
            messages = [{"role": "system", "content": described(self.tools)}, *messages]
        text = self.model.tokenizer.apply_chat_template(
            [*messages, *more], tools=tools, add_generation_prompt=asks, tokenize=False
        )
        assert isinstance(text, str)
        return text

    def ids(self, *more: Mapping[str, Any], asks: bool) -> list[int]:
        """Return the tokens of the text. Transformers encodes what a template wrote in this way."""
        return list(self.model.tokenizer(self.right(*more, asks=asks), add_special_tokens=False).input_ids)

    def row(self) -> dict[str, Any]:
        """Return the row in OpenAI's form, in which the arguments of calls are JSON text."""
        row = {"prompt": self.prompt, "response": self.response, "tools": self.tools}
        return json.loads(json.dumps({name: as_sent(value) for name, value in row.items() if value}))


def as_sent(value: Any) -> Any:
    """Return a value with the arguments of calls as JSON text."""
    if isinstance(value, list):
        return [as_sent(each) for each in value]
    if isinstance(value, dict):
        return {key: json.dumps(each) if key == "arguments" else as_sent(each) for key, each in value.items()}
    return value


def described(tools: Sequence[Any]) -> str:
    """Return the description of tools that Qwen's template writes into the system message."""
    qwen = next(model for model in FIELD_MODELS if model.name == "qwen3").tokenizer
    text = qwen.apply_chat_template([user(QUESTION)], tools=list(tools), tokenize=False)
    return str(text).partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]


def cell(model: FieldModel, kind: str) -> Cell:
    answered, thinks = assistant(ANSWER), assistant(f"<think>so it is</think>{ANSWER}")
    first = [SYSTEM, user(QUESTION)] if model.has_system else [user(QUESTION)]
    simple = Cell(model, QUESTION, answered, user(NEXT))
    called = [user(QUESTION), call(model, 16, 26), result(model, "42"), answered, user(NEXT)]
    return {
        "plain": simple,
        "messages": replace(simple, prompt=first),
        "tools": Cell(model, called, call(model, 1, 1), result(model, "2"), [ADD]),
        "thinking": replace(simple, prompt=[user(QUESTION), thinks, user(NEXT)], response=thinks),
        "turns": replace(simple, prompt=[user(QUESTION), answered, user("So?"), answered, user(NEXT)]),
    }[kind]


*CHAT_MODELS, BASE = FIELD_MODELS
CELLS = [
    pytest.param(model, kind, id=f"{model.name}, {kind}")
    for model in CHAT_MODELS
    for kind in ("plain", *CHAT_CELLS)
]
every_cell = pytest.mark.parametrize(("model", "kind"), CELLS)
every_model = pytest.mark.parametrize("model", FIELD_MODELS, ids=lambda model: model.name)


def config_of(folder: Path, model: FieldModel, row: Mapping[str, Any], **data: Any) -> Any:
    """A run on one row, which is read as a run reads it."""
    path = write_small_run(folder)
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    data |= {"eval_path": str(folder / "rows.jsonl")}
    if "tools" in row and not model.calls:
        data["tools_in_system_prompt"] = "true"
    overrides = {f"data.{name}": value for name, value in data.items()}
    return load_config(path, {"model.path": str(model.save(folder / "model")), **overrides})


def prompt_of(config: Any) -> list[int]:
    tokenizer = load_tokenizer(config.model.path)
    return list(open_prompts(config.data, tokenizer, seed=0, split="train")[0].ids)


def trained_on(config: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the response that `tailrace sft` trains."""
    sample = ResponseRows(config, load_tokenizer(config.model.path), "train")[0]
    return list(sample.prompt.ids), list(sample.completion_ids)


@every_cell
def test_a_prompt_has_the_tokens_of_its_conversation(tmp_path, model, kind):
    given = cell(model, kind)
    config = config_of(tmp_path, model, given.row())
    if kind == "tools" and not (model.calls or model.has_system):
        with pytest.raises(BadRow, match="System role not supported"):
            prompt_of(config)
    else:
        assert prompt_of(config) == given.ids(asks=True)


@pytest.mark.parametrize("kind", CHAT_CELLS)
def test_a_base_model_takes_no_conversation(tmp_path, kind):
    with pytest.raises((BadRow, ConfigError), match="chat template"):
        prompt_of(config_of(tmp_path, BASE, cell(BASE, kind).row()))


@every_cell
def test_a_response_is_trained_with_the_tokens_of_its_conversation_up_to_the_end_of_its_turn(
    tmp_path, model, kind
):
    given = cell(model, kind)
    config = config_of(tmp_path, model, given.row())
    if kind in model.refused:
        with pytest.raises(BadRow, match="chat template"):
            trained_on(config)
        return
    prompt, whole = given.ids(asks=True), given.ids(given.response, asks=False)
    end = model.tokenizer.convert_tokens_to_ids(model.end)
    whole = whole if model.ends_turn else [*whole, end]
    assert whole[: len(prompt)] == prompt
    last = len(whole) - whole[::-1].index(end)
    assert trained_on(config) == (prompt, whole[len(prompt) : last])


@pytest.mark.parametrize(("model", "kind"), [each for each in CELLS if each.values[1] != "messages"])
def test_a_later_turn_has_the_tokens_that_follow_the_end_of_the_turn_before(model, kind):
    given = replace(cell(model, kind), tools=None)
    text = given.right(given.response, given.follows, asks=True)
    ends = [model.end] if model.ends_turn else ["<|user|>", "<|observation|>"]
    told = text.rindex(given.follows["content"])
    start = max(text.rfind(end, 0, told) + len(end) * model.ends_turn for end in ends)
    encoded = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = zip(encoded.input_ids, encoded.offset_mapping, strict=True)
    end = model.tokenizer.convert_tokens_to_ids(model.end)
    found = Chat(model.tokenizer, "agent", {}).observe([given.follows], end)
    assert found == [id for id, (begins, _) in offsets if begins >= start]


@every_model
def test_a_plain_string_is_trained_with_the_tokens_of_prompt_and_response_in_one_text(tmp_path, model):
    config = config_of(tmp_path, model, {"prompt": "16 + 26 =", "response": " 42"}, chat_template="never")
    encode, end = model.tokenizer, model.tokenizer.convert_tokens_to_ids(model.end)
    begin = [encode.bos_token_id] if model.adds else []
    prompt, whole = (
        encode(text, add_special_tokens=False).input_ids for text in ("16 + 26 =", "16 + 26 = 42")
    )
    ids, trained = trained_on(config)
    assert (ids, trained[:-1]) == ([*begin, *prompt], whole[len(prompt) :])
    assert trained[-1] in {encode.eos_token_id, end}


@pytest.fixture(scope="module", params=CHAT_MODELS, ids=lambda model: model.name)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FieldModel, str]]:
    """A model and the URL of its server."""
    model: FieldModel = request.param
    folder = model.save(tmp_path_factory.mktemp("served") / "model")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(model.tokenizer), max_position_embeddings=4096, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    with served_here(folder, "--kv-cache-tokens", "4096") as url:
        yield model, url


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", *CHAT_CELLS])
def test_a_served_prompt_has_the_tokens_of_its_conversation(served, kind):
    model, url = served
    given = replace(cell(model, kind), tools=None)
    messages = [user(QUESTION)] if isinstance(given.prompt, str) else given.prompt
    body = {"messages": as_sent(messages), "max_tokens": 1, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["prompt_token_ids"] == given.ids(asks=True)
