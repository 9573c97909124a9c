"""A server of Tinker's API, and clients of the released SDK."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tinker_cases import QUICKSTART, Server, clients_of, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The quickstart's model, all weights trained, in the type in which it learns alike on any processor."""
    types = ("--dtype", "float32", "--trainer.dtype", "float32")
    with serving(QUICKSTART, tmp_path_factory.mktemp("tinker"), *types) as started:
        yield started


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[[], Any]]:
    with clients_of(server) as make:
        yield make
