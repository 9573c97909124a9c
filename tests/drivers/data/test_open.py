"""Lengths of prompts and completions against the context of the model."""

import pytest

from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.open import check_lengths
from tailrace.errors import ConfigError


def test_lengths_that_leave_room_for_the_other_part_are_accepted():
    check_lengths(SamplingSettings(max_completion_tokens=99), max_context_tokens=100, max_prompt_tokens=99)


@pytest.mark.parametrize(
    ("completion", "prompt", "said"),
    [
        (
            100,
            None,
            "sampling.max_completion_tokens = 100: the model's context is 100 tokens, which leaves none for "
            "the prompt; choose at most 99, or a model with a longer context",
        ),
        (
            1,
            200,
            "data.max_prompt_tokens = 200: the model's context is 100 tokens, which leaves none for "
            "the completion; choose at most 99, or a model with a longer context",
        ),
    ],
)
def test_a_length_that_fills_the_context_is_refused(completion, prompt, said):
    with pytest.raises(ConfigError) as refused:
        sampling = SamplingSettings(max_completion_tokens=completion)
        check_lengths(sampling, max_context_tokens=100, max_prompt_tokens=prompt)
    assert str(refused.value) == said
