"""A teacher at a vLLM server gives the log-probs that a teacher in the run would give."""

import asyncio
import json
from pathlib import Path

import pytest
from vllm_cases import CONTEXT, Servers

from helpers.engine_contract import fresh_samples
from helpers.small_run import train_here, write_small_run
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.extras.http.self_test import MAX_LIMITS, MEAN_LIMITS
from tailrace.extras.http.settings import ServerTeacherSettings
from tailrace.extras.http.teacher import ScoringClient
from tailrace.types import Sample

pytestmark = pytest.mark.vllm


def samples_of(*lengths: int) -> list[Sample]:
    """Finished samples with so many tokens."""
    samples = fresh_samples(len(lengths))
    for number, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        ids = [(7 * place + number) % 61 for place in range(length)]
        sample.extend(ids, [-1.0] * length, 0)
        sample.finish_reason = "length"
    return samples


def test_a_vllm_server_and_a_folder_are_the_same_teacher(servers: Servers) -> None:
    """Samples of one prompt, one of them twice, and one that fills the context but for a token."""
    longest = CONTEXT - 1 - len(fresh_samples(1)[0].prompt.ids)
    samples = samples_of(1, 40, 300, 40, 0, longest)

    async def main() -> None:
        client = ScoringClient(ServerTeacherSettings(kind="server", url=servers.urls[0]))
        try:
            found.extend(await asyncio.gather(*map(client.logprobs, [*samples, samples[2]])))
        finally:
            await client.close()

    found: list[list[float]] = []
    servers.run(main())
    settings = TrainerSettings(threads=1, dtype="float32")
    folder = PolicyModel.load(servers.models.folders[0], settings, temperature=1.0)
    for number, sample in enumerate([*samples, samples[2]]):
        (expected,) = folder.logprobs_of([TrainingSample.of(sample)])
        off = [abs(mine - theirs) for mine, theirs in zip(found[number], expected, strict=True)]
        assert len(off) == sample.num_tokens
        assert max(off, default=0.0) <= MAX_LIMITS["float32"]
        assert sum(off) <= MEAN_LIMITS["float32"] * len(off)


@pytest.mark.parametrize(("version", "is_itself"), [(0, True), (1, False)])
def test_a_run_learns_from_a_vllm_server_unless_that_has_its_own_model(
    servers: Servers, tmp_path: Path, version: int, is_itself: bool
) -> None:
    path = write_small_run(tmp_path)
    path.write_text(
        f'{path.read_text()}\n[algorithm]\nname = "distillation"\n'
        f'[teacher]\nkind = "server"\nurl = "{servers.urls[0]}"\n'
    )
    words = [
        "--model.path",
        str(servers.models.folders[version]),
        "--run.rounds",
        "1",
        "--run.eval_every",
        "0",
    ]
    assert train_here(path, *words) == 0
    rows = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    step = next(row for row in rows if "loss" in row)
    assert (abs(step["kl"]) < 1e-5) == is_itself
    assert (abs(step["loss"]) < 1e-3) == is_itself
