"""A teacher behind `tailrace serve` gives the log-probs that a teacher in the run would give."""

import asyncio
from pathlib import Path

import pytest

from helpers.served import served_here
from helpers.small_run import train_here, write_small_run
from helpers.tiny_models import letter_tokenizer, save_tiny_model
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.reward.settings import ServerTeacherSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.reference import TorchReference
from tailrace.errors import RewardFailed
from tailrace.extras.http.teacher import ScoringClient
from tailrace.types import Group, Prompt, Sample, SampleId

IDS = [7, 9, 11, 40, 3]


def sample_of(ids: list[int]) -> Sample:
    """A finished sample of these tokens."""
    prompt = Prompt(0, [3, 4, 5, 6])
    sample = Sample(SampleId(0, 0, 0), Group(prompt, 1, []))
    sample.completion_ids, sample.behavior_logprobs = ids, [-1.0] * len(ids)
    sample.num_tokens = len(ids)
    return sample


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


async def asked(settings: ServerTeacherSettings, *samples: Sample) -> list[list[float]]:
    client = ScoringClient(settings)
    try:
        return await asyncio.gather(*map(client.logprobs, samples))
    finally:
        await client.close()


def test_a_server_and_a_process_of_the_run_are_the_same_teacher(model: Path) -> None:
    samples = [sample_of(IDS), sample_of(IDS[:1]), sample_of([])]
    with served_here(model) as url:
        found = asyncio.run(asked(ServerTeacherSettings(kind="server", url=url), *samples))
    own = TorchReference.load(model, TrainerSettings(threads=1, dtype="float32"), temperature=1.0)
    for number, sample in enumerate(samples):
        data = TrainingSample.of(sample)
        (expected,) = own.logprobs([data])
        assert found[number] == pytest.approx(expected, abs=1e-4)
    assert len(found[0]) == len(IDS)


def test_a_token_that_the_server_does_not_know_fails_its_sample_at_once(model: Path) -> None:
    with served_here(model) as url, pytest.raises(RewardFailed, match="token id 99 is not below 61"):
        asyncio.run(asked(ServerTeacherSettings(kind="server", url=url), sample_of([99])))


def test_a_server_that_is_not_there_fails_a_sample_after_the_limit() -> None:
    settings = ServerTeacherSettings(kind="server", url="http://127.0.0.1:9", retry_timeout_s=0.0)
    with pytest.raises(RewardFailed, match="ConnectError"):
        asyncio.run(asked(settings, sample_of(IDS)))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--sampling.temperature", "0.7"], "a server gives log-probs of a prompt at temperature 1"),
        ([], "it gives no log-probs"),
    ],
)
def test_a_server_that_cannot_teach_is_refused(
    tmp_path: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_small_run(tmp_path)
    tables = '[algorithm]\nname = "distillation"\n[teacher]\nkind = "server"\nurl = "http://127.0.0.1:9"\n'
    path.write_text(path.read_text() + tables)
    assert train_here(path, *words) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_a_server_that_reads_fewer_tokens_than_a_sample_has_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Student and server have one tokenizer; the server's context is 64 tokens, the student's is 512."""
    path = write_small_run(tmp_path)
    save_tiny_model(tmp_path / "short", max_position_embeddings=64)
    with served_here(tmp_path / "short") as url:
        tables = f'[algorithm]\nname = "distillation"\n[teacher]\nkind = "server"\nurl = "{url}"\n'
        path.write_text(path.read_text() + tables)
        words = ["--model.path", str(model), "--sampling.max_completion_tokens", "100"]
        assert train_here(path, *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "it reads 64 tokens, and samples may have 101; lower sampling.max_completion_tokens" in said


def test_a_server_of_another_vocabulary_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_small_run(tmp_path)
    with served_here(model) as url:
        tables = f'[algorithm]\nname = "distillation"\n[teacher]\nkind = "server"\nurl = "{url}"\n'
        path.write_text(path.read_text() + tables)
        assert train_here(path) == 2
    assert "name a model with the same tokenizer" in capsys.readouterr().err
