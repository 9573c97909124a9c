"""Runs whose trainer and engine are at a service with Tinker's API."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tinker_cases import BASE, QUICKSTART, Server

from helpers.engine_contract import fresh_samples
from tailrace.algo.base import AlgorithmSettings
from tailrace.api import load_config, train
from tailrace.contracts.engine import TokenCounter
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.errors import ConfigError, VersionGone, WorkerDied
from tailrace.extras.tinker.settings import TinkerEngineSettings
from tailrace.types import Prompt, Sample, SampleId

pytestmark = [pytest.mark.tinker, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parent.parent.parent.parent
CONFIG = QUICKSTART.parent / "quickstart.toml"
SCHEDULES = {
    "serial": {"groups_per_round": 16, "groups_per_step": 16},
    "rolloutpipe": {"groups_per_round": 16, "groups_per_step": 8},
    "april": {"groups_per_round": 16, "groups_launched": 24},
    "pipelinerl": {"groups_per_step": 16, "in_flight_per_engine": 128, "ring_groups": 32},
}


@pytest.fixture
def at_service(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of a run on the server of the tests."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    return {
        "engine.kind": "tinker",
        "engine.urls": json.dumps([server.url]),
        "engine.base_model": BASE,
        "engine.chunk_tokens": "64",
        "trainer.kind": "tinker",
        "algorithm.old_policy": "recorded",
        "run.eval_every": "0",
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_learns_at_a_service(name: str, at_service: dict[str, str], tmp_path: Path) -> None:
    # With the seed 0 `serial` learns nothing in 16 steps, without a service as with one.
    config = load_config(CONFIG, {**at_service, "run.rounds": "20", "run.seed": "1"})
    config = config.model_copy(update={"schedule": {"name": name, **SCHEDULES[name]}})
    train(config, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "loss" in row]
    quarter = len(rewards) // 4
    assert fmean(rewards[-quarter:]) > fmean(rewards[:quarter]) + 0.15, rewards
    assert rows[0]["mismatch_kl"] < 0.001  # of the weights that generated: the engines' numerics alone


def test_nothing_is_lost_when_a_run_or_its_service_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "crash.py"), "--task", "service", "--kills", "4"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    found = tmp_path / "found.json"
    subprocess.run([*words, "--json", str(found)], check=True, env=environment)
    results = json.loads(found.read_text())
    assert results["tokens_generated"] > 0
    assert [results[key] for key in ("tokens_unaccounted", "trained_twice", "lost")] == [0, 0, 0]


def refusal(config: Path, folder: Path, **options: str) -> str:
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    command = [
        sys.executable,
        "-m",
        "tailrace.cli",
        "train",
        str(config),
        "--output-dir",
        str(folder),
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.kind": "torch"}, "engine and trainer are of one service"),
        ({"algorithm.loss": "gspo"}, "Tinker's API has grpo, cispo, reinforce"),
        ({"algorithm.kl_coef": "0.1"}, "Tinker's losses have no KL to a reference"),
        ({"algorithm.old_policy": "recomputed"}, "a service computes no old log-probs"),
        ({"placement.kind": "colocated"}, "the devices are the service's"),
    ],
)
def test_what_a_service_cannot_do_is_refused_before_anything_starts(
    changes: dict[str, str], message: str, at_service: dict[str, str], tmp_path: Path
) -> None:
    assert message in refusal(CONFIG, tmp_path / "run", **{**at_service, **changes})


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"engine.urls": '["http://127.0.0.1:1"]'}, "tml-any", "no service with Tinker's API answers there"),
        ({}, "", "the service needs a key"),
        ({"engine.base_model": "other"}, "tml-any", "the service has no such model; choose from quickstart"),
    ],
)
def test_a_service_without_an_answer_a_key_or_the_model_is_named(
    changes: dict[str, str],
    key: str,
    message: str,
    at_service: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    assert message in refusal(CONFIG, tmp_path / "run", **{**at_service, **changes})


def test_an_error_of_ours_is_no_death_of_the_service_and_is_not_asked_again() -> None:
    asked = []

    async def make() -> None:
        asked.append(1)
        raise TypeError("an argument is missing")

    from tailrace.extras.tinker.client import TinkerSession  # needs the SDK

    with pytest.raises(TypeError, match="an argument is missing"):
        asyncio.run(TinkerSession(None, service_at("http://127.0.0.1:9"), 32).claimed(make))
    assert asked == [1]


def test_a_reply_that_does_not_come_is_a_death_of_the_service() -> None:
    async def make() -> None:
        raise TimeoutError("no reply in 60 s")

    from tailrace.extras.tinker.client import TinkerSession

    with pytest.raises(WorkerDied, match="the service: create a training client: TimeoutError: no reply"):
        asyncio.run(TinkerSession(None, service_at("http://127.0.0.1:9"), 32).claimed(make))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.7}, "sampling.temperature = 0.7: a service computes log-probs at temperature 1"),
        ({"top_p": 0.9}, "sampling.top_p = 0.9: .*; set it to 1.0"),
        ({"top_k": 20}, "sampling.top_k = 20: .*; set it to 0"),
        ({"stop": ("x",), "stop_token_ids": (3,)}, r"sampling.stop_token_ids = \[3\]: .*remove one of them"),
    ],
)
def test_sampling_that_the_service_cannot_say_or_correct_for_is_refused(
    changes: dict[str, object], words: str
) -> None:
    from tailrace.extras.tinker.client import check_algorithm_of_service

    check_algorithm_of_service(AlgorithmSettings(old_policy="recorded"), SamplingSettings(stop=("x",)))
    with pytest.raises(ConfigError, match=words):
        check_algorithm_of_service(
            AlgorithmSettings(old_policy="recorded"), SamplingSettings.model_validate(changes)
        )


def service_at(url: str, health_timeout_s: float = 60.0) -> TinkerEngineSettings:
    return TinkerEngineSettings(urls=(url,), base_model=BASE, health_timeout_s=health_timeout_s)


def test_a_service_that_accepts_connections_and_says_nothing_ends_the_run() -> None:
    from tailrace.extras.tinker.client import TinkerSession  # needs the SDK

    with socket.create_server(("127.0.0.1", 0)) as stopped:
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        session = TinkerSession(None, service_at(url, 0.5), 32)
        why = re.escape(f"the service at {url} did not answer for 0.5 s (engine.health_timeout_s)")
        with pytest.raises(WorkerDied, match=why):
            asyncio.run(asyncio.wait_for(session.keep(), 60))


def test_a_sample_of_another_version_than_the_samplers_is_refused() -> None:
    async def main() -> None:
        from tailrace.extras.tinker.client import TinkerEngine, TinkerSession  # need the SDK

        settings = service_at("http://127.0.0.1:9")
        session = TinkerSession(None, settings, 32)
        session.samplers = {3: None}
        session.opened.set()
        engine = TinkerEngine(
            session, settings, SamplingSettings(max_completion_tokens=8), TokenCounter(), str
        )
        await engine.open()
        (sample,) = fresh_samples(1)
        sample.pin = 2
        with pytest.raises(VersionGone, match="engine-0 has version 3 only, and not 2"):
            await engine.generate(sample)

    asyncio.run(main())


def test_a_stop_string_over_the_border_of_two_chunks_ends_a_completion(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tailrace.contracts.trainer import TrainerSettings
    from tailrace.extras.tinker.client import TinkerEngine, TinkerSession, TinkerTrainer

    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    tokenizer = load_tokenizer(QUICKSTART)

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    async def main() -> tuple[Sample, Sample, str]:
        settings = service_at(server.url).model_copy(update={"chunk_tokens": 2})
        session = await TinkerSession.open(settings, 4)
        free = SamplingSettings(max_completion_tokens=12)
        trainer = TinkerTrainer(session, TrainerSettings(), AlgorithmSettings(), free)
        await trainer.ready()
        engine = TinkerEngine(session, settings, free, TokenCounter(), decode)
        await engine.open()
        whole, cut = fresh_samples(2)
        whole.group.prompt = Prompt(0, tokenizer.encode("12 + 34 =\n"))
        await engine.generate(whole)
        cut.seed, stop = whole.seed, decode(whole.completion_ids[1:3])
        sampling = SamplingSettings(max_completion_tokens=12, stop=(stop,))
        counter = TokenCounter()
        other = TinkerEngine(session, settings, sampling, counter, decode)
        await other.open()
        await other.generate(cut)
        assert counter.num == cut.num_tokens == len(cut.behavior_logprobs)
        await session.close()
        return whole, cut, stop

    whole, cut, stop = asyncio.run(main())
    assert whole.num_tokens > 4
    end = next(n for n in range(1, 13) if stop in decode(whole.completion_ids[:n]))
    assert (cut.completion_ids, cut.finish_reason) == (whole.completion_ids[:end], "stop")


def test_a_step_that_the_service_skipped_is_a_skipped_step() -> None:
    """Three of them end a run."""
    from tinker import types

    from tailrace.algo.base import AlgorithmSettings
    from tailrace.contracts.sampling import SamplingSettings
    from tailrace.contracts.trainer import TrainerSettings
    from tailrace.extras.tinker.client import TinkerSession, TinkerTrainer
    from tailrace.types import SampleId

    class Training:
        async def optim_step(self, adam: Any) -> Any:
            return types.OptimStepResponse(metrics={"learning_rate": 1e-6, "skipped": 1.0})

    async def run() -> None:
        service = TinkerSession(None, service_at("http://127.0.0.1:9"), 4)
        sampling = SamplingSettings(max_completion_tokens=8)
        trainer = TinkerTrainer(service, TrainerSettings(), AlgorithmSettings(), sampling)
        trainer._training, trainer._samples = Training(), [SampleId(0, 0, 0)]
        stats = await trainer.step()
        assert (stats.skipped, isnan(stats.grad_norm)) == (True, True)
        assert await trainer.ess([], version=0) == 1.0

    asyncio.run(run())


def test_masked_tokens_have_no_weight_at_a_service() -> None:
    """The weight of a sample is shared by its other tokens."""
    from tailrace.contracts.trainer import TrainerSettings
    from tailrace.drivers.trainer.batch import TrainingSample
    from tailrace.extras.tinker.client import TinkerTrainer

    sample = TrainingSample(
        SampleId(0, 0, 0), [1, 2, 3], [7, 8, 9, 10], [-0.5, -1.0, -1.5, -2.0], advantage=3.0, num_masked=2
    )
    trainer = TinkerTrainer(None, TrainerSettings(), AlgorithmSettings(), SamplingSettings())  # type: ignore[arg-type]
    datum = trainer._datum(sample, "ppo").loss_fn_inputs
    assert datum["advantages"].data == [0.0, 0.0, 0.0, 0.0, 1.5, 1.5]
    assert datum["logprobs"].data == [0.0, 0.0, -0.5, -1.0, -1.5, -2.0]
