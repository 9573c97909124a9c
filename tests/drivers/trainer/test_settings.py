"""The [trainer] section refuses what a worker would only find out later."""

import math

import pytest
from pydantic import ValidationError

from tailrace.contracts.trainer import TrainerSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (field, value)
            for field in ("learning_rate", "critic_learning_rate", "max_grad_norm")
            for value in (math.inf, math.nan, -1.0)
        ),
        ("critic_learning_rate", 0.0),
        ("max_grad_norm", 0.0),
        ("weight_decay", math.inf),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("betas", (math.nan, 0.9)),
        ("threads", 0),
        ("threads", 1_000_000),
        ("max_tokens_per_microbatch", 0),
        ("max_tokens_per_microbatch", 2**31),
        ("min_tokens_per_microbatch", 0),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        TrainerSettings.model_validate({field: value})


def test_the_ends_of_each_range_are_accepted() -> None:
    TrainerSettings(learning_rate=0.0)
    TrainerSettings(learning_rate=1.0, betas=(0.0, 0.0), weight_decay=1.0, threads=1024)
    TrainerSettings(max_tokens_per_microbatch=2**31 - 1, min_tokens_per_microbatch=1)


def test_a_gpu_waits_for_full_micro_batches_and_a_cpu_does_not() -> None:
    assert TrainerSettings().least_tokens() == 512
    assert TrainerSettings(device="cuda").least_tokens() == 16_384
    assert TrainerSettings(device="cuda:1", max_tokens_per_microbatch=4096).least_tokens() == 4096
    assert TrainerSettings(device="cuda", min_tokens_per_microbatch=7).least_tokens() == 7
