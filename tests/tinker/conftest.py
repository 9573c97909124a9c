"""A server of Tinker's API, and clients of the released SDK."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tinker_cases import QUICKSTART, Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The quickstart's model, all weights trained, in the type in which it learns alike on any processor."""
    types = ("--dtype", "float32", "--trainer.dtype", "float32")
    with serving(QUICKSTART, tmp_path_factory.mktemp("tinker"), *types) as started:
        yield started


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[[], Any]]:
    """Makes clients of the server; they are closed after the test."""
    tinker = pytest.importorskip("tinker")
    clients = []

    def make() -> Any:
        clients.append(client := tinker.ServiceClient(base_url=server.url, api_key="tml-any"))
        return client

    yield make
    for client in clients:
        client.close("success").result()
