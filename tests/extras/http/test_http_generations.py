"""One client against every generation of vLLM and SGLang (tests/helpers/fakes)."""

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from helpers.episodes import answer
from helpers.fakes.connect import (
    NUM_TOKENS,
    compare_with_records,
    connected,
    distinct_samples,
    fake_server,
    http_engine,
    salts_of,
    supervised,
)
from helpers.fakes.generations import GENERATIONS
from helpers.fakes.model import text_of
from helpers.fakes.server import FakeServer
from helpers.tiny_models import VOCABULARY
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.weights import TensorInfo, Weights
from tailrace.drivers.engine import supervised as supervision
from tailrace.drivers.weights.filesystem import FilesystemSender
from tailrace.errors import ConfigError, EngineDied, Evicted, ServerRefused, TransferFailed, WeightsRefused
from tailrace.extras.http import engine as http
from tailrace.extras.http.self_test import Expected, check_policy
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.record.events import Recorder
from tailrace.rollout.router import Router
from tailrace.types import KV, Sample, Span

EACH_SERVER = ("vllm-0.33", "sglang-0.5.23")
"""The newest generation of each."""
every_generation = pytest.mark.parametrize(
    "generation",
    [pytest.param(each, marks=[] if each in EACH_SERVER else [pytest.mark.slow]) for each in GENERATIONS],
)
each_server = pytest.mark.parametrize("generation", EACH_SERVER)
Publish = Callable[[int], Weights]
SLOW = {"step_s": 0.004}
"""Decode steps that leave time to do something between them."""


pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture(scope="module")
def publish(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Publish:
    sender = FilesystemSender(tmp_path_factory.mktemp("weights") / "weights", model, 10**9)
    tensors = load_file(model / "model.safetensors")
    return lambda version: sender.store(tensors, version)


def supervised_client(engine: supervision.SupervisedEngine) -> Any:
    """The HTTP client of an engine."""
    process = engine._process
    assert isinstance(process, http.HttpEngine)
    return process.connection.client


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    while not true():  # noqa: ASYNC110  # the server is in another thread
        await asyncio.sleep(0.01)


async def arrived(samples: list[Sample], num: int = 3) -> None:
    """Wait until every sample has some tokens."""
    await until(lambda: all(sample.num_tokens >= num for sample in samples))


def _have(samples: list[Sample], num: int) -> bool:
    return sum(sample.num_tokens for sample in samples) >= num


def _has(sample: Sample, num: int, task: asyncio.Future[None]) -> bool:
    return task.done() or sample.num_tokens >= num


@every_generation
async def test_a_completion_is_what_the_server_generated(generation: str, model: Path) -> None:
    with fake_server(generation, model) as fake:
        async with connected(fake) as (engine,):
            samples = distinct_samples(8)
            await asyncio.gather(*(engine.generate(sample) for sample in samples))
        assert [sample.num_tokens for sample in samples] == [NUM_TOKENS] * 8
        assert {sample.finish_reason for sample in samples} == {"length"}
        assert compare_with_records(samples, [fake]).num_requests == 8
        assert fake.ignored == set()


@every_generation
async def test_tokens_and_versions_equal_the_servers_records_through_aborts_and_updates(
    generation: str, model: Path, publish: Publish
) -> None:
    """On two replicas; over 10,000 tokens on the newest generations, a quarter on the others."""
    num = 80 if generation in EACH_SERVER else 20
    options = {"slots": 8, "step_s": 0.002, "report_every": 5}
    with (
        fake_server(generation, model, **options) as one,
        fake_server(generation, model, **options) as two,
    ):
        async with connected(one, two) as engines:
            router, chance = Router(engines, Recorder()), random.Random(0)
            samples = distinct_samples(num)

            async def serve(sample: Sample) -> None:
                while sample.finish_reason is None:
                    task = asyncio.ensure_future(router.serve(sample))
                    target = sample.num_tokens + chance.randint(1, NUM_TOKENS)
                    await until(partial(_has, sample, target, task))
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

            async def update() -> None:
                kvs: list[KV] = ["keep", "recompute", "recompute", "keep"]
                for version, kv in enumerate(kvs, start=1):
                    await until(partial(_have, samples, version * num * 25))
                    weights = publish(version)
                    await asyncio.gather(*(engine.load(weights, kv=kv) for engine in engines))

            await asyncio.gather(update(), *map(serve, samples))
            assert sum(engine.usage().num_generated for engine in engines) == num * NUM_TOKENS
        truth = compare_with_records(samples, [one, two])
        assert {span.version for sample in samples for span in sample.spans} == {0, 1, 2, 3, 4}
        assert truth.num_requests > num
        for fake in (one, two):
            assert fake.model.violations == []
            assert fake.ignored == set()
            assert fake.model.version == 4


@each_server
async def test_a_later_turn_asks_for_what_is_left_after_the_environments_tokens(
    generation: str, model: Path
) -> None:
    context = 512
    with fake_server(generation, model, max_context=context) as fake:
        async with connected(fake) as (engine,):
            sample, full = distinct_samples(2)
            for each, num in ((sample, 20), (full, context - NUM_TOKENS)):
                each.extend([5] * 8, [-1.0] * 8, 0)
                each.finish_reason = "stop"
                answer(each, [6] * num)
            await engine.generate(sample)
            await engine.generate(full)
        assert (sample.num_tokens, sample.finish_reason) == (NUM_TOKENS, "length")
        assert sample.spans == [Span(0, NUM_TOKENS)]
        assert full.num_context_tokens == context and full.finish_reason == "length"
        one, two = fake.model.requests[-2:]
        assert one.ids == [*sample.prompt.ids, *[5] * 8, *[6] * 20]
        assert two.ids == [*full.prompt.ids, *[5] * 8, *[6] * (context - NUM_TOKENS)]
        assert one.tokens == sample.completion_ids[8:]
        assert one.logprobs == sample.behavior_logprobs[8:]


@every_generation
async def test_a_cancelled_sample_keeps_every_token_and_goes_on_elsewhere(
    generation: str, model: Path
) -> None:
    with fake_server(generation, model, **SLOW) as one, fake_server(generation, model) as two:
        async with connected(one, two) as (engine, other):
            samples = distinct_samples(3)
            tasks = [asyncio.ensure_future(engine.generate(sample)) for sample in samples]
            await arrived(samples)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(0 < sample.num_tokens < NUM_TOKENS for sample in samples)
            assert engine.usage().num_running == 0
            assert compare_with_records(samples, [one]).num_lost == 0
            await asyncio.gather(*(other.generate(sample) for sample in samples))
        assert [sample.num_tokens for sample in samples] == [NUM_TOKENS] * 3
        assert compare_with_records(samples, [one, two]).num_requests == 6
        seeds = {request.seed for request in [*one.model.requests, *two.model.requests][-6:]}
        assert seeds == {None} or len(seeds) == 6


@every_generation
async def test_a_stop_string_over_the_border_of_two_requests_ends_a_completion(
    generation: str, model: Path
) -> None:
    """In its first turn and in a later one. The rest of the request is aborted and not counted."""
    with fake_server(generation, model, **SLOW) as fake:
        for later in (False, True):
            (whole,), (cut,) = distinct_samples(1), distinct_samples(1)
            for sample in (whole, cut):
                sample.greedy = True
                if later:
                    sample.extend([5] * 8, [-1.0] * 8, 0)
                    sample.finish_reason = "stop"
                    answer(sample, [6] * 4)
            had = cut.num_tokens
            async with connected(fake) as (engine,):
                await engine.generate(whole)
                task = asyncio.ensure_future(engine.generate(cut))
                await arrived([cut], had + 3)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            border = cut.num_tokens
            assert had + 3 <= border < NUM_TOKENS - 20
            stop = text_of(whole.completion_ids[border - 2 : border + 3])
            assert stop not in text_of(whole.completion_ids[: border + 2])
            sampling = SamplingSettings(max_completion_tokens=NUM_TOKENS, stop=(stop,))
            async with connected(fake, sampling=sampling) as (engine,):
                await engine.generate(cut)
                assert engine.usage().num_generated == 3
            assert (cut.completion_ids, cut.finish_reason) == (whole.completion_ids[: border + 3], "stop")
            assert cut.behavior_logprobs == whole.behavior_logprobs[: border + 3]
            assert cut.spans == [Span(0, border + 3)]
            last = fake.model.requests[-1]
            assert last.finish == "abort" and 3 <= len(last.tokens) < NUM_TOKENS - border


@every_generation
async def test_the_stop_of_an_earlier_turn_does_not_end_a_later_one(generation: str, model: Path) -> None:
    stop = text_of([7, 8])
    sampling = SamplingSettings(max_completion_tokens=NUM_TOKENS, stop=(stop,))
    with fake_server(generation, model) as fake:
        async with connected(fake, sampling=sampling) as (engine,):
            (sample,) = distinct_samples(1)
            sample.extend([5, 7, 8], [-1.0] * 3, 0)
            sample.finish_reason = "stop"
            answer(sample, [6] * 4)
            await engine.generate(sample)
        assert stop not in text_of(sample.completion_ids[3:])
        assert (sample.num_tokens, sample.finish_reason) == (NUM_TOKENS, "length")


@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
@every_generation
async def test_a_stop_in_the_last_token_of_an_aborted_or_full_request_ends_a_completion(
    generation: str, kind: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gives it the reason "abort" or "length". vLLM drops what is not out yet when it aborts."""
    is_vllm = GENERATIONS[generation].server == "vllm"
    with fake_server(generation, model) as fake:
        (whole,) = distinct_samples(1)
        whole.greedy = True
        async with connected(fake) as (engine,):
            await engine.generate(whole)
        ids = whole.completion_ids
        num = next(n for n in range(40, NUM_TOKENS) if ids[n - 1] not in ids[: n - 1])
        stop = {"stop": (text_of(ids[num - 3 : num]),), "stop_token_ids": (ids[num - 1],)}[kind]
        step = fake.model._step

        def step_after_abort() -> None:
            for request in fake.model.running:
                if len(request.tokens) == num - 1:
                    fake._abort(request)  # type: ignore[attr-defined]
            step()

        for by in ("length",) if is_vllm else ("length", "abort"):
            (cut,) = distinct_samples(1)
            cut.greedy = True
            limit = num if by == "length" else NUM_TOKENS
            sampling = SamplingSettings.model_validate({"max_completion_tokens": limit, kind: stop})
            async with connected(fake, sampling=sampling) as (engine,):
                if by == "abort":
                    monkeypatch.setattr(fake.model, "_step", step_after_abort)
                await engine.generate(cut)
            assert fake.model.requests[-1].finish == ("stop" if is_vllm else by)
            assert (cut.completion_ids, cut.finish_reason) == (ids[:num], "stop")


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@every_generation
async def test_an_update_in_flight_ends_nothing_and_signs_the_tokens_after_it(
    generation: str, kv: KV, model: Path, publish: Publish
) -> None:
    with fake_server(generation, model, **SLOW) as fake:
        async with connected(fake) as (engine,):
            router, samples = Router([engine], Recorder()), distinct_samples(4)
            before, after = samples[:3], samples[3:]
            generation_ends = asyncio.gather(*map(router.serve, before))
            await arrived(before)
            await engine.load(publish(1), kv=kv)
            assert all(sample.num_tokens < NUM_TOKENS for sample in before)
            await asyncio.gather(generation_ends, *map(router.serve, after))
        for sample in before:
            assert [span.version for span in sample.spans] == [0, 1]
            assert sample.num_tokens == NUM_TOKENS
        assert after[0].spans == [Span(1, NUM_TOKENS)]
        compare_with_records(samples, [fake])
        assert fake.model.violations == []
        num_prefills = sum(each.num_prefills for each in fake.model.requests if each.ids[0] in (1, 2, 3))
        assert num_prefills == (3 if kv == "keep" else 6)
        assert salts_of(fake.model.requests)[-1] == "1"


@each_server
async def test_a_server_that_generates_with_older_weights_than_it_was_given_gets_them_again(
    generation: str, model: Path, publish: Publish
) -> None:
    """It was started again between two health checks. Its own word signs the tokens."""
    with fake_server(generation, model) as fake:
        async with connected(fake) as (engine,):
            router, samples = Router([engine], Recorder()), distinct_samples(2)
            await engine.load(publish(1), kv="keep")
            fake.model.version, fake.model.label = 0, "default"
            await router.serve(samples[0])
            await until(lambda: "was started again: it has lost version 1" in engine.why_dead)
            await router.serve(samples[1])
        assert [sample.spans for sample in samples] == [[Span(0, NUM_TOKENS)], [Span(1, NUM_TOKENS)]]
        assert fake.model.version == 1


async def test_preemptions_are_those_of_this_connection_and_not_of_the_servers_whole_life(
    model: Path,
) -> None:
    with fake_server("vllm-0.33", model) as fake:
        for first, last, counted in ((12, 12, 0), (12, 15, 3), (15, 15, 0)):
            engine = http_engine(fake)
            await engine.ready()
            for number in (first, last):
                fake.metrics = f'vllm:num_preemptions_total{{engine="0"}} {number}.0\n'
                await engine.connection.health(deep=True)
            assert engine.usage().num_preempted == counted
            await engine.close()


@each_server
async def test_a_request_that_is_refused_for_now_is_sent_again(generation: str, model: Path) -> None:
    with fake_server(generation, model) as fake:
        async with connected(fake) as (engine,):
            fake.refusals = 2
            (sample,) = samples = distinct_samples(1)
            await engine.generate(sample)
        assert sample.num_tokens == NUM_TOKENS
        assert compare_with_records(samples, [fake]).num_requests == 1


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_server_that_somebody_else_has_paused_is_waited_for(mode: str, model: Path) -> None:
    with fake_server("vllm-0.33", model) as fake:
        async with connected(fake) as (engine,):
            (sample,) = distinct_samples(1)
            client = supervised_client(engine)
            await client.post("/pause", params={"mode": mode})
            task = asyncio.ensure_future(engine.generate(sample))
            await until(lambda: fake.calls.count("/inference/v1/generate") >= 4)
            await client.post("/resume")
            await task
        assert sample.num_tokens == NUM_TOKENS


@each_server
@pytest.mark.parametrize("fault", ["garbage", "truncations"])
async def test_a_broken_reply_costs_a_retry_and_no_token_comes_twice(
    fault: str, generation: str, model: Path
) -> None:
    with fake_server(generation, model) as fake:
        async with connected(fake) as (engine,):
            setattr(fake, fault, 2)
            (sample,) = samples = distinct_samples(1)
            await engine.generate(sample)
            assert engine.usage().num_generated == NUM_TOKENS
        assert sample.num_tokens == NUM_TOKENS
        assert compare_with_records(samples, [fake]).num_requests >= 2


@each_server
async def test_a_server_that_answers_nothing_but_garbage_is_given_up(generation: str, model: Path) -> None:
    with fake_server(generation, model) as fake:
        engine = supervised(fake, "engine-0")
        await engine.open()
        fake.garbage = 10**6
        (sample,) = distinct_samples(1)
        with pytest.raises(EngineDied, match="malformed"):
            await engine.generate(sample)
        assert engine.state == "dead"
        assert sample.num_tokens == 0
        await engine.close()


@each_server
async def test_a_server_that_dies_in_mid_stream_loses_nothing_that_was_reported(
    generation: str, model: Path
) -> None:
    with fake_server(generation, model, **SLOW) as one, fake_server(generation, model) as two:
        async with connected(one, two) as engines:
            router, samples = Router(engines, Recorder()), distinct_samples(8)
            serving = asyncio.gather(*map(router.serve, samples))
            await arrived(samples)
            one.die()
            await serving
            assert engines[0].state == "dead"
            assert sum(engine.usage().num_generated for engine in engines) == 8 * NUM_TOKENS
        assert [sample.num_tokens for sample in samples] == [NUM_TOKENS] * 8
        assert compare_with_records(samples, [one, two]).num_requests == 12


@each_server
async def test_a_server_that_hangs_is_found_by_the_health_check(generation: str, model: Path) -> None:
    with fake_server(generation, model, **SLOW) as one, fake_server(generation, model) as two:
        async with connected(one, two, timeout_s=1.0) as engines:
            router, samples = Router(engines, Recorder()), distinct_samples(4)
            serving = asyncio.gather(*map(router.serve, samples))
            await arrived(samples)
            one.hang()
            await serving
            assert "has not answered for 1 s" in engines[0].why_dead
        compare_with_records(samples, [one, two])


@each_server
async def test_a_server_that_hangs_as_it_falls_asleep_or_wakes_is_found_too(
    generation: str, model: Path
) -> None:
    with fake_server(generation, model) as fake:
        engine = http_engine(fake, timeout_s=1.0)
        try:
            await engine.ready()
            fake.hang()
            for error in await asyncio.gather(engine.sleep(), engine.wake(), return_exceptions=True):
                assert isinstance(error, EngineDied) and "has not answered for 1 s" in str(error)
        finally:
            await engine.close()


DEFECTS = {
    "missing": lambda tensors: tensors[1:],
    "not in the model": lambda tensors: (*tensors, TensorInfo("extra.weight", (2, 2), "float32")),
    "of another shape": lambda tensors: (tensors[0]._replace(shape=(7, 7)), *tensors[1:]),
    "of another type": lambda tensors: (tensors[0]._replace(dtype="bfloat16"), *tensors[1:]),
}


@pytest.mark.parametrize("defect", DEFECTS)
@each_server
async def test_wrong_tensors_are_refused_before_the_server_is_touched(
    generation: str, defect: str, model: Path, publish: Publish
) -> None:
    with fake_server(generation, model) as fake:
        async with connected(fake) as (engine,):
            good = publish(1)
            wrong = Weights(1, good.location, DEFECTS[defect](good.tensors))
            calls = list(fake.calls)
            with pytest.raises(WeightsRefused, match=f"1 {defect}"):
                await engine.load(wrong, kv="keep")
            assert fake.calls == calls
            (sample,) = distinct_samples(1)
            await engine.generate(sample)
            assert sample.spans == [Span(0, NUM_TOKENS)]


@each_server
async def test_a_transfer_that_fails_is_repeated_while_requests_wait(
    generation: str, model: Path, publish: Publish
) -> None:
    with fake_server(generation, model, **SLOW) as fake:
        async with connected(fake) as (engine,):
            samples = distinct_samples(2)
            serving = asyncio.gather(*map(Router([engine], Recorder()).serve, samples))
            await arrived(samples)
            fake.failing_updates = 1
            await engine.load(publish(1), kv="keep")
            assert engine.state == "open"
            await serving
        assert [[span.version for span in sample.spans] for sample in samples] == [[0, 1]] * 2
        compare_with_records(samples, [fake])


async def test_success_false_is_a_failure_whatever_the_status_is(model: Path, publish: Publish) -> None:
    with fake_server("sglang-0.5.20", model, lies=True) as fake:
        engine = http_engine(fake)
        await engine.ready()
        fake.failing_updates = 1
        with pytest.raises(TransferFailed, match="the tensors did not arrive"):
            await engine.load(publish(1), kv="recompute")
        await engine.load(publish(1), kv="recompute")
        assert fake.model.label == "1"
        await engine.close()


@pytest.mark.parametrize("incremental", [False, True])
async def test_streams_of_all_tokens_and_of_the_latest_ones_are_told_apart(
    incremental: bool, model: Path
) -> None:
    with fake_server("sglang-0.5.23", model, incremental=incremental) as fake:
        async with connected(fake) as (engine,):
            samples = distinct_samples(4)
            await asyncio.gather(*(engine.generate(sample) for sample in samples))
        compare_with_records(samples, [fake])


@each_server
async def test_a_server_that_sleeps_comes_back_with_the_newest_weights(
    generation: str, model: Path, publish: Publish
) -> None:
    with fake_server(generation, model, **SLOW) as fake:
        async with connected(fake) as (engine,):
            (sample,) = samples = distinct_samples(1)
            serving = asyncio.ensure_future(engine.generate(sample))
            await arrived(samples)
            await engine.sleep()
            with pytest.raises(Evicted):
                await serving
            assert 0 < sample.num_tokens < NUM_TOKENS
            await engine.load(publish(1), kv="keep")
            await engine.wake()
            await engine.generate(sample)
        assert [span.version for span in sample.spans] == [0, 1]
        assert fake.model.violations == []
        compare_with_records(samples, [fake])


REFUSED = [
    ("vllm-0.32", {"dev_mode": False}, r"the route /pause: .*VLLM_SERVER_DEV_MODE=1"),
    ("vllm-0.32", {"hidden": ["/update_weights"]}, "the route /update_weights"),
    ("vllm-0.32", {"backend": None}, "--weight-transfer-config"),
    ("vllm-0.32", {"dtype": "bfloat16"}, "start it with --dtype float32"),
    ("vllm-0.32", {"max_context": 64}, "its context is 64 tokens"),
    (
        "vllm-0.32",
        {"speculative": True},
        "has processed_logprobs.*: start it with --logprobs-mode raw_logprobs",
    ),
    ("vllm-0.32", {"scale_out": False}, "the route /inference/v1/generate: start .* --enable-scale-out"),
    ("sglang-0.5.23", {"hidden": ["/pause_generation"]}, "the route /pause_generation"),
    ("sglang-0.5.23", {"overlap": True}, "--disable-overlap-schedule"),
    ("sglang-0.5.23", {"dtype": "bfloat16"}, "start it with --dtype float32"),
]


@pytest.mark.parametrize(("generation", "options", "named"), REFUSED)
async def test_a_server_that_cannot_serve_the_run_is_refused_by_name(
    generation: str, options: dict[str, Any], named: str, model: Path
) -> None:
    with fake_server(generation, model, **options) as fake:
        engine = supervised(fake, "engine-0")
        with pytest.raises(ConfigError, match=named) as refusal:
            await engine.open()
        assert (refusal.value.key, refusal.value.value) == ("engine.urls", fake.url)


async def test_a_vllm_of_before_0_32_is_refused_in_one_sentence(model: Path) -> None:
    with fake_server("vllm-0.32", model, dev_mode=False) as fake:
        fake.generation = replace(fake.generation, version="0.31.2")
        refused = r"vLLM 0\.31\.2 lacks what a run needs; it lacks what came with vLLM 0\.32: update vLLM"
        with pytest.raises(ConfigError, match=f"{refused}$"):
            await supervised(fake, "engine-0").open()


async def test_an_unreachable_server_is_refused_by_its_address(model: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        fake = fake_server("vllm-0.32", model)
        fake.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineDied, match=f"{fake.url}.*ConnectError"):
            await supervised(fake, "engine-0").open()


async def test_a_server_of_the_other_kind_is_refused(model: Path) -> None:
    with fake_server("sglang-0.5.23", model) as fake:
        fake.generation = GENERATIONS["vllm-0.32"]  # what the run believes
        with pytest.raises((ConfigError, ServerRefused), match=r"/version|/pause"):
            await supervised(fake, "engine-0").open()


async def compared_with_trainer(
    fake: FakeServer, publish: Publish, off: Sequence[float] = (0.0,), **settings: Any
) -> None:
    """Args: off: of one token after another, the last one of all further tokens."""
    engine = http_engine(fake)
    await engine.ready()
    sampling = SamplingSettings(max_completion_tokens=NUM_TOKENS)
    served = VllmEngineSettings(**{"urls": (fake.url,), **settings})
    expected = Expected(served, sampling, VOCABULARY, NUM_TOKENS)

    async def trainer_logprobs(sample: Sample) -> list[float]:
        offs = [*off, *[off[-1]] * sample.num_tokens]
        return [logprob + each for logprob, each in zip(sample.behavior_logprobs, offs, strict=False)]

    try:
        await check_policy(engine, expected, publish(0), trainer_logprobs)
    finally:
        await engine.close()


@every_generation
async def test_the_self_tests_pass_on_every_generation(
    generation: str, model: Path, publish: Publish
) -> None:
    with fake_server(generation, model) as fake:
        await compared_with_trainer(fake, publish)


@each_server
async def test_a_server_of_another_policy_is_refused(generation: str, model: Path, publish: Publish) -> None:
    with (
        fake_server(generation, model, vocabulary=100) as fake,
        pytest.raises(ConfigError, match="it takes token 61"),
    ):
        await compared_with_trainer(fake, publish)
    with (
        fake_server(generation, model) as fake,
        pytest.raises(ConfigError, match=r"by 0\.2 in the mean \(limit: 0\.01\) and by 0\.2 at most"),
    ):
        await compared_with_trainer(fake, publish, off=[0.2])
    with fake_server(generation, model) as fake, pytest.raises(ConfigError, match="ignores cache_salt"):
        fake.model.ignores_salt = True
        await compared_with_trainer(fake, publish)


LIMITS = [
    ({}, [0.04, 0.009], None),
    ({}, [0.06, 0.0], r"by 0\.06 at most \(limit: 0\.05\)"),
    ({}, [0.011], r"by 0\.011 in the mean \(limit: 0\.01\)"),
    ({"dtype": "bfloat16"}, [2.9, 0.1], None),
    ({"dtype": "bfloat16"}, [3.1, 0.0], r"by 3\.1 at most \(limit: 3\)"),
    ({"dtype": "bfloat16"}, [0.16], r"by 0\.16 in the mean \(limit: 0\.15\)"),
    ({"max_logprob_difference": 0.5}, [0.4, 0.0], None),
    ({"max_logprob_difference": 0.5}, [0.6, 0.0], r"by 0\.6 at most \(limit: 0\.5\)"),
    ({"max_mean_logprob_difference": 0.02}, [0.019], None),
    ({"urls": ()}, [1.0], r"^engine.kind = 'vllm': after its weights were loaded, its log-probs are off"),
]


@pytest.mark.parametrize(("settings", "off", "said"), LIMITS)
async def test_the_mean_and_the_largest_difference_have_limits_by_type_that_the_settings_replace(
    settings: dict[str, Any], off: list[float], said: str | None, model: Path, publish: Publish
) -> None:
    refused = pytest.raises(ConfigError, match=said) if said else nullcontext()
    with fake_server("vllm-0.33", model) as fake, refused:
        await compared_with_trainer(fake, publish, off, **settings)


async def test_completions_that_end_early_are_judged_together(model: Path, publish: Publish) -> None:
    """One token alone may be farther off than the mean of all: here the first of 16 completions."""
    every_token = tuple(range(VOCABULARY))
    sampling = SamplingSettings(max_completion_tokens=NUM_TOKENS, stop_token_ids=every_token)
    probed: list[Sample] = []

    async def trainer_logprobs(sample: Sample) -> list[float]:
        probed.append(sample)
        return [logprob + (len(probed) % 16 == 1) for logprob in sample.behavior_logprobs]

    with fake_server("vllm-0.33", model) as fake:
        engine = http_engine(fake, sampling)
        await engine.ready()
        settings = VllmEngineSettings(urls=(fake.url,), dtype="bfloat16")
        expected = Expected(settings, sampling, VOCABULARY, NUM_TOKENS)
        try:
            await check_policy(engine, expected, publish(0), trainer_logprobs)
        finally:
            await engine.close()
    assert [sample.num_tokens for sample in probed] == [1] * 32
    assert len({tuple(sample.prompt.ids) for sample in probed}) == 16


WRONG = [
    ("vllm-0.32", "/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
    ("vllm-0.32", "/pause?mode=retract", None),
    ("vllm-0.32", "/inference/v1/generate", {"sampling_params": {"max_tokens": 1}}),
    ("vllm-0.33", "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_k": 0.5}}),
    ("vllm-0.33", "/finish_weight_update", {"weight_version": 3}),
    ("sglang-0.5.20", "/pause_generation", {"mode": "keep"}),
    ("sglang-0.5.21", "/generate", {"rid": "a", "input_ids": [1], "sampling_params": {"max_tokens": 1}}),
    ("sglang-0.5.23", "/update_weights_from_disk", {"weight_version": "1"}),
]


@pytest.mark.parametrize(("generation", "route", "body"), WRONG)
def test_a_fake_refuses_what_the_released_server_refuses(
    generation: str, route: str, body: dict[str, Any] | None, model: Path
) -> None:
    with fake_server(generation, model) as fake:
        assert httpx.post(f"{fake.url}{route}", json=body, trust_env=False).status_code == 400


@pytest.mark.parametrize("generation", ["vllm-0.32", "sglang-0.5.23"])
async def test_tokens_that_arrive_after_an_update_have_the_version_that_generated_them(
    generation: str, model: Path, publish: Publish
) -> None:
    """Events reach the client later than the reply to the update."""
    with fake_server(generation, model, **SLOW, event_delay_s=0.2) as fake:
        async with connected(fake) as (engine,):
            samples = distinct_samples(4)
            serving = asyncio.gather(*map(engine.generate, samples))
            await arrived(samples)
            await engine.load(publish(1), kv="keep")
            await serving
        assert {tuple(span.version for span in sample.spans) for sample in samples} == {(0, 1)}
        compare_with_records(samples, [fake])
