"""Text that grows by tokens, whatever the pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tailrace.extras.serve.formats import Text, token_strings
from tailrace.extras.serve.generation import labelled


def byte_tokenizer() -> Tokenizer:
    """One token a byte, as GPT-2 writes bytes; so a character may be several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


BYTES = byte_tokenizer()
END = BYTES.token_to_id("<end>")


def text_of(pieces, stops=(), *, include_stop=False, skip_special=True):
    text = Text(BYTES, stops, include_stop=include_stop, skip_special=skip_special)
    return [text.extend(ids, ended=number == len(pieces) - 1) for number, ids in enumerate(pieces)], text.stop


def cut(ids, places):
    ends = sorted({min(place, len(ids)) for place in places} | {len(ids)})
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_pieces_of_any_bytes_make_the_text_of_all_tokens(ids, places):
    texts, _ = text_of(cut(ids, places))
    assert "".join(texts) == BYTES.decode(ids)


@settings(deadline=None)
@given(st.text(alphabet="abé", max_size=20), st.lists(st.integers(0, 40), max_size=6))
@pytest.mark.parametrize("included", [False, True])
def test_text_ends_at_the_first_stop_string_wherever_pieces_end(included, text, places):
    stops = ("aba", "éé")
    texts, stop = text_of(cut(BYTES.encode(text).ids, places), stops, include_stop=included)
    found = [(text.index(each), each) for each in stops if each in text]
    at, expected = min(found, default=(len(text), None))
    assert ("".join(texts), stop) == (text[: at + len(expected or "") * included], expected)


def test_what_may_begin_a_stop_string_is_held_back():
    texts, _ = text_of([BYTES.encode(piece).ids for piece in ("xa", "b", "c", "ab")], ("aba",))
    assert texts == ["x", "", "abc", "ab"]


def test_a_special_token_is_text_only_if_asked_for():
    ids = [*BYTES.encode("a").ids, END]
    assert text_of([ids])[0] == ["a"]
    assert text_of([ids], skip_special=False)[0] == ["a<end>"]


def test_strings_of_tokens_are_their_text():
    assert token_strings(BYTES)(END) == "<end>"


def test_consecutive_tokens_of_one_label_are_one_span():
    spans = [(0, 3), (1, 4)]
    assert labelled(spans, ["default"] * 2) == [{"version": "default", "start": 0, "end": 7}]
    assert labelled(spans, ["default", "7"]) == [
        {"version": "default", "start": 0, "end": 3},
        {"version": "7", "start": 3, "end": 7},
    ]
    assert labelled([(0, 0), (1, 2)], ["default", "7"]) == [{"version": "7", "start": 0, "end": 2}]
