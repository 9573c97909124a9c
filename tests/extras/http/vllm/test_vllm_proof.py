"""Each fault in the way of weights to a vLLM server is found by the first probe after it and named."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from planted_cases import CAUSES, cause, causes, opened
from vllm_cases import DEADLINE_S

from helpers.faults import LORA
from tailrace.extras.http.dialect import Attempt
from tailrace.extras.http.vllm import VllmAdapters

pytestmark = pytest.mark.vllm


def test_each_fault_is_found_at_the_first_probe_after_it_and_named(tmp_path: Path) -> None:
    found = asyncio.run(asyncio.wait_for(causes(tmp_path), DEADLINE_S))
    for fault, begin in CAUSES.items():
        assert found[fault][0].startswith(begin), fault
        assert found[fault][1] == "", fault
    assert found[""][0] == ""


def test_an_adapter_that_requests_do_not_name_is_found_and_named(tmp_path: Path) -> None:
    class Nameless(VllmAdapters):
        def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
            route, body = super().request(attempt)
            return route, body | {"model": self.model_name}

    async def main() -> None:
        async with opened(tmp_path, LORA) as (published, engine):
            assert await cause(published, engine) == ""
            dialect = engine.dialect
            assert isinstance(dialect, VllmAdapters)
            whole, dialect.__class__ = dialect.__class__, Nameless
            assert (await cause(published, engine)).startswith("adapter not active: ")
            dialect.__class__ = whole
            assert await cause(published, engine) == ""

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
