"""vLLM over HTTP keeps the contract of engines. What the ledger gets is what the server says, and what a
reference computes."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from vllm_cases import NUM_TOKENS, Models, Servers, joined, logprobs, told_count, told_ids, told_spans

from helpers.engine_contract import ATTEMPTS, Ahead, EngineContract, Main, fresh_samples
from tailrace.contracts.engine import Engine
from tailrace.contracts.weights import TensorInfo, Weights
from tailrace.errors import TransferFailed, WeightsRefused
from tailrace.extras.http.dialect import Attempt
from tailrace.extras.http.engine import Connection
from tailrace.types import KV, Sample, Span

pytestmark = pytest.mark.vllm
TOLERANCE = 1e-3
"""Between log-probs of vLLM and of transformers, in nats."""


async def all_under_way(samples: Sequence[Sample], num_tokens: int = 1) -> None:
    while not all(sample.num_tokens >= num_tokens for sample in samples):  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def run_in_time(servers: Servers, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Repeat a test in which the server was ahead: on two cores its processes can keep the client waiting."""
    for _ in range(ATTEMPTS):
        with suppress(Ahead):
            return servers.run(main())
    raise AssertionError(f"the server was ahead in {ATTEMPTS} attempts")


class TestVllm(EngineContract):
    NUM_TOKENS = NUM_TOKENS

    @pytest.fixture(autouse=True)
    def _use(self, servers: Servers) -> None:
        self.servers = servers

    def drive(self, main: Main) -> None:
        run_in_time(self.servers, lambda: main(*self.servers.engines))

    async def under_way(self, engine: Engine, samples: Sequence[Sample]) -> None:
        await all_under_way(samples)

    async def cancelled(self, engine: Engine, num: int) -> list[Sample]:
        """Among others: on two cores a server can end a few sequences before the client gets a core."""
        others = [asyncio.ensure_future(engine.generate(sample)) for sample in fresh_samples(32)]
        try:
            return await super().cancelled(engine, num)
        finally:
            await asyncio.gather(*others)

    def weights(self, version: int) -> Weights:
        return self.servers.models.weights(version)


def mixed_logprobs(models: Models, sample: Sample, kv: KV) -> list[float]:
    """The log-probs of a sample of version 0, then 1, computed as the engine does.

    With kv="keep" version 1 reads the keys and values that version 0 has computed: all but those of its last
    token, which is computed together with the token after it.
    """
    old, new = models.inner
    num_old = sample.spans[0].num_tokens
    if kv == "recompute":
        return [*logprobs(old, sample)[:num_old], *logprobs(new, sample)[num_old:]]
    ids = torch.tensor([[*sample.prompt.ids, *sample.completion_ids]])
    start = len(sample.prompt.ids)
    cut = start + num_old - 1
    cache = DynamicCache()
    with torch.no_grad():
        before = old(ids[:, :cut], past_key_values=cache).logits
        after = new(ids[:, cut:], past_key_values=cache).logits
    # The token at `cut` follows the position before it, which version 0 computed.
    every = torch.cat([before, after], dim=1)[0].float().log_softmax(-1)
    places = torch.arange(start - 1, ids.shape[1] - 1)
    return every[places, ids[0, start:]].tolist()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_new_weights_in_flight_change_what_32_sequences_compute_and_nothing_else(
    servers: Servers, kv: KV
) -> None:
    async def main() -> None:
        engine, record = servers.engines[0], servers.records[0]
        samples, known = fresh_samples(32), len(record)
        generation = asyncio.gather(*(engine.generate(sample) for sample in samples))
        await all_under_way(samples, 20)
        await engine.load(servers.models.weights(1), kv=kv)
        ended = [sample for sample in samples if sample.finish_reason]
        await generation
        if ended:
            raise Ahead
        told = list(record.values())[known:]
        assert len(told) == 32  # nothing was asked for twice
        by_tokens = {tuple(told_ids(events)): told_spans(events) for events in told}
        worst = 0.0
        for sample in samples:
            assert sample.num_tokens == NUM_TOKENS
            assert [span.version for span in sample.spans] == [0, 1]
            assert sample.spans == by_tokens[tuple(sample.completion_ids)]
            reference = mixed_logprobs(servers.models, sample, kv)
            pairs = zip(sample.behavior_logprobs, reference, strict=True)
            worst = max(worst, *(abs(mine - theirs) for mine, theirs in pairs))
        assert worst < TOLERANCE

    run_in_time(servers, main)


def test_over_10000_tokens_with_aborts_and_updates_the_samples_are_what_the_servers_say(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live(sample: Sample, chance: random.Random) -> int:
        num_cancelled = 0
        while sample.finish_reason is None:
            generation = asyncio.create_task(servers.engines[chance.randrange(2)].generate(sample))
            done, _ = await asyncio.wait([generation], timeout=chance.expovariate(1 / 2.0))
            if not done:
                generation.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await generation
                num_cancelled += 1
            else:
                generation.result()
        return num_cancelled

    async def publish(chance: random.Random) -> None:
        for version in range(1, 100):
            await asyncio.sleep(1.0)
            kv: KV = "keep" if chance.random() < 0.5 else "recompute"
            await asyncio.gather(
                *(engine.load(servers.models.weights(version), kv=kv) for engine in servers.engines)
            )

    async def main() -> None:
        chance = random.Random(0)
        counted = sum(engine.usage().num_generated for engine in servers.engines)
        samples = fresh_samples(24)
        publishing = asyncio.create_task(publish(chance))
        num_cancelled = sum(await asyncio.gather(*(live(sample, chance) for sample in samples)))
        publishing.cancel()
        await asyncio.wait([publishing])
        num_tokens = sum(sample.num_tokens for sample in samples)
        assert num_tokens == 24 * NUM_TOKENS > 10_000
        assert num_cancelled > 0
        assert sum(engine.usage().num_generated for engine in servers.engines) - counted == num_tokens
        record = {id: events for each in servers.records for id, events in each.items()}
        for sample in samples:
            told = [record[id] for id in asked[sample] if id in record]
            assert sample.completion_ids == [id for events in told for id in told_ids(events)]
            assert sample.spans == joined([span for events in told for span in told_spans(events)])
            assert sum(told_count(events) for events in told) == sample.num_tokens

    asked: dict[Sample, list[str]] = {}

    def noting(connection: Connection, sample: Sample, max_tokens: int, version: int) -> Attempt:
        attempt = ask(connection, sample, max_tokens, version)
        asked.setdefault(sample, []).append(f"generate-tokens-{attempt.id}")
        return attempt

    ask = Connection.attempt
    monkeypatch.setattr(Connection, "attempt", noting)
    servers.run(main())


def test_misshapen_weights_are_refused_before_the_server_is_asked(servers: Servers) -> None:
    async def main() -> None:
        wrong = (TensorInfo("model.norm.weight", (1,), "float32"),)
        with pytest.raises(WeightsRefused, match=r"1 of another shape: model\.norm\.weight"):
            await servers.engines[0].load(Weights(1, "nowhere", wrong), kv="keep")

    servers.run(main())


def test_a_transfer_that_fails_leaves_the_old_weights(servers: Servers) -> None:
    async def main() -> None:
        engine = servers.engines[0]
        (sample,) = fresh_samples(1)
        assert engine._process is not None
        with pytest.raises(TransferFailed, match=r"one: .*nowhere"):
            await engine._process.load(Weights(1, "/nowhere.safetensors"), kv="keep")
        await engine.generate(sample)
        assert sample.spans == [Span(0, NUM_TOKENS)]
        reference = logprobs(servers.models.inner[0], sample)
        assert sample.behavior_logprobs == pytest.approx(reference, abs=TOLERANCE)

    servers.run(main())


def test_greedy_completions_are_the_most_likely_tokens(servers: Servers) -> None:
    async def main() -> None:
        (sample,) = fresh_samples(1)
        sample.greedy = True
        await servers.engines[0].generate(sample)
        ids = torch.tensor([[*sample.prompt.ids, *sample.completion_ids]])
        with torch.no_grad():
            likeliest = servers.models.inner[0](ids).logits[0].argmax(-1)
        assert sample.completion_ids == likeliest[len(sample.prompt.ids) - 1 : -1].tolist()

    servers.run(main())
