"""The self-test compares a served engine with the trainer: it passes what the types explain, and no fault.

The real model is tested where $TAILRACE_SMOLLM2 names its folder (examples/smollm2/convert.py).
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from helpers.served import TOKEN, served_here
from helpers.tiny_models import letter_tokenizer, tiny_model
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.contracts.weights import DTYPE, Link, Weights
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.weights.transfers import Transfers
from tailrace.errors import ConfigError
from tailrace.extras.http.engine import TOKEN_VARIABLE, HttpEngine
from tailrace.extras.http.self_test import Expected, check_policy, check_server
from tailrace.extras.http.server import JoinedServer
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.extras.http.vllm import detect
from tailrace.model_folder import read_config
from tailrace.types import Sample

SAMPLING = SamplingSettings(max_completion_tokens=256)
CONTEXT = 400
DTYPES: tuple[DTYPE, ...] = ("float32", "bfloat16")
every_pair = pytest.mark.parametrize(("served_dtype", "trained_dtype"), list(product(DTYPES, DTYPES)))
faulty = pytest.mark.parametrize(
    ("folder", "served_dtype"),
    [("tiny", "float32"), ("tiny", "bfloat16"), ("smollm2", "bfloat16")],
    indirect=["folder"],
    scope="module",
)
"""Servers with a fault. In float32 the limits are narrow: the real model shows what the tiny one does."""


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32 that bfloat16 cannot hold exactly, and the same in bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    if request.param == "tiny":
        model, tokenizer = tiny_model(), letter_tokenizer()
    elif path := os.environ.get("TAILRACE_SMOLLM2"):
        model, tokenizer = _unrounded(path), AutoTokenizer.from_pretrained(path)
    else:
        pytest.skip("$TAILRACE_SMOLLM2 is not set")
    for dtype in DTYPES:
        model.to(getattr(torch, dtype)).save_pretrained(folder / dtype)
        tokenizer.save_pretrained(folder / dtype)
    return folder


def _unrounded(path: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1 + (torch.rand_like(weight) - 0.5) / 256
    return model


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[DTYPE, str]]:
    """One for each type, with what the trainer of the float32 model publishes."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        options = ("--weights-folder", str(folder), "--dtype")
        yield {dtype: stack.enter_context(served_here(folder / dtype, *options, dtype)) for dtype in DTYPES}


def checked(
    servers: dict[DTYPE, str],
    served_dtype: DTYPE,
    folder: Path,
    policy: PolicyModel,
    trained_dtype: DTYPE = "float32",
    fault: Callable[[list[float]], list[float]] = list,
) -> None:
    """Run the self-test of a server against a trainer's policy."""
    settings = VllmEngineSettings(urls=(servers[served_dtype],), dtype=served_dtype)
    vocabulary = read_config(folder / served_dtype)["vocab_size"]
    expected = Expected(settings, SAMPLING, vocabulary, CONTEXT, trained_dtype)

    async def trainer_logprobs(sample: Sample) -> list[float]:
        return fault(policy.logprobs_of([TrainingSample.of(sample)])[0])

    async def check(engine: HttpEngine) -> None:
        await check_server(engine.connection, expected)
        await check_policy(engine, expected, Weights(0, str(folder / served_dtype)), trainer_logprobs)

    async def in_files(weights: Weights, link: Link) -> None:
        """The trainer's half of a transfer in files."""

    async def main() -> None:
        engine = HttpEngine(
            "engine-0",
            JoinedServer(servers[served_dtype]),
            lambda client: detect(client, SAMPLING, ()),
            health_timeout_s=60.0,
            check=check,
            transfers=Transfers(in_files),
            expected=expected_tensors(folder / served_dtype, served_dtype),
            decode=str,
        )
        try:
            await engine.ready()
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 300))


def trainer(model: Path, dtype: DTYPE = "float32", temperature: float = 1.0) -> PolicyModel:
    return PolicyModel.load(model, TrainerSettings(dtype=dtype), temperature=temperature)


@every_pair
def test_a_server_of_the_trainers_weights_passes_in_every_type(
    servers: dict[DTYPE, str], folder: Path, served_dtype: DTYPE, trained_dtype: DTYPE
) -> None:
    checked(servers, served_dtype, folder, trainer(folder / "float32", trained_dtype), trained_dtype)


def another_seed(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.copy_(torch.randn_like(weight) * weight.std())


def without_a_tensor(model: PreTrainedModel) -> None:
    model.get_parameter("model.layers.1.self_attn.o_proj.weight").zero_()


@faulty
@pytest.mark.parametrize("change", [another_seed, without_a_tensor])
def test_a_server_with_other_weights_is_refused(
    servers: dict[DTYPE, str],
    folder: Path,
    served_dtype: DTYPE,
    change: Callable[[PreTrainedModel], None],
    tmp_path: Path,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "float32", dtype=torch.float32)
    with torch.no_grad():
        change(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"off the trainer's by .* in the mean \(limit: .*at most \(limit: "
    ):
        checked(servers, served_dtype, folder, trainer(tmp_path))


@faulty
def test_log_probs_at_another_temperature_are_refused(
    servers: dict[DTYPE, str], folder: Path, served_dtype: DTYPE
) -> None:
    with pytest.raises(ConfigError, match="off the trainer's by"):
        checked(servers, served_dtype, folder, trainer(folder / "float32", temperature=0.8))


@faulty
def test_log_probs_of_the_next_token_are_refused(
    servers: dict[DTYPE, str], folder: Path, served_dtype: DTYPE
) -> None:
    policy = trainer(folder / "float32")
    with pytest.raises(ConfigError, match="off the trainer's by"):
        checked(servers, served_dtype, folder, policy, fault=lambda found: [*found[1:], found[0]])


def test_a_float32_server_whose_log_probs_have_the_errors_of_bfloat16_is_refused(
    servers: dict[DTYPE, str], folder: Path
) -> None:
    """0.04 in the mean is what a bfloat16 server of SmolLM2-135M has."""

    def rounded(found: list[float]) -> list[float]:
        return [value + 0.04 * (-1) ** position for position, value in enumerate(found)]

    with pytest.raises(ConfigError, match=r"\(limit: 0\.01\)"):
        checked(servers, "float32", folder, trainer(folder / "float32"), fault=rounded)
