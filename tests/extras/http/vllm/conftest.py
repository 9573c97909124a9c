"""The servers, for all tests of this folder."""

import asyncio
from collections.abc import Iterator

import pytest
from vllm_cases import Servers, opened


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """They take about a minute to start."""
    with asyncio.Runner() as runner:
        context = opened(runner, tmp_path_factory.mktemp("vllm"))
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))
