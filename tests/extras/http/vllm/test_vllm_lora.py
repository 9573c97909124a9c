"""LoRA adapters published to a real vLLM server: every token has the log-prob of its version's adapter."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from vllm_cases import CONTEXT, DEADLINE_S, SETTINGS, in_files, logprobs

from helpers.engine_contract import ATTEMPTS, fresh_samples
from helpers.tiny_models import VOCABULARY, save_tiny_model
from tailrace.contracts.engine import TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import LoraSettings
from tailrace.contracts.weights import Weights
from tailrace.drivers.engine.supervised import SupervisedEngine
from tailrace.drivers.trainer.adapter import adapter_tensors, peft_config
from tailrace.drivers.weights.filesystem import FilesystemSender
from tailrace.drivers.weights.transfers import Transfers
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.extras.http import vllm
from tailrace.extras.http.engine import HttpEngine
from tailrace.extras.http.self_test import Expected, check_policy, check_server
from tailrace.extras.http.server import ManagedServer, ServerJob, free_port
from tailrace.extras.http.vllm import write_plugin
from tailrace.record.events import Recorder
from tailrace.rollout.router import Router
from tailrace.types import Sample

pytestmark = pytest.mark.vllm
LORA = LoraSettings(rank=4, alpha=8.0, publish="adapter")
NUM_TOKENS = 400
TOLERANCE = 1e-3
"""As test_vllm_engine.py."""


class Publications:
    """A model, and random adapters for it; version 0 changes nothing."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        save_tiny_model(self.model, head_dim=32, max_position_embeddings=CONTEXT)
        self._sender = FilesystemSender(folder / "weights", self.model, 10**9, peft_config(self.model, LORA))
        self.policies: list[torch.nn.Module] = []
        """The model with the adapter of each version."""

    def publish(self) -> Weights:
        version = len(self.policies)
        chance = torch.Generator().manual_seed(version)
        tensors = {
            each.name: 0.3 * min(version, 1) * torch.randn(each.shape, generator=chance)
            for each in adapter_tensors(self.model, LORA)
        }
        weights = self._sender.store(tensors, version)
        base = AutoModelForCausalLM.from_pretrained(self.model).eval()
        self.policies.append(PeftModel.from_pretrained(base, weights.location).eval())
        return weights

    def difference(self, sample: Sample) -> float:
        """How far the log-probs of a sample are from those of its versions."""
        by_version = [logprobs(policy, sample) for policy in self.policies]  # type: ignore[arg-type]
        versions = [span.version for span in sample.spans for _ in range(span.num_tokens)]
        wanted = [by_version[version][place] for place, version in enumerate(versions)]
        return max(abs(have - want) for have, want in zip(sample.behavior_logprobs, wanted, strict=True))


@asynccontextmanager
async def opened(folder: Path, num_adapters: int) -> AsyncIterator[tuple[Publications, SupervisedEngine]]:
    """A server that keeps so many adapters, with that of version 0."""
    sampling = SamplingSettings(max_completion_tokens=NUM_TOKENS)
    published, port = Publications(folder), free_port()
    expected = Expected(SETTINGS, sampling, VOCABULARY, CONTEXT)
    launch = vllm.launch(
        SETTINGS,
        sampling,
        model=published.model,
        max_context=CONTEXT,
        port=port,
        plugins=write_plugin(folder / "plugin"),
        adapter=LORA.model_copy(update={"versions": num_adapters}),
    )
    job = ServerJob(command=launch.command, env=dict(launch.env))

    async def policy_logprobs(sample: Sample) -> list[float]:
        return logprobs(published.policies[0], sample)  # type: ignore[arg-type]

    async def check(engine: HttpEngine) -> None:
        await check_server(engine.connection, expected)
        await check_policy(engine, expected, published.publish(), policy_logprobs)

    async def begin() -> HttpEngine:
        server = await ManagedServer.start("vllm", job, LocalSpawner(folder), port, DEADLINE_S)
        return HttpEngine(
            "vllm",
            server,
            lambda client: vllm.detect(client, sampling, (), num_adapters=num_adapters),
            health_timeout_s=60.0,
            check=check,
            transfers=Transfers(in_files),
            expected=adapter_tensors(published.model, LORA),
            decode=str,
        )

    engine = SupervisedEngine("vllm", SETTINGS.max_num_seqs, begin, TokenCounter(), num_adapters)
    try:
        await engine.open()
        yield published, engine
    finally:
        await engine.close()


async def until(samples: Sequence[Sample], share: float) -> None:
    """Wait until they have a share of their tokens."""
    while sum(each.num_tokens for each in samples) < share * len(samples) * NUM_TOKENS:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_updates_in_flight_give_each_token_the_log_prob_of_its_own_adapter(tmp_path: Path) -> None:
    async def updated_twice(published: Publications, engine: SupervisedEngine) -> list[Sample]:
        """Samples, with a new adapter after a fifth of their tokens and after half."""
        router, samples = Router([engine], Recorder()), fresh_samples(8)
        served = [asyncio.ensure_future(router.serve(sample)) for sample in samples]
        for share in (0.2, 0.5):
            await until(samples, share)
            await engine.load(published.publish(), kv="keep")
        await asyncio.gather(*served)
        return samples

    async def main() -> None:
        async with opened(tmp_path, 1) as (published, engine):
            for _ in range(ATTEMPTS):  # the server may be ahead of the second update
                samples = await updated_twice(published, engine)
                assert max(map(published.difference, samples)) < TOLERANCE
                assert min(map(published.difference, samples)) > 0
                if len({span.version for sample in samples for span in sample.spans}) == 3:
                    return
        raise AssertionError(f"in {ATTEMPTS} attempts the completions ended before the second update")

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_pinned_sample_ends_on_its_own_adapter_beside_those_of_the_next_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, 2) as (published, engine):
            router = Router([engine], Recorder())
            router.versions.pinned = 2
            waves = [fresh_samples(8) for _ in range(3)]
            served = []
            for version, wave in enumerate(waves):
                if version:
                    weights = published.publish()
                    await router.withdraw(0, version)
                    await engine.load(weights, kv="keep")
                    router.loaded(0, version)
                    router.versions.newest = version
                    beside = [each.num_tokens for each in waves[version - 1]]
                    assert max(beside) < NUM_TOKENS, "the wave before is still in flight"
                served += [asyncio.ensure_future(router.serve(sample)) for sample in wave]
                await until(wave, 0.1)
            await asyncio.gather(*served)
            for version, wave in enumerate(waves):
                assert {span.version for sample in wave for span in sample.spans} == {version}
                assert max(map(published.difference, wave)) < TOLERANCE
                is_gone = [sample.finish_reason is None for sample in wave]
                assert is_gone == [version == 0] * 8, "two versions are served: the first one went"

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
