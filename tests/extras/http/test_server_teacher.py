"""A teacher behind `tailrace serve` gives the log-probs that a teacher in the run would give."""

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from helpers.served import served_here
from helpers.small_run import train_here, write_small_run
from helpers.tiny_models import letter_tokenizer, save_tiny_model
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.errors import RewardFailed, ServerRefused
from tailrace.extras.http.settings import ServerTeacherSettings
from tailrace.extras.http.teacher import ScoringClient
from tailrace.extras.serve.app import make_app
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


def with_words(model: Path, name: str, words: dict[str, str]) -> Path:
    """Copy a model; tokens are renamed, or left out where the new name is empty."""
    folder = shutil.copytree(model, model.parent / name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    named = {words.get(word, word): id for word, id in tokenizer["model"]["vocab"].items()}
    tokenizer["model"]["vocab"] = {word: id for word, id in named.items() if word}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


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
    own = PolicyModel.load(model, TrainerSettings(threads=1, dtype="float32"), temperature=1.0)
    for number, sample in enumerate(samples):
        data = TrainingSample.of(sample)
        (expected,) = own.logprobs_of([data])
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


def train_with_server(folder: Path, student: Path, teacher: str, *words: str) -> int:
    """Train one round with a teacher behind a server; returns the exit code."""
    path = write_small_run(folder)
    tables = f'[algorithm]\nname = "distillation"\n[teacher]\nkind = "server"\n{teacher}\n'
    path.write_text(path.read_text() + tables)
    return train_here(
        path, "--model.path", str(student), "--run.rounds", "1", "--run.eval_every", "0", *words
    )


def test_a_server_that_reads_fewer_tokens_than_a_sample_has_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Student and server have one tokenizer; the server's context is 64 tokens, the student's is 512."""
    save_tiny_model(tmp_path / "short", max_position_embeddings=64)
    with served_here(tmp_path / "short") as url:
        long = ("--sampling.max_completion_tokens", "100")
        assert train_with_server(tmp_path, model, f'url = "{url}"', *long) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "it reads 64 tokens, and samples may have 101; lower sampling.max_completion_tokens" in said


def test_a_server_of_another_vocabulary_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tokens have each other's id."""
    swapped = with_words(model, "swapped", {"x": "y", "y": "x"})
    with served_here(swapped) as url:
        assert train_with_server(tmp_path, model, f'url = "{url}"') == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "its tokens are not those of the model that is trained; name a model with the same tokenizer" in said
    )


@pytest.mark.parametrize("status", [403, 404, 405, 500, 501])
def test_only_a_server_without_the_routes_does_not_tell_its_vocabulary(status: int) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_POST = do_GET

    with HTTPServer(("127.0.0.1", 0), Refusing) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever, 0.01)
        refused = pytest.raises(ServerRefused, match=f"/vocabulary.* was answered with {status}")
        with refused if status in (403, 500) else nullcontext():
            url = f"http://127.0.0.1:{server.server_port}"
            client = ScoringClient(ServerTeacherSettings(kind="server", url=url))
            assert asyncio.run(client.has_tokens_of(letter_tokenizer())) is None
        server.shutdown()


@pytest.mark.slow
def test_a_server_with_more_tokens_after_those_of_the_model_teaches(tmp_path: Path, model: Path) -> None:
    student = with_words(model, "student", {"|": "", "}": ""})
    with served_here(model) as url:
        assert train_with_server(tmp_path, student, f'url = "{url}"') == 0


@pytest.mark.slow
def test_a_server_that_does_not_tell_its_vocabulary_needs_a_folder_with_its_tokenizer(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server lacks the route, as those of earlier versions."""

    def earlier(*given: Any) -> FastAPI:
        app = make_app(*given)

        @app.middleware("http")
        async def without(request: Request, answer: Any) -> Response:
            return Response(status_code=404) if request.url.path == "/vocabulary" else await answer(request)

        return app

    monkeypatch.setattr("tailrace.extras.serve.app.make_app", earlier)
    swapped = with_words(model, "swapped", {"x": "y", "y": "x"})
    with served_here(model) as url:
        assert train_with_server(tmp_path, model, f'url = "{url}"') == 2
        assert train_with_server(tmp_path, model, f'url = "{url}"\ntokenizer = "{swapped}"') == 2
        assert train_with_server(tmp_path, model, f'url = "{url}"\ntokenizer = "{model}"') == 0
    said = " ".join(capsys.readouterr().err.split())
    remedy = "update it if it is tailrace serve, or set teacher.tokenizer to a folder with its tokenizer"
    assert f"it does not tell its vocabulary; {remedy}" in said
    assert f"is 'x', whose id is {ord('y') - ord('A')} there" in said
