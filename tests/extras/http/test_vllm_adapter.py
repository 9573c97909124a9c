"""LoRA adapters published to vLLM: the client against generations of the server (tests/helpers/fakes)."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from helpers.fakes.connect import NUM_TOKENS, compare_with_records, connected, distinct_samples
from helpers.fakes.vllm import FakeVllm
from tailrace.config import config_of
from tailrace.contracts.trainer import LoraSettings
from tailrace.contracts.weights import Weights
from tailrace.drivers.kinds.base import engine_kind
from tailrace.drivers.trainer.adapter import adapter_tensors, peft_config
from tailrace.drivers.weights.filesystem import FilesystemSender
from tailrace.errors import ConfigError, VersionGone
from tailrace.extras.http.vllm import max_rank, write_plugin
from tailrace.record.events import Recorder
from tailrace.rollout.router import Router
from tailrace.types import Span

LORA = LoraSettings(rank=4, alpha=8.0, publish="adapter")
Publish = Callable[[int], Weights]


pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture(scope="module")
def publish(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Publish:
    folder = tmp_path_factory.mktemp("weights") / "weights"
    sender = FilesystemSender(folder, model, 10**9, peft_config(model, LORA))
    torch.manual_seed(0)
    tensors = {each.name: torch.randn(each.shape) for each in adapter_tensors(model, LORA)}
    return lambda version: sender.store(tensors, version)


def test_peft_reads_a_published_adapter(model: Path, publish: Publish) -> None:
    weights = publish(0)
    base = AutoModelForCausalLM.from_pretrained(model)
    own = dict(base.named_parameters())["model.layers.1.mlp.up_proj.weight"].detach().clone()
    adapted = PeftModel.from_pretrained(base, weights.location)
    factors = {name: each for name, each in adapted.named_parameters() if "layers.1.mlp.up_proj.lora" in name}
    a, b = (next(each for name, each in factors.items() if kind in name) for kind in ("lora_A", "lora_B"))
    merged = dict(adapted.merge_and_unload().named_parameters())["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(merged, own + 2.0 * b @ a)


@pytest.mark.parametrize("generation", ["vllm-0.32", "vllm-0.33"])
async def test_each_request_has_one_adapter_and_goes_on_with_the_next_one_after_an_update(
    generation: str, model: Path, publish: Publish
) -> None:
    with FakeVllm(generation, model, slots=8, step_s=0.004, backend=None, adapters=True) as fake:
        async with connected(fake, lora=LORA) as (engine,):
            router, samples = Router([engine], Recorder()), distinct_samples(20)
            served = [asyncio.ensure_future(router.serve(sample)) for sample in samples]
            for version in (1, 2, 3):
                enough = 200 + sum(each.num_tokens for each in samples)
                while sum(each.num_tokens for each in samples) < enough:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await engine.load(publish(version), kv="keep")
            await asyncio.gather(*served)
            assert engine.usage().num_generated == 20 * NUM_TOKENS
        truth = compare_with_records(samples, [fake])
        assert truth.num_lost == 0 and truth.num_requests > 20
        assert {span.version for sample in samples for span in sample.spans} == {0, 1, 2, 3}
        assert fake.model.violations == [] and len(fake.adapters) == 1
        assert fake.ignored == set()


async def test_an_adapter_that_cannot_be_loaded_leaves_the_one_before(model: Path, publish: Publish) -> None:
    with FakeVllm("vllm-0.33", model, step_s=0.002, adapters=True) as fake:
        async with connected(fake, lora=LORA) as (engine,):
            await engine.load(publish(1), kv="keep")
            fake.failing_updates = 1
            await engine.load(publish(2), kv="keep")
            assert fake.calls.count("/v1/load_lora_adapter") == 3, "it is tried again"
            (sample,) = distinct_samples(1)
            await engine.generate(sample)
            assert [span.version for span in sample.spans] == [2]


async def test_a_server_that_takes_no_adapters_is_refused_with_the_flags(model: Path) -> None:
    with FakeVllm("vllm-0.33", model) as fake:
        lacking = r"/v1/load_lora_adapter: start .* VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora"
        with pytest.raises(ConfigError, match=lacking):
            async with connected(fake, lora=LORA):
                pass


async def test_an_adapter_that_the_server_has_forgotten_is_no_failed_update(
    model: Path, publish: Publish
) -> None:
    with FakeVllm("vllm-0.33", model, step_s=0.002, adapters=True) as fake:
        async with connected(fake, lora=LORA) as (engine,):
            await engine.load(publish(1), kv="keep")
            fake.adapters.clear()
            await engine.load(publish(2), kv="keep")
            assert fake.calls.count("/v1/load_lora_adapter") == 2
            (sample,) = distinct_samples(1)
            await engine.generate(sample)
            assert [span.version for span in sample.spans] == [2]


async def test_a_pinned_request_names_the_adapter_of_its_version_or_is_refused(
    model: Path, publish: Publish
) -> None:
    with FakeVllm("vllm-0.33", model, step_s=0.002, adapters=True) as fake:
        async with connected(fake, lora=LORA.model_copy(update={"versions": 2})) as (engine,):
            samples = distinct_samples(5)
            for sample, pin in zip(samples, (0, 1, 0, 1, 2), strict=True):
                sample.pin = pin
            await engine.load(publish(1), kv="keep")
            await asyncio.gather(*map(engine.generate, samples[:2]))
            await engine.load(publish(2), kv="keep")
            with pytest.raises(VersionGone, match="engine-0 does not have version 0"):
                await engine.generate(samples[2])
            await asyncio.gather(*map(engine.generate, samples[3:]))
        spans = [[Span(version, NUM_TOKENS)] for version in (0, 1, 1, 2)]
        assert [sample.spans for sample in samples if sample.num_tokens] == spans
        assert len(fake.adapters) == 2


async def test_a_server_that_was_started_again_unnoticed_gets_its_adapter_again(
    model: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeVllm("vllm-0.33", model, step_s=0.002, adapters=True) as fake:
        async with connected(fake, lora=LORA) as (engine,):
            await engine.load(publish(1), kv="keep")
            fake.adapters.clear()
            (sample,) = distinct_samples(1)
            await Router([engine], Recorder(), version=1).serve(sample)
            assert fake.calls.count("/v1/load_lora_adapter") == 2
            assert sample.spans == [Span(1, NUM_TOKENS)]


def test_the_least_highest_rank_of_vllm_is_chosen() -> None:
    assert [max_rank(rank) for rank in (1, 2, 16, 17, 512, 513)] == [1, 8, 16, 32, 512, None]


@pytest.mark.parametrize(
    ("engine", "transport", "rank", "problem"),
    [
        ("native", "filesystem", 4, "the embedded engine reads a version in a folder as a whole model"),
        ("vllm", "shared_memory", 4, 'set weights.transport = "filesystem"'),
        ("vllm", "filesystem", 513, "a rank of 512 at most"),
        ("sglang", "filesystem", 4, "'sglang' take whole weights only"),
    ],
)
def test_what_takes_no_adapter_is_refused(engine: str, transport: str, rank: int, problem: str) -> None:
    lora = LORA.model_copy(update={"rank": rank})
    with pytest.raises(ConfigError, match=problem):
        _check_adapter(lora, engine, transport)
    _check_adapter(LORA, "vllm", "filesystem")
    _check_adapter(LORA, "native", "shared_memory")


def _check_adapter(lora: LoraSettings, engine: str, transport: str) -> None:
    sections = {"engine": {"kind": engine}, "weights": {"transport": transport}}
    config = config_of({"run": {"rounds": 1, "group_size": 2}, "schedule": {"name": "serial"}, **sections})
    engine_kind(config).check_adapter(lora, config)


def test_a_server_of_another_environment_can_import_the_plugin(tmp_path: Path) -> None:
    """vLLM's interpreter has no installation of the package."""
    folder = write_plugin(tmp_path)
    entry = "from importlib.metadata import entry_points as all; "
    entry += "each, = all(group='vllm.general_plugins', name='tailrace'); print(each.load().__name__)"
    command = [sys.executable, "-S", "-c", entry]  # without site-packages
    done = subprocess.run(command, env={"PYTHONPATH": str(folder)}, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "register\n"
