"""vLLM's n-gram speculation: each token has the log-prob of its version, also one that was drafted."""

import asyncio
from pathlib import Path

import pytest
from vllm_cases import DEADLINE_S, SETTINGS, logprobs, opened

from helpers.engine_contract import ATTEMPTS, fresh_samples
from tailrace.contracts.sampling import SamplingSettings
from tailrace.types import Sample

pytestmark = pytest.mark.vllm
NUM_TOKENS = 400
TOLERANCE = 1e-3
"""As test_vllm_engine.py."""


def test_drafted_tokens_have_the_log_probs_of_their_version(tmp_path: Path) -> None:
    sampling = SamplingSettings(max_completion_tokens=NUM_TOKENS)
    drafting = SETTINGS.model_copy(update={"drafts": "auto", "max_draft_tokens": 4})

    async def updated(engine, models) -> list[Sample]:
        samples = fresh_samples(16)
        served = [asyncio.ensure_future(engine.generate(sample)) for sample in samples]
        while sum(each.num_tokens for each in samples) < 16 * NUM_TOKENS / 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.load(models.weights(1), kv="recompute")
        await asyncio.gather(*served)
        return samples

    async def main() -> None:
        async with opened(runner, tmp_path, drafting, sampling, ["one"]) as servers:
            (engine,), models = servers.engines, servers.models
            for _ in range(ATTEMPTS):  # the server may be ahead of the update
                await engine.load(models.weights(0), kv="recompute")
                samples = await updated(engine, models)
                both = [[logprobs(model, each) for model in models.inner] for each in samples]
                for sample, of_versions in zip(samples, both, strict=True):
                    versions = [span.version for span in sample.spans for _ in range(span.num_tokens)]
                    expected = [of_versions[version][place] for place, version in enumerate(versions)]
                    assert sample.behavior_logprobs == pytest.approx(expected, abs=TOLERANCE)
                if any(len(sample.spans) == 2 for sample in samples):
                    break
            else:
                raise AssertionError(f"the server was ahead in {ATTEMPTS} attempts")
            assert engine.capabilities.drafts and not engine.capabilities.references
            async with asyncio.timeout(DEADLINE_S):
                while engine.usage().decoded.accepted <= 10:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)  # health checks read it
            sums = engine.usage().decoded
            assert sums.checked > sums.drafted > sums.accepted > 10

    with asyncio.Runner() as runner:
        runner.run(main())
