"""Rows: order, epochs, held-out prompts, chat messages, and rows that are no use."""

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.drivers.data.conftest import character_tokenizer

from tailrace.drivers.data.open import open_prompts, usable_prompts
from tailrace.drivers.data.settings import RowsSettings
from tailrace.errors import BadRow, ConfigError
from tailrace.importing import install


def write(path, rows):
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) + "\n" for row in rows]
    path.write_bytes(b"".join(line.encode() if isinstance(line, str) else line for line in lines))
    return RowsSettings(path=path)


@pytest.fixture
def sums(tmp_path):
    return write(tmp_path / "sums.jsonl", [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(40)])


def test_every_epoch_has_every_training_row_once_in_its_own_order(sums, plain_tokenizer):
    prompts = open_prompts(sums, plain_tokenizer, seed=0, split="train")
    num_train = 40 - 3  # ceil(40 / 16) different prompts are held out
    epochs = [[prompts[e * num_train + i].text for i in range(num_train)] for e in range(3)]
    assert len({frozenset(epoch) for epoch in epochs}) == 1
    assert len(set(epochs[0])) == num_train
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_gives_the_order_but_not_the_split(sums, plain_tokenizer):
    held_out = {
        open_prompts(sums, plain_tokenizer, seed=s, split="eval")[i].text for s in range(5) for i in range(20)
    }
    train = {
        open_prompts(sums, plain_tokenizer, seed=s, split="train")[i].text
        for s in range(5)
        for i in range(80)
    }
    assert len(held_out) == 3
    assert not held_out & train
    first = [open_prompts(sums, plain_tokenizer, seed=s, split="train")[0].text for s in range(5)]
    assert len(set(first)) > 1


@given(st.lists(st.integers(0, 10**9), max_size=20))
def test_access_is_random(tmp_path_factory, plain_tokenizer, indices):
    rows = [{"prompt": str(i)} for i in range(10)]
    settings = write(tmp_path_factory.mktemp("rows") / "r.jsonl", rows)
    one, other = (open_prompts(settings, plain_tokenizer, seed=1, split="train") for _ in range(2))
    assert [one[i] for i in indices] == [other[i] for i in reversed(indices)][::-1]


def test_the_row_keeps_its_columns_for_the_reward(sums, plain_tokenizer):
    prompt = open_prompts(sums, plain_tokenizer, seed=0, split="train")[0]
    assert prompt.row == {"prompt": prompt.text, "answer": int(prompt.text.split()[0]) + 1}
    assert prompt.ids == plain_tokenizer.encode(prompt.text)


def test_equal_prompts_are_on_the_same_side(tmp_path, plain_tokenizer):
    rows = [{"prompt": f"{i % 8}", "copy": i} for i in range(64)]
    settings = write(tmp_path / "r.jsonl", rows)
    sides = {
        split: {open_prompts(settings, plain_tokenizer, seed=0, split=split)[i].text for i in range(64)}
        for split in ("train", "eval")
    }
    assert len(sides["eval"]) == 1
    assert len(sides["train"]) == 7


def test_held_out_rows_can_come_from_their_own_file(tmp_path, plain_tokenizer):
    settings = write(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    write(tmp_path / "test.jsonl", [{"prompt": "c"}, {"prompt": "d"}])
    settings = settings.model_copy(update={"eval_path": tmp_path / "test.jsonl"})
    for split, expected in (("train", {"a", "b"}), ("eval", {"c", "d"})):
        prompts = open_prompts(settings, plain_tokenizer, seed=0, split=split)
        assert {prompts[0].text, prompts[1].text} == expected


def test_chat_messages_go_through_the_chat_template(tmp_path, tokenizer):
    chats = [[{"role": "user", "content": c}] for c in "hi"]
    prompts = open_prompts(
        write(tmp_path / "c.jsonl", [{"prompt": c} for c in chats]), tokenizer, seed=0, split="train"
    )
    assert prompts[0].text in ("<b>u:h;a:", "<b>u:i;a:")
    assert tokenizer.convert_ids_to_tokens(prompts[0].ids)[:3] == ["<b>", "u", ":"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": 1}, "no prompt"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": 3}, "no prompt"),
        ({"prompt": ""}, "no prompt"),
        ({"prompt": []}, "no prompt"),
        ({"prompt": ["hi"]}, "no prompt"),
        ("not json\n", "not a JSON object"),
        ("[1]\n", "not a JSON object"),
        (b'{"prompt": "\xff"}\n', "not a JSON object"),
        (b'{"prompt": "7", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "not a JSON object"),
        ({"prompt": "h", "tools": "[" * 100_000}, "tools that are not JSON"),
    ],
)
def test_a_bad_row_costs_its_own_index_alone(tmp_path, plain_tokenizer, row, reason):
    good = [{"prompt": f"{i}"} for i in range(6)]
    prompts = open_prompts(write(tmp_path / "r.jsonl", [*good, row]), plain_tokenizer, seed=0, split="train")
    reasons = []
    for index in range(6 * 3):  # three epochs of five good rows and the bad one
        try:
            assert prompts[index].text in "012345"
        except BadRow as bad:
            reasons.append(bad.reason)
    assert reasons == [reason] * 3


def test_messages_that_the_chat_template_refuses_are_a_bad_row(tmp_path, tokenizer):
    rows = [{"prompt": [{"rôle": "user", "content": c}]} for c in "ab"]
    prompts = open_prompts(write(tmp_path / "r.jsonl", rows), tokenizer, seed=0, split="train")
    with pytest.raises(BadRow) as bad:
        prompts[0]
    assert bad.value.reason == "messages that the chat template refuses"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a"}] * 3, "data.prompt_column = 'prompt': none of the 3 rows"),
        ([{"prompt": "a"}] * 3, "data.path = .*: it needs two different prompts"),
        ([], "data.path = .*: it is empty"),
        (
            [{"prompt": [{"role": "user", "content": c}]} for c in "ab"],
            "data.prompt_column = .*no chat template",
        ),
    ],
)
def test_rows_that_are_of_no_use_at_all_are_a_config_error(tmp_path, plain_tokenizer, rows, message):
    with pytest.raises(ConfigError, match=message):
        open_prompts(write(tmp_path / "r.jsonl", rows), plain_tokenizer, seed=0, split="train")


def test_a_missing_file_is_a_config_error(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"data\.path = .*there is no such file"):
        open_prompts(RowsSettings(path=tmp_path / "none.jsonl"), tokenizer, seed=0, split="train")


def test_a_prompt_that_leaves_no_room_for_a_completion_is_dropped_with_a_reason(tmp_path, plain_tokenizer):
    """The tokenizer writes one token a character, and a begin-of-text token."""
    settings = write(tmp_path / "r.jsonl", [{"prompt": "x" * n} for n in (3, 4, 5, 6)])
    settings = settings.model_copy(update={"eval_path": settings.path})

    def kept(**limits):
        limited = settings.model_copy(update={k: v for k, v in limits.items() if k == "max_prompt_tokens"})
        context = limits.get("max_context_tokens")
        prompts = open_prompts(limited, plain_tokenizer, seed=0, split="train", max_context_tokens=context)
        found = set()
        for index in range(4):
            try:
                found.add(len(prompts[index].ids))
            except BadRow as bad:
                assert str(bad).startswith("prompt too long: ")
        return found

    assert kept() == {4, 5, 6, 7}
    assert kept(max_context_tokens=7) == {4, 5, 6}
    assert kept(max_prompt_tokens=5) == {4, 5}
    assert kept(max_prompt_tokens=6, max_context_tokens=6) == {4, 5}


def test_rows_that_are_all_too_long_are_a_config_error(sums, plain_tokenizer):
    prompts = open_prompts(sums, plain_tokenizer, seed=0, split="train", max_context_tokens=5)
    with pytest.raises(ConfigError) as refused:
        usable_prompts(prompts, 1)
    said = "data = 'prompt too long: 8 tokens, at most 4 fit (data.max_prompt_tokens)': none of the first"
    assert str(refused.value).startswith(said)


def test_without_datasets_a_parquet_file_is_a_config_error(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "r.parquet").touch()
    with pytest.raises(ConfigError, match=re.escape(f"{install('datasets')}, or give a .jsonl file")):
        open_prompts(RowsSettings(path=tmp_path / "r.parquet"), tokenizer, seed=0, split="train")


def test_a_row_of_verls_columns_is_a_prompt_with_its_source(tmp_path, tokenizer):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    other = {**row, "prompt": [{"role": "user", "content": "2+2"}]}
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list([row, other]).to_parquet(str(path))
    prompt = open_prompts(RowsSettings(path=path, eval_path=path), tokenizer, seed=0, split="train")[0]
    assert prompt.source == "openai/gsm8k"
    assert prompt.given == prompt.row["prompt"]
    assert prompt.row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert prompt.text in ("<b>u:1+1;a:", "<b>u:2+2;a:")


TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_the_tools_of_a_row_are_in_its_prompt(tmp_path, tools):
    template = "{% if tools %}{{ tools[0]['function']['name'] }}|{% endif %}{{ messages[0]['content'] }}"
    row = {"messages": [{"role": "user", "content": "1+1"}], "tools": tools}
    settings = write(tmp_path / "r.jsonl", [row])
    settings = settings.model_copy(update={"prompt_column": "messages", "eval_path": settings.path})
    prompts = open_prompts(settings, character_tokenizer(template), seed=0, split="train")
    assert prompts[0].text == "add|1+1"


@pytest.mark.parametrize(
    ("tools", "reason"),
    [("add", "tools that are not JSON"), (["add"], "tools that are not a list of objects"), ([TOOL], "")],
)
def test_tools_that_cannot_be_used_cost_their_row(tmp_path, plain_tokenizer, tools, reason):
    settings = write(tmp_path / "r.jsonl", [{"prompt": "1", "tools": tools}])
    settings = settings.model_copy(update={"eval_path": settings.path})
    prompts = open_prompts(settings, plain_tokenizer, seed=0, split="train")
    with pytest.raises(BadRow) as bad:
        prompts[0]
    assert bad.value.reason == (reason or "tools without a chat template")
