"""Whole runs whose trainer divides its layers over two processes: a rank that is killed, a replay, devices
that engines and trainer share."""

import json
import os
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.architectures import SHAPES, random_model
from helpers.processes import worker_of
from helpers.small_run import EXAMPLES, train_here, trained_prompts, wait_for_steps, write_small_run
from tailrace.contracts.engine import counted_tokens
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger
from tailrace.record.events import Accumulated, EngineStateChanged, Event, Published, WeightsProbed
from tailrace.record.run_log import LogReader

pytestmark = pytest.mark.slow
DIVIDED = ["--trainer.tensor_parallel", "2", "--run.eval_every", "0", "--trainer.learning_rate", "1e-4"]
KEPT = ["--ledger.keep_tokens", "true"]
ON_DISK = [
    word for part in ("weights", "gradients", "optimizer") for word in (f"--trainer.offload.{part}", "disk")
]
ROUNDS = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rounds of two steps, the samples of which a seed and the weights fix."""
    path = write_small_run(tmp_path_factory.mktemp("divided"))
    path.write_text(path.read_text().replace('"rolloutpipe"', '"serial"'))
    return path


@pytest.fixture(scope="module")
def killed(config: Path) -> Path:
    """A run that has lost one of the two processes after its fifth step, two after a checkpoint."""
    return train_and_kill(config, *KEPT)


def train_and_kill(config: Path, *words: str) -> Path:
    folder = config.parent / "out"

    def kill_one() -> None:
        wait_for_steps(folder, 5)
        os.kill(worker_of(os.getpid(), "trainer-0-1"), signal.SIGKILL)

    again = ["--trainer.restarts", "1", "--run.checkpoint_every", "2", "--run.rounds", str(ROUNDS)]
    assert train_here(config, *DIVIDED, *words, *again, meanwhile=kill_one) == 0
    return folder.rename(config.parent / "killed")


def events(folder: Path) -> list[Event]:
    return [*LogReader(RunFolder(folder).events).read()]


def moments(folder: Path, state: str) -> list[float]:
    """When engines changed to a state."""
    found = [each for each in events(folder) if isinstance(each, EngineStateChanged)]
    return [each.time_s for each in found if each.state == state]


def steps(folder: Path) -> list[dict[str, float]]:
    """What each optimizer step has measured."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "entropy", "kl", "reward", "tokens/trained")
    return [{name: row[name] for name in names} for row in rows if "loss" in row]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_run_that_loses_one_of_the_processes_goes_on_and_loses_no_sample(killed: Path) -> None:
    with closing(Store.open(killed / "ledger.sqlite", only_read=True)) as store:
        books = read_ledger(store)
    totals = totals_of(books)
    assert len(books.lives) == 1 and totals.groups == {"trained": 4 * ROUNDS}
    assert totals.num_known_tokens + books.held_tokens == counted_tokens(killed / "counts")
    assert trained_prompts(killed) == {prompt: 2 for prompt in range(4 * ROUNDS)}
    assert len(steps(killed)) == 2 * ROUNDS


def test_engines_prove_that_the_weights_of_both_processes_have_arrived(killed: Path) -> None:
    found = events(killed)
    published = [event for event in found if isinstance(event, Published)]
    arrivals = [event.arrival for event in found if isinstance(event, WeightsProbed)]
    assert [event.version for event in published] == [*range(1, ROUNDS + 1)]
    assert all(event.changed_weights for event in published)
    assert {arrival.version for arrival in arrivals} >= {*range(1, ROUNDS + 1)}
    assert [arrival.cause for arrival in arrivals if arrival.cause] == []


def test_a_replay_and_a_trainer_that_sleeps_have_the_bits_of_the_run_that_lost_a_process(
    config: Path, killed: Path
) -> None:
    """The replay has no engines. With `colocated` engines and trainer take turns."""
    words = [*DIVIDED, "--run.rounds", str(ROUNDS)]
    turns = [*words, *ON_DISK, "--placement.kind", "colocated"]
    for each in ([*words, *KEPT, "--replay", str(killed)], turns):
        assert train_here(config, *each) == 0
        found = config.parent / "out"
        assert steps(found) == steps(killed)
        assert weights(found) == weights(killed)
        assert (len(moments(found, "asleep")) >= ROUNDS) == (each is turns)
        shutil.rmtree(found)


def test_a_replica_of_two_processes_trains_on_the_devices_that_engines_have_lent(config: Path) -> None:
    """Two replicas, the first of which trains early, make the steps of one process."""
    sizes = ["--schedule.groups_per_round", "8", "--schedule.groups_per_step", "8"]
    words = [*DIVIDED, "--schedule.name", "rolloutpipe_eager", *sizes, "--engine.replicas", "2"]
    elastic = ["--placement.kind", "elastic", "--trainer.replicas", "2", *ON_DISK]
    assert train_here(config, *words, *elastic) == 0
    divided = (config.parent / "out").rename(config.parent / "elastic")
    assert train_here(config, *words, "--trainer.tensor_parallel", "1") == 0
    for ours, wanted in zip(steps(divided), steps(config.parent / "out"), strict=True):
        assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    lent, back = moments(divided, "asleep"), moments(divided, "open")
    began_s = [event.start_s for event in events(divided) if isinstance(event, Accumulated)]
    asleep = [sum(at < time_s for at in lent) - sum(at < time_s for at in back) for time_s in began_s]
    assert {*asleep} == {1, 2}, "it trained while one engine generated, and when none did"


def test_experts_of_two_processes_one_of_which_was_killed_become_those_of_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    random_model("qwen3_moe", SHAPES["qwen3_moe"]).save_pretrained(tmp_path / "model")
    for file in (EXAMPLES / "quickstart" / "model").glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "model")
    config, words = write_small_run(tmp_path), ["--model.path", str(tmp_path / "model")]
    killed = train_and_kill(config, *words)
    assert "tailrace: restart 1 of 1" in capfd.readouterr().err
    words += [*DIVIDED, "--trainer.tensor_parallel", "1", "--run.rounds", str(ROUNDS)]
    assert train_here(config, *words) == 0
    for ours, wanted in zip(steps(killed), steps(tmp_path / "out"), strict=True):
        assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    found, wanted = (load_file(each / "model" / "model.safetensors") for each in (killed, tmp_path / "out"))
    assert found.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-4, msg=name)
