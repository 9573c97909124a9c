"""Rows as other tools write them: encodings, Arrow's nulls, messages in parts, answers that are begun."""

import json
import os
from pathlib import Path

import pytest
from tests.drivers.data.conftest import character_tokenizer

from tailrace.drivers.data.encoding import PromptEncoder, load_tokenizer
from tailrace.drivers.data.open import open_prompts
from tailrace.drivers.data.settings import RowsSettings
from tailrace.errors import BadRow, ConfigError

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
PARTS_ALONE = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{% for part in m['content'] %}{{ part.get('text') }}{% endfor %};{% endfor %}"
)
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m.tool_calls is defined %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}\n{% endfor %}"
)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2's tokenizer, or, without the model, its template over characters."""
    folder = os.environ.get("TAILRACE_SMOLLM2")
    return load_tokenizer(Path(folder)) if folder else character_tokenizer(SMOLLM2_TEMPLATE)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return RowsSettings(path=path, eval_path=path)


def opened(settings, tokenizer):
    return open_prompts(settings, tokenizer, seed=0, split="train")


def user(content):
    return {"role": "user", "content": content}


def test_a_byte_order_mark_costs_no_row(tmp_path, smollm2):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b"}), encoding="utf-8-sig")
    prompts = opened(RowsSettings(path=path, eval_path=path), smollm2)
    assert {prompts[0].given, prompts[1].given} == {"a", "b"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it is empty; write JSON lines: one object a line, in UTF-8"),
        ("\n \n", "it is empty"),
        (json.dumps([{"prompt": "a"}, {"prompt": "b"}]), "the whole file is one JSON array"),
        ('[\n{"prompt": "a"},\n{"prompt": "b"}\n]', "the whole file is one JSON array"),
        (json.dumps({"prompt": "a"}, indent=2), "the whole file is one JSON value"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "its encoding is UTF-16 or UTF-32"),
        ('{"prompt": "a"}\n'.encode("utf-16-be"), "its encoding is UTF-16 or UTF-32"),
        ('{"prompt": "a"}\n'.encode("utf-32"), "its encoding is UTF-16 or UTF-32"),
    ],
)
def test_a_file_that_is_not_json_lines_is_named_as_what_it_is(tmp_path, smollm2, content, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as refused:
        opened(RowsSettings(path=path), smollm2)
    assert str(refused.value).startswith(f"data.path = {str(path)!r}: {said}")


def test_the_refusal_of_a_column_lists_those_that_there_are(tmp_path, smollm2):
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "level": 2}]
    with pytest.raises(
        ConfigError, match=r"has a prompt in this column \(columns: answer, level, question\)"
    ):
        opened(write(tmp_path / "rows.jsonl", rows), smollm2)


def test_a_last_message_of_the_assistant_is_continued(tmp_path, smollm2):
    begun = [user("1 + 1?"), {"role": "assistant", "content": "The sum is "}]
    prompt = opened(write(tmp_path / "rows.jsonl", [{"prompt": begun}]), smollm2)[0]
    assert prompt.text.endswith("<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\nThe sum is ")
    assert prompt.opened == "The sum is "
    assert prompt.ids == smollm2.encode(prompt.text, add_special_tokens=False)


def test_text_parts_are_joined_where_the_template_takes_strings(smollm2):
    parts = [{"type": "text", "text": "Add."}, {"type": "text", "text": "1 + 1?"}]
    encoder = PromptEncoder(RowsSettings(path=Path("rows.jsonl")), smollm2)
    assert encoder.encode([user(parts)]) == encoder.encode([user("Add.\n1 + 1?")])


def test_text_parts_stay_for_a_template_that_takes_parts_alone():
    parts = [{"type": "text", "text": "Add."}, {"type": "text", "text": "1 + 1?"}]
    encoder = PromptEncoder(RowsSettings(path=Path("rows.jsonl")), character_tokenizer(PARTS_ALONE))
    assert encoder.encode([user(parts)])[0] == "user:Add.1 + 1?;"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            [{"type": "text", "text": "What is it?"}, {"type": "image"}],
            "a part of a message that is not text",
        ),
        (["What is it?"], "a part of a message that is not text"),
        (None, "a message without content"),
    ],
)
def test_a_message_that_is_not_all_text_costs_its_row(tmp_path, smollm2, content, reason):
    prompts = opened(write(tmp_path / "rows.jsonl", [{"prompt": [user(content)]}]), smollm2)
    with pytest.raises(BadRow) as bad:
        prompts[0]
    assert bad.value.reason == reason


def tool(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


def test_nulls_that_arrow_adds_to_tools_and_calls_are_in_no_prompt(tmp_path):
    datasets = pytest.importorskip("datasets")
    called = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    found = [{"type": "function", "function": {"name": "find", "arguments": {"query": "x"}}}]
    rows = [
        {
            "prompt": [
                {**user("q"), "tool_calls": None},
                {"role": "assistant", "content": "", "tool_calls": calls},
                user("?"),
            ]
        }
        | {"tools": tools, "answer": b"\xff\x00"}
        for calls, tools in ((called, tool("add", a="integer")), (found, tool("find", query="string")))
    ]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    assert (
        datasets.load_dataset("parquet", data_files=str(path), split="train")[0]["prompt"][0]["tool_calls"]
        is None
    )
    prompts = opened(RowsSettings(path=path, eval_path=path), character_tokenizer(WITH_TOOLS))
    for prompt in (prompts[0], prompts[1]):
        row = rows[prompt.row["tools"] != rows[0]["tools"]]
        assert "null" not in prompt.text
        assert prompt.row["tools"] == row["tools"]
        assert prompt.given[1] == row["prompt"][1]
        assert prompt.row["answer"] == b"\xff\x00"


def test_a_null_that_a_json_line_has_stays_in_its_tools(tmp_path):
    schema = tool("find", query="string")
    schema[0]["function"]["parameters"]["properties"]["query"]["default"] = None
    settings = write(tmp_path / "rows.jsonl", [{"prompt": "q", "tools": schema}])
    assert '"default": null' in opened(settings, character_tokenizer(WITH_TOOLS))[0].text


@pytest.mark.parametrize("place", ["beside a message", "in a column"])
def test_an_integer_of_more_than_64_bits_is_refused_with_its_column(tmp_path, smollm2, place):
    number = 2**70
    row = (
        {"prompt": [{**user("q"), "id": number}]}
        if place == "beside a message"
        else {"prompt": "q", "id": number}
    )
    prompts = opened(write(tmp_path / "rows.jsonl", [{"prompt": "other"}, row]), smollm2)
    reasons = set()
    for index in range(2):
        try:
            assert prompts[index].given == "other"
        except BadRow as bad:
            reasons.add(bad.reason)
    column = "prompt" if place == "beside a message" else "id"
    assert reasons == {f"the column '{column}' cannot be sent to another process"}


def test_a_column_of_images_is_named(tmp_path, smollm2):
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    data = datasets.Dataset.from_list([{"prompt": "q", "picture": image.new("RGB", (2, 2))}])
    path = tmp_path / "rows.parquet"
    data.cast_column("picture", datasets.Image()).to_parquet(str(path))
    prompts = opened(RowsSettings(path=path, eval_path=path), smollm2)
    with pytest.raises(BadRow, match="the column 'picture' cannot be sent to another process"):
        prompts[0]


@pytest.mark.parametrize(
    ("template", "prompt", "opens"),
    [
        (SMOLLM2_TEMPLATE, "q", ""),
        (THINKS, "q", "<think>\n"),
        (THINKS, [user("q")], "<think>\n"),
        (THINKS, [user("q"), {"role": "assistant", "content": "So"}], "So"),
        ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>", "q", ""),
        (None, "Let me think.\n<think>", "<think>"),
        (None, "1 < 2 > 1", ""),
    ],
)
def test_a_tag_that_the_prompt_leaves_open_is_known(tmp_path, template, prompt, opens):
    settings = write(tmp_path / "rows.jsonl", [{"prompt": prompt}])
    assert opened(settings, character_tokenizer(template))[0].opened == opens
