"""Samples from the files of a run and from its ledger."""

import dataclasses
import json
from array import array
from pathlib import Path

import pytest

from helpers.record_story import make_group, pipelined_round, play
from tailrace.extras.view.samples import SampleBook, TokenTexts
from tailrace.ledger.base import FORMAT, GroupRow, LifeRow, Origin, RunRow, SampleRow, TokensRow, Transaction
from tailrace.ledger.store import Store
from tailrace.record.events import Stepped
from tailrace.record.samples import SamplesWriter

MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of the quickstart's model, without samples."""
    config = {
        "run": "rounds = 1\ngroup_size = 2",
        "schedule": 'name = "serial"',
        "model": f'path = "{MODEL}"',
    }
    (tmp_path / "config.toml").write_text("\n".join(f"[{name}]\n{text}" for name, text in config.items()))
    return tmp_path


def ids_of(text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = (
        Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )
    return ids


def write_samples(folder: Path, ids: list[int], *, token_samples: int = 2) -> None:
    """A round whose first sample has these tokens, the last two of version 1."""
    story = pipelined_round()
    for step in (event for event in story.events if isinstance(event, Stepped)):
        for sample in step.samples:
            sample.completion_ids, sample.behavior_logprobs = list(ids), [-0.12345] * len(ids)
            sample.attribute(0, [])
            sample.grow(len(ids) - 2, 0)
            sample.grow(2, 1)
    play(story.events, SamplesWriter(folder / "samples", token_samples=token_samples))


def test_tokens_joined_are_the_text() -> None:
    ids = ids_of("17 + 25 = 42")
    texts = TokenTexts([MODEL]).of(ids)
    assert len(texts) == len(ids) and "".join(texts) == "17 + 25 = 42"


def test_a_sample_has_tokens_with_versions_and_log_probs(folder: Path) -> None:
    ids = ids_of("12 + 3")
    write_samples(folder, ids)
    book = SampleBook(folder)
    view = book.find("0.0/1")
    assert view.source == "samples/round_000000.jsonl" and view.note == ""
    assert view.tokens and "".join(view.tokens.texts) == "12 + 3"
    assert view.tokens.logprobs == [-0.1235] * len(ids)
    assert view.spans == [("0", len(ids) - 2), ("1", 2)]
    assert view.record["prompt"] == "question 0" and "completion_ids" not in view.record


def test_only_the_first_samples_of_a_step_have_tokens(folder: Path) -> None:
    write_samples(folder, ids_of("1 + 1"), token_samples=1)
    book = SampleBook(folder)
    assert [book.find(id).tokens is not None for id in ("0.0/0", "0.0/1", "1.0/0")] == [True, False, True]
    view = book.find("0.0/1")
    assert view.tokens is None and view.note == "its tokens were not recorded (record.token_samples)"


def test_a_torn_line_waits_and_a_bad_one_is_named(folder: Path) -> None:
    write_samples(folder, ids_of("1 + 1"))
    path = folder / "samples" / "round_000000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{}\n" + lines[1][:-9])
    book = SampleBook(folder)
    assert [each["id"] for each in book.listed()] == ["0.0/0"]
    assert [(defect.file, defect.line) for defect in book.defects] == [("round_000000.jsonl", 2)]
    with path.open("ab") as file:
        file.write(lines[1][-9:])
    assert book.find("0.0/1").record["reward"] == json.loads(lines[1])["reward"]


def test_a_resumed_run_replaces_its_samples(folder: Path) -> None:
    write_samples(folder, ids_of("1 + 1"))
    book = SampleBook(folder)
    path = folder / "samples" / "round_000000.jsonl"
    (folder / "rest").write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    (folder / "rest").replace(path)
    assert [each["id"] for each in book.listed()] == ["0.0/0"]


def test_a_sample_that_was_not_trained_is_found_in_the_ledger(folder: Path) -> None:
    ids = ids_of("9 - 4")
    sample = make_group(3, [len(ids)], [0.0]).samples[0]
    store = Store.create(folder / "ledger.sqlite")
    spans = [Origin(1, 2, len(ids))]
    rows = [
        RunRow(FORMAT, 4, 0),
        LifeRow(1, 0, 0, 0, 0, 0),
        GroupRow(3, 1, 0, 2, 2, 0, 1, [], None),
        SampleRow(*sample.id, spans, None, "", None, None, None),
        TokensRow(*sample.id, 0, array("i", ids).tobytes(), array("f", [-0.5] * len(ids)).tobytes()),
    ]
    store.commit(Transaction(rows))
    store.close()
    book = SampleBook(folder)
    view = book.find("3.0/0")
    assert view.source == "ledger" and view.spans == [("1.2", len(ids))]
    assert view.tokens and "".join(view.tokens.texts) == "9 - 4" and set(view.tokens.logprobs) == {-0.5}
    assert view.record["fate"] == "alive"
    assert "it has no such sample" in book.find("8.0/0").note


def test_without_a_ledger_the_page_says_so(tmp_path: Path) -> None:
    view = SampleBook(tmp_path).find("0.0/0")
    assert (view.source, view.tokens) == ("", None)
    assert view.note.startswith("it is in no samples file; the ledger: CONFIG")


def test_a_sample_whose_line_is_damaged_is_said_to_be(folder: Path) -> None:
    write_samples(folder, ids_of("1 + 1"))
    path = folder / "samples" / "round_000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"prompt":"', b'"prompt":"\xff'))
    book = SampleBook(folder)
    view = book.find("0.0/0")
    assert view.record == {} and "round_000000.jsonl is damaged" in view.note


def test_samples_are_listed_by_round_and_found_by_text(folder: Path) -> None:
    for round in (0, 1):
        play(pipelined_round(round=round).events, SamplesWriter(folder / "samples"))
    book = SampleBook(folder)
    assert [each["id"] for each in book.listed()][:4] == ["2.0/0", "2.0/1", "3.0/0", "3.0/1"]
    assert {each["round"] for each in book.listed(last_round=0)} == {0}
    assert [each["id"] for each in book.listed(search="QUESTION 3")] == ["3.0/0", "3.0/1"]
    assert book.listed(search="no such text") == book.listed(held_out=True) == []


def test_the_first_sample_of_a_group_has_the_columns_of_the_row(folder: Path) -> None:
    story = pipelined_round()
    group = next(event for event in story.events if isinstance(event, Stepped)).samples[0].group
    row = {"answer": "7", "tests": "assert True\n" * 1_000}
    group.prompt = dataclasses.replace(group.prompt, row=row)
    play(story.events, SamplesWriter(folder / "samples"))
    book = SampleBook(folder)
    assert book.find("0.0/0").record["columns"] == {"answer": "7"}, "long columns are left out"
    assert "columns" not in book.find("0.0/1").record
    assert [each["id"] for each in book.listed(search="'answer': '7'")] == ["0.0/0"]


def test_a_list_shows_the_last_question_without_the_chat_template_and_of_an_earlier_release_the_prompt(
    folder: Path,
) -> None:
    story = pipelined_round()
    group = next(event for event in story.events if isinstance(event, Stepped)).samples[0].group
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "user", "content": "2 + 5?"},
    ]
    group.prompt = dataclasses.replace(
        group.prompt, given=chat, text="<|im_start|>system\nbe brief<|im_end|>"
    )
    play(story.events, SamplesWriter(folder / "samples"))
    book = SampleBook(folder)
    shown = {each["id"]: each["prompt"] for each in book.listed()}
    assert (shown["0.0/0"], shown["0.0/1"], shown["1.0/0"]) == ("2 + 5?", "2 + 5?", "question 1")
    assert book.find("0.0/0").record["prompt"] == "<|im_start|>system\nbe brief<|im_end|>", (
        "as the model sees it"
    )
    path = folder / "samples" / "round_000000.jsonl"
    path.write_text(path.read_text().replace('"asked":', '"unknown":'))
    assert book.listed()[0]["prompt"] == "<|im_start|>system\nbe brief<|im_end|>"
