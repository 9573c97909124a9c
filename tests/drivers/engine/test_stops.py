"""Stop strings in the text of byte-level tokens."""

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tailrace.drivers.engine.stops import first_stop


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("stop", ["é", " 日本", "👍🏽", "</answer>"])
def test_a_stop_string_is_found_over_every_border_of_its_tokens(tokenizer: Tokenizer, stop: str) -> None:
    """Also within a character."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    opened, ids, more = (tokenizer.encode(text).ids for text in ("ê ü" * 9 + "< ", stop, " ü and more"))
    for cut in range(1, len(ids)):
        before = [*opened, *ids[:cut]]
        assert first_stop(decode, before, [*ids[cut:], *more], ("absent", stop), ()) == len(ids) - cut
        assert first_stop(decode, before, ids[cut:-1], ("absent", stop), ()) is None
        assert first_stop(decode, before, [*more, *ids[cut:]], ("absent", stop), more[-1:]) == len(more)
    assert first_stop(decode, opened, more, (), more[2:3]) == 3
