"""What a request to a server asks for."""

from typing import Any

import httpx
import pytest

from tailrace.contracts.sampling import SamplingSettings
from tailrace.extras.http.dialect import Attempt, Dialect
from tailrace.extras.http.sglang import Sglang
from tailrace.extras.http.vllm import Vllm

SAMPLING = SamplingSettings(top_p=0.9)
COMMON: dict[str, Any] = {"client": httpx.AsyncClient(), "sampling": SAMPLING, "stop_token_ids": [2]}


@pytest.mark.parametrize(
    ("greedy", "own", "asked"), [(False, None, 0.8), (False, 0.6, 0.6), (True, None, 0.0), (True, 0.6, 0.0)]
)
def test_a_sample_may_have_a_temperature_of_its_own(greedy: bool, own: float | None, asked: float) -> None:
    attempt = Attempt("a", [1], 5, seed=0, greedy=greedy, salt="", temperature=own)
    assert attempt.temperature_or(0.8) == asked


@pytest.mark.parametrize(
    "dialect",
    [
        Vllm(**COMMON, server="vLLM", model_name="m"),
        Sglang(**COMMON, server="SGLang", salt_field="salt", can_retract=True),
    ],
    ids=["vllm", "sglang"],
)
def test_a_sample_may_have_a_top_p_of_its_own(dialect: Dialect) -> None:
    for own, asked in ((None, 0.9), (0.7, 0.7), (1.0, 1.0)):
        _, body = dialect.request(Attempt("a", [1], 5, seed=0, greedy=False, salt="", top_p=own))
        assert body["sampling_params"]["top_p"] == asked
