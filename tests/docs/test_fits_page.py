"""docs/reference/fits.md has the largest model for each card, by the estimate."""

from pathlib import Path

import pytest

from make_fits import KNOWN, PLACEMENTS, RANK, adapter_parameters, fits, largest, page
from tailrace.contracts.memory import ModelShape
from tailrace.sim.cluster import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fits.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_the_questions_name_the_largest_models_of_a_card_of_24_gib() -> None:
    text = " ".join((PAGE.parents[1] / "start" / "questions.md").read_text().split())
    for placement in PLACEMENTS:
        whole, adapter = (largest(24, placement, 8192, lora=lora) for lora in (False, True))
        assert (
            f"a card of 24 GiB is {whole} with all weights and {adapter} with LoRA, for sequences of" in text
        )


def test_an_adapter_has_two_factors_for_each_linear_layer() -> None:
    """Hidden 10, query 20, key and value 10, feed-forward 20."""
    shape = ModelShape(3400, 2, 10, 4, 2, 5, 20, 100, 64)
    assert adapter_parameters(shape) == 2 * RANK * (2 * 30 + 2 * 20 + 3 * 30)


def test_the_state_alone_bounds_the_model_and_each_smaller_one_fits() -> None:
    """16 bytes a parameter where all weights are trained."""
    for card in (24, 141):
        name = largest(card, "a card each", 2048, lora=False)
        assert 16 * MODELS[name].num_parameters < card * 2**30
        smaller = KNOWN[: KNOWN.index(name)]
        assert all(fits(MODELS[each], card, "a card each", 2048, lora=False) for each in smaller)


@pytest.mark.parametrize("lora", [False, True])
def test_a_longer_sample_a_smaller_card_and_all_weights_never_fit_more(lora: bool) -> None:
    def rank(card: int, length: int, is_adapter: bool) -> int:
        name = largest(card, "one card, in turn", length, lora=is_adapter)
        return KNOWN.index(name) if name in KNOWN else -1

    assert rank(24, 32_768, lora) <= rank(24, 8192, lora) <= rank(80, 8192, lora) <= rank(80, 8192, True)
    assert rank(24, 2048, False) < rank(80, 2048, False) < rank(80, 2048, True)
