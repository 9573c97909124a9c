"""A real server for the tests of a file, and an engine in this process to compare it with."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from serve_cases import CHAT_TEMPLATE, MODEL_NAME

from helpers.served import TOKEN, served_here
from helpers.tiny_models import letter_tokenizer, save_tiny_model
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`: the served one; `weights`: what the server may load: `new.safetensors` and a folder."""
    folder = tmp_path_factory.mktemp("served")
    save_tiny_model(folder / "model")
    letter_tokenizer(CHAT_TEMPLATE).save_pretrained(folder / "model")
    save_tiny_model(folder / "weights" / "new", seed=1)
    save_tiny_model(folder / "weights" / "old", seed=0)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Of the server."""
    options = ["--weights-folder", str(folder / "weights"), "--served-model-name", MODEL_NAME]
    with served_here(folder / "model", *options) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """Bears the token."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """The official client, without the token."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def native(folder: Path) -> NativeEngine:
    """The same model in this process."""
    sampling = SamplingSettings(max_completion_tokens=512)
    return NativeEngine(folder / "model", NativeEngineSettings(max_num_seqs=256), sampling)
